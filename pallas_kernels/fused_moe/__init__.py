"""Fused mixture of experts for few tokens: dispatch, the experts' three matmuls, and combine."""

from pallas_kernels.fused_moe.api import fused_moe as fused_moe
