"""Pipeline parallelism: schedules as data, their picture, and one executor for all of them (docs/train/pipeline.md)."""
