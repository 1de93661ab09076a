"""Disaggregated pools: prefill and decode on engines of their own, in one process; KV cache pages go between them."""
