"""ShadowKV: low-rank keys on the device, values in host memory, and the chunks that queries choose."""
