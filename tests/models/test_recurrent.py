"""Recurrent layers: packed rows, eight devices against one, training with checkpoints, and what is refused by name."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError, from_dict, to_dict
from jaxllm.convert.load import load_model
from jaxllm.hub import HubError
from jaxllm.hub.families.config_json import config_json
from jaxllm.models import DecoderConfig, RecurrentConfig, Segments, functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import predict_layout, search
from jaxllm.train import train
from jaxllm.train.model_flops import hardware_flops_per_token, train_flops_per_token
from sharding import MeshSpec
from tests import quick, tiny
from tests.infer import engines
from tests.train import runs
from tests.train.test_plans import loss_and_grads

CELLS = ("lstm", "gru", "slstm")


def alternating(config: DecoderConfig, cell: str, out_norm: str = "head", head_dim: int = 8) -> DecoderConfig:
    """The decoder with a recurrent layer in every other block, the first included."""
    (block,) = config.pattern
    layer = RecurrentConfig(cell, block.attention.heads, head_dim, out_norm)  # type: ignore[arg-type]
    return dataclasses.replace(config, pattern=(dataclasses.replace(block, attention=layer), block))


@pytest.mark.parametrize("cell", CELLS)
def test_a_packed_row_is_its_documents_alone(cell, rng, float64):
    config = alternating(tiny.decoder(), cell)
    model, params = functional(config), jax.tree.map(jnp.asarray, quick.params(config))
    lengths = [5, 1, 7, 3]
    tokens = rng.integers(0, 64, sum(lengths))
    positions = np.concatenate([np.arange(n) for n in lengths])
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    row, places, ids = (jnp.asarray(one[None]) for one in (tokens, positions, segments))
    whole = model.forward(params, row, places, Segments(ids))[0]
    start = 0
    for n in lengths:
        own = jnp.asarray(tokens[None, start : start + n])
        alone = model.forward(params, own, jnp.arange(n)[None], Segments())[0]
        np.testing.assert_allclose(whole[:, start : start + n], alone, rtol=0, atol=1e-11)
        start += n


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("cell", "mesh", "plan"),
    [
        ("slstm", "data=4,tensor=2", ParallelConfig()),
        ("gru", "data=2,fsdp=2,tensor=2", ParallelConfig(zero=1)),
        ("lstm", "fsdp=4,tensor=2", ParallelConfig(zero=2, sequence=True)),
        ("slstm", "fsdp=4,tensor=2", ParallelConfig(sequence=True, overlap="ring")),
    ],
)
def test_eight_devices_are_one(cell, mesh, plan, rng, float64):
    config = alternating(tiny.decoder(norms="sandwich"), cell)
    batch = tiny.batch(int(rng.integers(2**16)), 8, 12, 64, packed=True)
    (sums, grads), (wanted, expected) = (
        loss_and_grads(config, batch, *on) for on in ((mesh, plan), ("data=1", ParallelConfig()))
    )
    assert abs(float(sums.loss) / float(wanted.loss) - 1) < 1e-10
    assert tiny.leaf_error(grads, expected) < 1e-10
    own = expected["segments"]["0"]["0"]["attention"]
    assert min(float(np.abs(own[name]).max()) for name in ("gates", "gate_bias", "recurrent", "o")) > 1e-7


@pytest.mark.drawn(0.5)
def test_recomputation_changes_nothing(rng, float64):
    batch = tiny.batch(int(rng.integers(2**16)), 2, 12, 64, packed=True)
    found = [
        loss_and_grads(alternating(tiny.decoder(remat=remat), "slstm"), batch, "data=1", ParallelConfig())
        for remat in ("none", "full", "elementwise")
    ]
    for sums, grads in found[1:]:
        assert abs(float(sums.loss) / float(found[0][0].loss) - 1) < 1e-12
        assert tiny.leaf_error(grads, found[0][1]) < 1e-10


@pytest.mark.drawn(0.5)
def test_trained_and_resumed(tmp_path):
    model = alternating(dataclasses.replace(runs.run_config(tmp_path).model, layers=2), "slstm", head_dim=4)
    run = runs.run_config(tmp_path, model=model, name="whole")
    assert from_dict(type(run), to_dict(run)) == run
    whole = train(run).directory
    stopped = runs.stopped_at(tmp_path, 6, model=model, name="stopped")
    resumed = train(dataclasses.replace(run, name="stopped"))
    assert resumed.complete
    assert resumed.directory == stopped
    before = runs.losses(whole)
    assert runs.losses(stopped) == before
    assert before[-1][1] < before[0][1], "it learns"
    loaded = load_model(stopped)
    assert isinstance(loaded.model.config.pattern[0].attention, RecurrentConfig)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, load_model(whole).params)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("mesh", "fields"), [("stage=2,data=4", {"accumulate": 2}), ("data=8", {"int8": True})])
def test_other_settings_train(tmp_path, mesh, fields):
    """Stages give the loss of one device; low precision takes the projections, not the recurrent matrices."""
    run = runs.run_config(tmp_path, steps=1)
    model = alternating(dataclasses.replace(run.model, layers=4, remat="full"), "gru", head_dim=4)
    one = runs.losses(train(dataclasses.replace(run, name="one", model=model, mesh="data=8")).directory)[0][1]
    if fields.pop("int8", False):
        model = dataclasses.replace(model, matmul_precision="int8")
    other = train(dataclasses.replace(run, name="other", model=model, mesh=mesh, **fields)).directory
    assert runs.losses(other)[0][1] == pytest.approx(one, rel=1e-6 if "stage" in mesh else 2e-2)


def test_flops_are_counted():
    plain = tiny.decoder(remat="full")
    n, h, d, gates = 4, 8, plain.embed_dim, 4
    config = alternating(plain, "slstm")
    layer = n * h * (gates * (d + h) + d)
    attention = plain.pattern[0].attention
    keys = (16 + 1) / 2
    apart = 6 * (layer - attention.weight_macs(d) - attention.attention_macs * keys)
    assert train_flops_per_token(config, 16) - train_flops_per_token(plain, 16) == pytest.approx(apart)
    # Full recomputation repeats all but the output projection, which the residual stream alone reads.
    again = hardware_flops_per_token(config, 16) - train_flops_per_token(config, 16)
    before = hardware_flops_per_token(plain, 16) - train_flops_per_token(plain, 16)
    macs = layer - (attention.weight_macs(d) + attention.attention_macs * keys)
    assert again - before == pytest.approx(2 * macs + 2 * d * (attention.heads * attention.value_dim - n * h))


def test_refused_by_name(tmp_path):
    run = runs.run_config(tmp_path, mesh="fsdp=4,context=2")
    run = dataclasses.replace(run, model=alternating(dataclasses.replace(run.model, layers=2), "gru", head_dim=4))
    with pytest.raises(ConfigError, match=r"recurrent layers does not go with the mesh .fsdp=4,context=2."):
        train(run)
    with pytest.raises(HubError, match="recurrent layers, so the model cannot be exported"):
        config_json(run.model)
    with pytest.raises(NotImplementedError, match="recurrent layers"):
        predict_layout(dataclasses.replace(run, mesh="fsdp=4"), MeshSpec.parse("fsdp=4"), Cluster.parse("v5e:2x2"))
    with pytest.raises(ConfigError, match="no formula for recurrent layers: give a mesh"):
        search(run, Cluster.parse("v5e:2x2"))
    tuned = dataclasses.replace(run, mesh="data=8", init_from="smollm2")
    for fields, why in (
        ({"kind": "longlora"}, "without attention there are no groups"),
        ({"kind": "prefix", "tokens": 2}, "has no keys and values"),
    ):
        with pytest.raises(ConfigError, match=why):
            train(dataclasses.replace(tuned, adapter=dataclasses.replace(run.adapter, **fields)))
    with pytest.raises(ValueError, match="heads = 0"):
        RecurrentConfig(heads=0)


def test_served_by_no_engine(monkeypatch):
    monkeypatch.setitem(engines.MODELS, "recurrent", alternating(engines.MODELS["smollm2"], "slstm"))
    with pytest.raises(ConfigError, match=r"a recurrent layer .slstm. has no keys and values, so it has no KV cache"):
        engines.build(engines.ENGINES["tight, swap"], "recurrent", "float32")
