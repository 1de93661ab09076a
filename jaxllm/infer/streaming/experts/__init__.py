"""Experts of mixtures in slots: on the device, on the host or in files, and who computes them."""
