"""Benchmarks of post-training."""
