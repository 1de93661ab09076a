"""Benchmarks of parallel layouts: compiled programs of two layouts of the same work, side by side."""
