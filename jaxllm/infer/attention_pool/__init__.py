"""Attention pool: KV cache pages and the attention over them on devices of their own, weights on others."""
