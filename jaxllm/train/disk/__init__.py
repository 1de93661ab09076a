"""Disk tier of training: the optimizer state is in files, and is read and written layer by layer for the update."""
