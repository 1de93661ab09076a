"""Experts in packed codes: of one row and of many, by the kernel, and on meshes, against the dequantised ones."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import functional, packed_weight
from jaxllm.models.attention_context import Segments
from jaxllm.models.packed_weight import PackedWeight, is_packed
from jaxllm.quant import pack_params
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import IntGrid
from pallas_kernels._compat import TargetDevice
from pallas_kernels.packed_matmul import packed_matmul
from sharding import MeshSpec, abstract_params, shardings_of
from tests import tiny
from tests.quant.test_code_groups import GRIDS

SIZES = {"one row each": [1, 0, 1, 1], "one with many": [0, 5, 1, 0], "none": [0, 0, 0, 0], "all": [40, 3, 0, 57]}


@pytest.mark.parametrize("grid", GRIDS[:5], ids=lambda grid: grid.name)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_matmuls_by_expert_are_those_of_dense_experts(grid, sizes, platform, rng, float64, monkeypatch):
    """Rows beyond the last expert's are zeros; with a kernel, whose plain implementation stands in here."""
    form = CodeGroups(grid, 16, -2)
    packed = PackedWeight(*form.pack(jnp.asarray(rng.normal(size=(4, 32, 6)) + 0.2)), form)
    own = np.asarray(SIZES[sizes])
    x, dense = rng.normal(size=(own.sum() + 1, 32)), np.asarray(packed.dense(jnp.float64))
    used = []
    if platform == "tpu":
        monkeypatch.setattr(packed_weight, "target_device", lambda: TargetDevice("tpu", "TPU Test"))
        monkeypatch.setattr(packed_weight, "packed_matmul", lambda *args: used.append(1) or packed_matmul(*args))
    got = jax.jit(packed.grouped_matmul)(jnp.asarray(x), jnp.asarray(own, jnp.int32))
    want = np.zeros((len(x), 6))
    for matrix, begin, size in zip(dense, np.cumsum(own) - own, own, strict=True):
        want[begin : begin + size] = x[begin : begin + size] @ matrix
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 if used else 1e-12)
    assert bool(used) == (platform == "tpu" and sizes != "all" and grid.bits in (3, 4, 8))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", ["expert=2,tensor=2", "fsdp=2,expert=2", "data=2,tensor=2"])
@pytest.mark.parametrize("length", [1, 6])
def test_a_mixture_on_a_mesh_is_that_of_one_device(mesh, length, rng, float64):
    """Logits of packed experts that are split, for one token a row (decode) and for several."""
    config = tiny.decoder(embed_dim=128, heads=4, head_dim=32, layers=1, moe=(4, 2, 64, True))
    model, spec = functional(config), MeshSpec.parse(mesh)
    built = spec.build(jax.devices()[: math.prod(n for _, n in spec.axes)])
    tokens = rng.integers(0, config.vocab_size, (4, length), dtype=np.int32)

    def logits(params: Any, tokens: Any) -> Any:
        hidden, _ = model.forward(params, tokens, jnp.broadcast_to(jnp.arange(length), tokens.shape), Segments())
        return model.head(params, hidden)

    with jax.set_mesh(built):
        abstract = abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
        packed = pack_params(model, model.init(jax.random.key(0), shardings_of(abstract)), "int4")
        placed = jax.device_put(tokens, jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built)))
        got = np.asarray(jax.jit(logits)(packed, placed))
    experts = packed["segments"]["0"]["0"]["mlp"]["experts"]
    assert all(isinstance(one.format.grid, IntGrid) for one in experts.values())
    alone = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), packed)
    dense = jax.tree.map(lambda x: x.dense(jnp.float64) if is_packed(x) else x, alone, is_leaf=is_packed)
    np.testing.assert_allclose(got, jax.jit(logits)(dense, jnp.asarray(tokens)), rtol=0, atol=1e-10)
