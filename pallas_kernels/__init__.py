"""Per-shard arithmetic: what runs inside one chip. Mesh axes are known by name only, where something must be reduced.

Needs jax and jaxtyping only.
"""

from pallas_kernels._dispatch import explain as explain
from pallas_kernels.cached_attention import cached_attention as cached_attention
from pallas_kernels.cross_entropy import CrossEntropyStats as CrossEntropyStats
from pallas_kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from pallas_kernels.flash_attention import flash_attention as flash_attention
