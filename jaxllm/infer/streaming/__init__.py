"""Inference with weights that are not all on the device: they come from the host or from files, layer by layer."""
