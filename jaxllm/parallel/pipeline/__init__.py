"""Pipeline parallelism: schedules as data (1F1B, interleaved, zero bubble), and one executor for all of them.

See docs/train/pipeline.md.
"""
