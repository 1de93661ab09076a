"""Environments: what answers a policy's turns in reinforcement learning: tools, games, other programs."""
