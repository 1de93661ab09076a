"""Adapters of the matrices of experts, in float64: the dense merged weights; what has none is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from jaxllm.models.param_subset import merge, select, trainable_mask
from jaxllm.peft import AdapterConfig, AdapterError, merge_adapters, start_params, write_peft
from jaxllm.peft.adapted_model import adapted_model, adapter_of
from jaxllm.peft.adapter import check_adapter
from jaxllm.peft.method_table import ADAPTER_METHODS
from sharding import MeshSpec
from tests import quick, tiny

pytestmark = pytest.mark.usefixtures("float64")

MODEL = tiny.decoder(layers=2, moe=(4, 2, 6, True))
TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
ABLE = sorted(kind for kind, method in ADAPTER_METHODS.items() if method.experts)


def loss(model: Any, params: Any) -> Any:
    hidden, _ = model.forward(params, TOKENS, jnp.arange(8)[None], Segments(jnp.ones_like(TOKENS)))
    return jnp.mean(jnp.sin(3.0 * hidden))


def adapted(kind: str = "lora") -> tuple[Any, Any, Any]:
    """(adapted model, base's parameters, parameters after a while of training)."""
    base = functional(MODEL)
    config = AdapterConfig(kind, 3, 5.0, ("experts", "q"))  # type: ignore[arg-type]
    model, given = adapted_model(base, config), base.init(jax.random.key(0))
    params = start_params(model, config, given, MeshSpec.parse("dp").build(jax.devices()[:1]), 1)
    params = jax.tree.map(jnp.asarray, jax.device_get(params))  # off the mesh
    assert float(loss(model, params)) == pytest.approx(float(loss(base, given)), abs=1e-14)
    keys = iter(jax.random.split(jax.random.key(2), 99))
    mask = trainable_mask(model, ("adapter",))
    moved = jax.tree.map(lambda on, x: x + 0.1 * jax.random.normal(next(keys), x.shape) if on else x, mask, params)
    return model, given, merge(select(mask, moved), params)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("kind", ABLE)
def test_an_expert_is_its_merged_matrix(kind: str) -> None:
    """Loss, and gradients of each expert's own factors, are those of the dense merged matrices."""
    model, _, params = adapted(kind)
    scale = 5.0 / (np.sqrt(3) if kind == "rslora" else 3)

    def dense(node: Any) -> Any:
        if not hasattr(node, "low_rank"):
            return node
        letters = "leir,lerf->leif" if node.low_rank.a.ndim == 4 else "lir,lrab->liab"
        return node.base + scale * jnp.einsum(letters, node.low_rank.a, node.low_rank.b)

    def merged(tree: Any) -> Any:
        return jax.tree.map(dense, tree, is_leaf=lambda x: hasattr(x, "low_rank"))

    mask = trainable_mask(model, ("adapter",))
    trained = select(mask, params)
    got = quick.jit(jax.value_and_grad(lambda t: loss(model, merge(t, params))))(trained)
    want = quick.jit(jax.value_and_grad(lambda t: loss(functional(MODEL), merged(merge(t, params)))))(trained)
    assert tiny.leaf_error(jax.device_get(got), jax.device_get(want)) < 1e-10
    found = merge_adapters(model, params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(merged(params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(trained)}
    assert (2, 4, MODEL.embed_dim, 3) in shapes
    assert (2, 4, 3, 6) in shapes


def test_what_cannot_adapt_experts_is_named() -> None:
    model = functional(MODEL)
    for kind in ("dora", "qlora", "lora_ga"):
        for targets in (("experts",), ("mlp",), ("*",)):
            with pytest.raises(ConfigError, match=f"{kind} does not adapt.*adapts experts: lora, rslora, longlora"):
                adapted_model(model, AdapterConfig(kind, 3, targets=targets))  # type: ignore[arg-type]
        assert adapted_model(model, AdapterConfig(kind, 3, targets=("attention",))).adapt  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_matrix_has_no_adapter(tied: bool) -> None:
    model = functional(tiny.decoder(layers=1, tied=tied))
    for target in ("lm_head", "head", "embedding"):
        with pytest.raises(ConfigError, match="Train them whole.*" + ("table" if tied else "head/weight")):
            adapted_model(model, AdapterConfig("lora", targets=(target,)))


@pytest.mark.drawn(1)
def test_adapters_of_experts_are_merged_and_not_written(tmp_path: Path) -> None:
    """Neither as a file of peft, nor served beside others: they would lose the experts' factors."""
    model, _, params = adapted()
    adapter = adapter_of(AdapterConfig("lora", 3, 5.0), select(trainable_mask(model, ("adapter",)), params))
    source = {"model_type": "mixtral"}
    with pytest.raises(AdapterError, match="merging them into the model"):
        check_adapter(adapter, functional(MODEL))
    with pytest.raises(AdapterError, match=r"experts/.*merge it into the model"):
        write_peft(tmp_path / "x", adapter, functional(MODEL), source)
    assert not (tmp_path / "x").exists()
