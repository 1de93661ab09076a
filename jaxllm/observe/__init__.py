"""What a run shows: its events and goodput, where its metrics go, profiles of its steps, and a page of all of it.

Files only: nothing here starts jax to read a run.
"""
