"""Fused cross-entropy and token log-probabilities of a linear head: all logits are never materialised at once."""

from pallas_kernels.cross_entropy.api import CrossEntropyStats as CrossEntropyStats
from pallas_kernels.cross_entropy.api import linear_cross_entropy as linear_cross_entropy
from pallas_kernels.cross_entropy.token_logprobs import linear_token_logprobs as linear_token_logprobs
