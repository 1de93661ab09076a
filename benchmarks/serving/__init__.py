"""Benchmarks of techniques of serving."""
