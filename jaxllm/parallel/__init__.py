"""Parallelism over devices and processes: process groups, plans (meshes and options), sharding tables, pipelines."""
