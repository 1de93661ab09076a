"""Engine step: one compiled program for prefill chunks and decode tokens, its shape, buffers and halves."""
