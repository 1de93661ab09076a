"""Cached attention: a few new queries (prefill chunk or decode) attend to a contiguous key-value cache."""

from pallas_kernels.cached_attention.reference import cached_attention_reference as cached_attention_reference
from pallas_kernels.cached_attention.xla import cached_attention as cached_attention
