"""Multi-head latent attention: its two forms agree, and a cache holds a latent and a rotated key per token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.infer.runner.page_programs import empty_pools
from jaxllm.infer.runner.paged_cache import PagedCache, layer_groups
from jaxllm.models import BlockConfig, DecoderConfig, MLAConfig, MlpConfig, RopeConfig, YarnScaling, functional
from tests import quick
from tests.proofs.harness import proof
from tests.proofs.real_models.families import cached, error, full


def drawn(rng: np.random.Generator) -> DecoderConfig:
    """A random model with latent attention."""
    scaling = [None, YarnScaling(4.0, 16, magnitude=1.2)][rng.integers(2)]
    latent = MLAConfig(
        heads=int(rng.integers(1, 5)),
        latent=int(rng.integers(3, 9)),
        q_latent=[None, int(rng.integers(3, 9))][rng.integers(2)],
        nope_dim=int(rng.integers(1, 7)),
        rope_dim=2 * int(rng.integers(1, 4)),
        value_dim=int(rng.integers(1, 7)),
        rope=RopeConfig(scaling=scaling, interleaved=bool(rng.integers(2))),
        bias=bool(rng.integers(2)),
        scale=[None, 0.3][rng.integers(2)],
    )
    layers = int(rng.integers(1, 4))
    block = BlockConfig(latent, MlpConfig(7))
    return DecoderConfig(40, 8, layers, pattern=(block,), dtype="float64", param_dtype="float64")


@proof("moe_models", count=100, sample=1, bound=1e-11, float64=True)
def absorbed_is_expanded(seed: int) -> float:
    """Prefill and decode against a cache of latents equal the expanded form over the whole text.

    A first chunk is expanded where that is fewer products, one that goes on from it is absorbed, and so is decoding.
    """
    rng = np.random.default_rng(seed)
    config = drawn(rng)
    params = jax.tree.map(jnp.asarray, quick.params(config, seed, scale=0.5))
    tokens = rng.integers(0, 40, (2, 14), dtype=np.int32)
    return error(cached(config, params, tokens, (5, 11)), full(config, params, tokens))


def argument_bytes(config: DecoderConfig, pages: int, page_size: int) -> int:
    """Bytes of what a compiled decoding step is given, of which the pool is all that depends on its pages."""
    model, groups = functional(config), layer_groups(config)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pools = jax.eval_shape(lambda: empty_pools(model.rules, groups, (pages,), page_size, 1))
    cache = PagedCache(pools, (ints(1, 2, 4),), ints(1, 3), ints(1, 2), groups, decode_only=True)

    def step(params: Any, tokens: Any, positions: Any, cache: Any) -> Any:
        hidden, cache = model.forward(params, tokens, positions, cache)
        return model.head(params, hidden), cache

    compiled = quick.jit(step, donate_argnums=3).lower(model.abstract(), ints(1, 2), ints(1, 2), cache).compile()
    return compiled.memory_analysis().argument_size_in_bytes  # type: ignore[union-attr]


SIZES = [(61, 512, 64, "bfloat16"), (27, 512, 64, "float32"), (5, 24, 6, "float32")]
"""Layers, latent, rotated key: DeepSeek-V3's, DeepSeek-V2-Lite's, and small ones."""


@proof("moe_models", cases=SIZES, sample=1, bound={"bytes": 0.0})
def cache_bytes(case: tuple[int, int, int, str]) -> dict[str, float]:
    """A token takes (latent + rotated key) numbers a layer, in the program that the compiler made."""
    layers, latent, rope, dtype = case
    attention = MLAConfig(heads=2, latent=latent, nope_dim=4, rope_dim=rope, value_dim=4)
    block = BlockConfig(attention, MlpConfig(8))
    config = DecoderConfig(40, 8, layers, pattern=(block,), dtype=dtype, param_dtype=dtype)  # type: ignore[arg-type]
    more = argument_bytes(config, 12, 16) - argument_bytes(config, 4, 16)
    wanted = 8 * 16 * layers * (latent + rope) * jnp.dtype(dtype).itemsize
    assert dataclasses.replace(config, layers=1).blocks[0].attention.kv_spec.elements == latent + rope
    return {"bytes": float(more - wanted)}
