"""Records of a run in its directory: metrics, receipt, live view, loss curve."""
