"""JAX and Pallas kernels of one device's shard: attention, cross-entropy, grouped matmul, RMS norm, ring attention.

Mesh axes appear only by name, where a kernel reduces or communicates over them. Needs only jax, numpy and jaxtyping.
"""

from pallas_kernels._dispatch import OPERATIONS as OPERATIONS
from pallas_kernels._dispatch import explain as explain
from pallas_kernels._self_check import stored_verdicts as stored_verdicts
from pallas_kernels.cached_attention import cached_attention as cached_attention
from pallas_kernels.cross_entropy import CrossEntropyStats as CrossEntropyStats
from pallas_kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from pallas_kernels.flash_attention import flash_attention as flash_attention
