"""Retention rules of the KV cache: which entries stay, by position or by attention scores."""
