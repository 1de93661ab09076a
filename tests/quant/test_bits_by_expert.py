"""Bits by expert (EdgeMoE): a budget goes where results lose most, and slots get each expert in its own bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.convert import quantise as quantising
from jaxllm.convert.quantise import QuantiseConfig, quantise
from jaxllm.convert.source_layers import SourceLayers
from jaxllm.hub import load_hf, open_source
from jaxllm.hub.families.config_json import config_json
from jaxllm.hub.huggingface import HubModel, export_hf, load_tensors, read_model
from jaxllm.infer.streaming.experts.host_experts import HostExperts, in_fewest_bits, write_expert
from jaxllm.infer.streaming.layer_store import WithoutExperts, units_of
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.models.packed_weight import PackedWeight, is_packed
from tests import quick, tiny
from tests.infer import engines

CONFIG = tiny.decoder(vocab_size=engines.VOCAB, embed_dim=32, layers=2, moe=(4, 2, 16, True))
ROWS, LENGTH, BUDGET = 6, 24, 2.6
IDS = np.random.default_rng(5).integers(0, engines.VOCAB, ROWS * LENGTH).tolist()


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture in files, its experts in 2.6 bits in the mean."""
    folder = tmp_path_factory.mktemp("model")
    params = quick.params(CONFIG, scale=0.5)
    export_hf(HubModel(CONFIG, params, config_json(CONFIG, 64)), folder / "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantising, "copy_tokenizer_files", lambda source, out: None)
        config = QuantiseConfig("gptq", 4, 16, None, ROWS, LENGTH, budget=BUDGET, only="experts")
        quantise(open_source(folder / "plain"), folder / "out", config, IDS)
    return folder / "out"


def bits_of(folder: Path) -> dict[str, int]:
    """Bits of each layer by name, from the files' config."""
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    return {name: group["weights"]["num_bits"] for group in groups for name in group["targets"]}


def experts_of(params: Any) -> Any:
    return params["segments"]["0"]["0"]["mlp"]["experts"]


def test_the_budget_is_kept_and_experts_differ(quantised):
    """All matrices of an expert have its bits; experts of other layers and numbers have others."""
    bits = bits_of(quantised)
    assert len(bits) == 2 * 4 * 3
    by_expert: dict[str, set[int]] = {}
    for name, count in bits.items():
        by_expert.setdefault(name.rpartition(".")[0], set()).add(count)
    assert all(len(counts) == 1 for counts in by_expert.values())
    assert len(set(bits.values())) > 1
    assert BUDGET - 0.2 < np.mean(list(bits.values())) <= BUDGET


def test_experts_on_the_host_have_their_own_bits(quantised):
    """Codes in their own bits; written into slots they are the codes of the whole layer."""
    layers = SourceLayers(quantised, weights="packed")
    bits = bits_of(quantised)
    placed = WithoutExperts(layers, units_of(layers.model.config.segments)).experts()
    for (unit, block), own in placed.items():
        assert isinstance(own, HostExperts)
        whole = jax.tree.map(np.asarray, layers.read(unit, jax.devices()[0])[block]["mlp"]["experts"])
        slots = jax.tree.map(lambda x: jnp.zeros((2, *x.shape[1:]), x.dtype), own.whole)
        for number, expert in enumerate(own.each):
            found = {x.format.grid.bits for x in jax.tree.leaves(expert, is_leaf=is_packed)}
            name = f"model.layers.{unit.repeat}.block_sparse_moe.experts.{number}.w1"
            assert found == {bits[name]} or max(found) < bits[name], "no code needs the largest bit"
            written = jax.tree.unflatten(jax.tree.structure(slots), jax.jit(write_expert)(slots, jnp.int32(1), expert))
            want = jax.tree.map(lambda x, n=number: x[n], whole)
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y), written, want)
            assert not any(np.asarray(x[0]).any() for x in jax.tree.leaves(written))
        assert own.nbytes < 0.99 * sum(x.nbytes for x in jax.tree.leaves(whole))


def test_experts_of_one_width_stay_as_they_are():
    """Symmetric codes use all of their bits, and plain arrays have none."""
    plain = {"gate": np.ones((1, 4, 8), np.float32)}
    assert in_fewest_bits(plain) is plain
    held = HostExperts({"gate": np.arange(24, dtype=np.float32).reshape(3, 8)})
    assert len(held) == 3
    np.testing.assert_array_equal(held.each[1]["gate"], np.arange(8.0, 16.0)[None])


@pytest.mark.drawn(3)
@pytest.mark.parametrize("slots", [1, 3])
def test_slots_of_mixed_widths_serve_the_same(slots, quantised, rng, monkeypatch):
    """Tokens are those of resident dense experts; fewer bytes are copied than the slots hold."""
    monkeypatch.setitem(engines.MODELS, "mixed", CONFIG)
    params = load_tensors(*read_model(quantised), weights="packed").params
    dense = jax.tree.map(np.asarray, load_hf(quantised).params)
    assert all(isinstance(x, PackedWeight) for x in experts_of(params).values())
    config = engines.ENGINES["roomy"]
    engine = engines.build(config, "mixed", params=params, placement=WeightPlacement(1, 9, expert_slots=slots))
    made = engines.serve(engine, engines.traffic(rng, config, 3))
    assert engines.error("mixed", "float32", made, dense) <= 1e-3
    assert isinstance(engine.runner, StreamedRunner)
    stage = engine.runner.experts
    assert stage is not None
    layer = sum(x.nbytes for x in jax.tree.leaves(jax.tree.map(lambda x: x[0, 0], experts_of(params))))
    assert 0 < stage.counts.load_bytes < 0.99 * layer * stage.counts.loads
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0
