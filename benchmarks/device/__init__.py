"""Device kit: what is to be measured on an accelerator, in slices: ``python -m benchmarks.device --help``."""
