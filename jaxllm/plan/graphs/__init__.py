"""Graphs of values: what to keep, compute again or move, as integer programs; and bytes without a compiler."""
