"""Records of a run: metrics, receipt, live view and loss curve in the directory of the run."""
