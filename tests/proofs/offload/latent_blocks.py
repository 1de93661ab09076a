"""Batches by turns of a model with latents (MLA), with KV cache formats that lose bits, parts in each tier."""

from __future__ import annotations

import tempfile
from pathlib import Path

from jaxllm.infer.streaming.blocks.cache_placement import CachePlacement
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from tests.proofs.harness import proof
from tests.proofs.offload.blocks import every_tier
from tests.proofs.offload.streamed_weights import beside_resident

BYTES = 16000
"""Of the KV cache on the device, and on the host: room for a part, and not for all."""


@proof("offload", cases=["int8", "fp8", "int4"], sample=1, float64=True, bound={"logprobs": 1e-12})
def quantised_latent_blocks_too(kv_format: str) -> dict[str, float]:
    """As ``quantised_blocks_too``; layers are read from files as well."""
    with tempfile.TemporaryDirectory() as folder:
        cache = CachePlacement(2, BYTES, BYTES, Path(folder))
        placement = WeightPlacement(2, host_units=1, disk=Path(folder), cache=cache)
        return {"logprobs": beside_resident("deepseek_v3", kv_format, placement, every_tier)}
