"""Batches by turns: a layer that is on the device computes several batches, whose KV cache may be in any tier."""
