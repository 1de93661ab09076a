"""Multi-head latent attention: which of its two forms is chosen, and that a pool is not copied where both occur."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.infer import empty_cache
from jaxllm.infer.runner.paged_cache import PagedCache, layer_groups
from jaxllm.models import BlockConfig, DecoderConfig, MLAConfig, MlpConfig, functional
from pallas_kernels.paged_attention import Slots
from tests import environment, quick

SMALL = MLAConfig(heads=2, latent=12, nope_dim=4, rope_dim=4, value_dim=4)


def decoder(latent: MLAConfig, dtype: str) -> DecoderConfig:
    return DecoderConfig(40, 8, 2, pattern=(BlockConfig(latent, MlpConfig(8)),), dtype=dtype, param_dtype=dtype)  # type: ignore[arg-type]


def test_the_cheaper_form_is_chosen():
    v3 = MLAConfig(heads=128, latent=512, q_latent=1536, nope_dim=128, rope_dim=64, value_dim=128)
    assert v3.prefers_expanded(2)
    assert v3.prefers_expanded(4096)
    assert not v3.prefers_expanded(1)
    wide = dataclasses.replace(v3, nope_dim=512, value_dim=512)
    assert not wide.prefers_expanded(4096)


def prefill(config: DecoderConfig, pages: int, invariant: bool = False) -> jax.stages.Traced:
    """A step of eight tokens against a pool of so many pages."""
    model, groups = functional(config), layer_groups(config)
    form = groups[0].format()

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pool = jax.ShapeDtypeStruct((config.layers, pages, form.kv_heads, 16, form.width), jnp.dtype(config.dtype))
    cache = PagedCache((Slots(pool),), (ints(1, 2, 4),), ints(1, 3), ints(1, 2), groups, invariant=invariant)
    step = jax.jit(model.forward, donate_argnums=3)
    return step.trace(model.abstract(), ints(1, 8), ints(1, 8), cache)


@pytest.mark.drawn(1)
def test_a_pool_is_not_copied():
    config = decoder(SMALL, "float32")
    pool = config.layers * 400 * 16 * config.blocks[0].attention.kv_spec.elements * 4
    compiled = prefill(config, 400).lower().compile(environment.AS_EVER)
    assert "conditional(" in (compiled.as_text() or "")
    assert compiled.memory_analysis().temp_size_in_bytes < pool / 2  # type: ignore[union-attr]


def test_a_batch_invariant_step_is_computed_in_one_way():
    config = decoder(SMALL, "float32")
    ways = [str(prefill(config, 4, invariant=way).jaxpr).count("cond[") for way in (False, True)]
    assert ways[0] == ways[1] + 1


@pytest.mark.drawn(1)
def test_prefill_on_a_mesh():
    """Expanded where heads are split, into a cache that holds one of the latent for each shard."""
    config = decoder(SMALL, "float32")
    params = jax.tree.map(jnp.asarray, quick.params(config, 0))
    tokens = np.random.default_rng(0).integers(0, 40, (2, 9), np.int32)
    want = quick.logits(config, params, tokens)
    model = functional(config)
    built = sharding.MeshSpec.parse("tensor=2").build(jax.devices()[:2])
    with jax.set_mesh(built), sharding.use_rules(model.rules):
        shardings = sharding.abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
        params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, shardings)
        step = quick.jit(lambda p, t, at, c: (lambda h: (model.head(p, h[0]), h[1]))(model.forward(p, t, at, c)))
        cache, at = empty_cache(config, 2, 9), jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))
        first, cache = step(params, jnp.asarray(tokens[:, :8]), at[:, :8], cache)
        last, _ = step(params, jnp.asarray(tokens[:, 8:]), at[:, 8:], cache)
    got = np.concatenate([first, last], axis=1)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
