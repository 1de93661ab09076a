"""Uneven rows: devices of one data-parallel mesh that process different numbers of micro-batches in a step."""
