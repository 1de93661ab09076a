"""Disk tier of training: optimizer state, parameters and saved inputs of layers in files, streamed layer by layer."""
