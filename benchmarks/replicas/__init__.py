"""Benchmarks of training with replicas."""
