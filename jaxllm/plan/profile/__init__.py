"""Step time by replay: operators measured on devices, on the task graph of a layout (vTrain, arXiv:2312.12391)."""
