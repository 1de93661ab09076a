"""Checkpoints of other training frameworks: fragments of ranks, made whole by rules."""
