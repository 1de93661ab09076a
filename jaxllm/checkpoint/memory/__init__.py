"""Snapshots in the memory of other processes and hosts: what survives a trainer's crash, and the loss of a host."""
