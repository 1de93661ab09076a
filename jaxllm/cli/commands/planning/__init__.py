"""Commands that plan without running: layouts, compiled programs, sizes, sharding, rooflines, pipeline schedules."""
