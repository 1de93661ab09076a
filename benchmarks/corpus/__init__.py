"""Benchmarks of preparing corpora."""
