"""Formats of packed weights: one file and one row of the format table each."""
