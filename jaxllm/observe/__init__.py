"""Observability of runs: event log and goodput, metric sinks, profiles, and an HTML report of all of them.

Reads and writes files only: reading a run never initialises jax.
"""
