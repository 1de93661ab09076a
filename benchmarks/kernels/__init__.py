"""``python -m benchmarks.kernels``."""
