"""Objectives of post-training: losses of preferences between completions, and of a policy's rollouts."""
