"""Many devices and many processes: joining them, plans for them, and what a plan costs."""
