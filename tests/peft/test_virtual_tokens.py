"""Prefix and prompt tuning against their definitions, in float64: each document alone, with dense attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.models import BlockConfig, DecoderConfig, MLAConfig, functional
from jaxllm.models.param_subset import merge, select
from jaxllm.peft import Adapter, AdapterConfig, AdapterError, check_adapter, start_params
from jaxllm.peft.adapted_model import adapted_model
from jaxllm.train import RunConfig
from jaxllm.train.run_model import run_model, trained_params
from sharding import MeshSpec
from tests import quick, tiny
from tests.peft.adapter_meshes import rows_of

P = 4
MODEL = tiny.decoder(heads=4, kv_heads=2, window=6, layers=2)
KINDS = ("prefix", "prompt")


def start(kind: str) -> tuple[RunConfig, Any, Any, Any]:
    """(run, adapted model, base, parameters that have moved)."""
    adapter = AdapterConfig(kind, tokens=P)  # type: ignore[arg-type]
    run = RunConfig(model=MODEL, adapter=adapter, data=DataConfig(batch_size=2, seq_len=12))
    base = functional(MODEL).init(jax.random.key(0))
    model = run_model(run)
    params = start_params(model, adapter, base, MeshSpec.parse("dp").build(jax.devices()[:1]), 1)
    mask, keys = trained_params(run, model), iter(jax.random.split(jax.random.key(2), 99))
    moved = jax.tree.map(lambda on, x: x + jax.random.normal(next(keys), x.shape, x.dtype) if on else x, mask, params)
    return run, model, params, moved


@dataclass(frozen=True)
class DensePrefix:
    """Attention of one text to the keys and values of a prefix and to its own, with all scores."""

    keys: Any
    values: Any

    def attend(self, layer, q, k, v, positions, params, sinks=None):
        k, v = (jnp.concatenate([one[layer][None], x], axis=1) for one, x in ((self.keys, k), (self.values, v)))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        at, of = positions[0][:, None], jnp.concatenate([jnp.arange(P), positions[0]])
        seen = (of <= at) & (at - of < (params.window or 10**6))
        scores = jnp.where(seen, params.scale * jnp.einsum("bqnh,bknh->bnqk", q, k), -jnp.inf)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), v), self


jax.tree_util.register_dataclass(DensePrefix, data_fields=["keys", "values"], meta_fields=[])


def hidden_alone(kind: str, params: Any, tokens: Any) -> Any:
    """Hidden states of one document by the method's definition, from the functions of the base."""
    base, size = functional(MODEL), tokens.shape[0]
    positions = jnp.arange(P, P + size)[None]
    if kind == "prefix":
        layers = params["segments"]["0"]["0"]
        prefix = [layers["attention"][f"prefix_{name}"] for name in ("keys", "values")]
        ours = {name: value for name, value in layers["attention"].items() if not name.startswith("prefix_")}
        plain = params | {"segments": {"0": {"0": layers | {"attention": ours}}}}
        return base.forward(plain, tokens[None], positions, DensePrefix(*prefix))[0][0]
    prompt = params["embedding"]["prompt"]
    plain = params | {"embedding": {"table": params["embedding"]["table"]}}
    x = jnp.concatenate([prompt[None], base.embed(plain, tokens[None], positions)], axis=1)
    return base.blocks(plain, x, jnp.arange(P + size)[None], base.text_context(None, "contiguous"))[0][0, P:]


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("float64")
def test_virtual_tokens_are_their_definition(kind: str) -> None:
    assert error_of_definition(kind) < 1e-10


def error_of_definition(kind: str) -> float:
    """Loss and gradients of packed rows: those of every document alone; gradients of the virtual tokens only.

    Returns:
        the largest relative difference of the loss and of a virtual token's gradients.
    """
    run, model, _, params = start(kind)
    batch = rows_of(dataclasses.replace(run, data=DataConfig(batch_size=8, seq_len=8)))
    rows = jax.tree.map(jnp.asarray, batch)
    ids = np.asarray(batch.segment_ids)
    documents = [(r, np.flatnonzero(ids[r] == d)) for r in range(2) for d in range(1, ids[r].max() + 1)]
    assert len(documents) > 2

    def packed(trained: Any) -> Any:
        context = model.training_context(rows.segment_ids[:2])
        hidden, _ = model.forward(merge(trained, params), rows.tokens[:2], rows.positions[:2], context)
        return sum(jnp.sum(jnp.sin(3.0 * hidden[r, at])) for r, at in documents)

    def alone(trained: Any) -> Any:
        whole = merge(trained, params)
        return sum(jnp.sum(jnp.sin(3.0 * hidden_alone(kind, whole, rows.tokens[r, at]))) for r, at in documents)

    trained = select(trained_params(run, model), params)
    with jax.set_mesh(MeshSpec.parse("dp").build(jax.devices()[:1])):  # the definition's gradients index a prefix
        got, want = (quick.jit(jax.value_and_grad(fn))(trained) for fn in (packed, alone))
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want[1])) > 1e-3
    return tiny.leaf_error(jax.device_get(got), jax.device_get(want))


@pytest.mark.usefixtures("float64")
def test_a_prompt_starts_as_tokens_of_the_vocabulary() -> None:
    _, _, params, _ = start("prompt")
    table, prompt = (np.asarray(params["embedding"][name]) for name in ("table", "prompt"))
    assert [int((table == row).all(-1).sum()) for row in prompt] == [1] * P


def test_fields_of_other_methods_are_refused() -> None:
    for adapter, name in (
        (AdapterConfig("prefix", rank=4), "rank"),
        (AdapterConfig("prompt", targets=("mlp",)), "targets"),
        (AdapterConfig("lora", tokens=5), "tokens"),
    ):
        with pytest.raises(ConfigError, match=rf"adapter\.{name} = .* has no effect"):
            adapted_model(functional(MODEL), adapter)
    with pytest.raises(ConfigError, match="MLAConfig has no keys and values"):
        adapted_model(functional(DecoderConfig(pattern=(BlockConfig(MLAConfig()),))), AdapterConfig("prefix"))


def test_a_base_without_places_refuses_them_by_name() -> None:
    """As an engine does that is given them beside adapters of weights."""
    adapter = Adapter("prompt", {}, {}, {}, {"embedding/prompt": np.zeros((P, MODEL.embed_dim))})
    with pytest.raises(AdapterError, match=r"virtual tokens \(prompt tuning\)"):
        check_adapter(adapter, functional(MODEL))


def test_rows_leave_room_for_virtual_tokens() -> None:
    """Documents of packed rows have their order and targets; places of virtual tokens are padding with positions."""
    from jaxllm.data.sequence_packing import pack_documents

    starts, lengths = np.array([0, 5, 12, 15]), np.array([5, 7, 3, 9])
    tokens = np.arange(24)
    plain = pack_documents(starts, lengths, 8)
    ours = replace(plain, seq_len=8 + P, virtual_tokens=P)
    rows = np.arange(plain.rows)
    one, other = plain.gather(tokens, rows), ours.gather(tokens, rows)
    assert ours.padding == plain.padding
    for name in ("tokens", "targets", "segment_ids"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name)[:, P:])
    real = one.segment_ids > 0
    np.testing.assert_array_equal((one.positions + P)[real], other.positions[:, P:][real])
    assert (other.positions[:, :P] == np.arange(P)).all()
    assert (other.segment_ids[:, :P] == 0).all()
    assert (other.targets[:, :P] == -1).all()
