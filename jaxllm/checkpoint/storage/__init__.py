"""Checkpoint storage: the on-disk format, its manifest and hashes, and the file systems it is written to."""
