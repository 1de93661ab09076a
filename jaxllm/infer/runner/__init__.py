"""Model runner: the programs, KV caches and sampler of an engine, on the devices."""
