"""Tier benchmark: rates of a tiny model, and a placement that is solved with them and served."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.convert.load import LoadedModel
from jaxllm.infer.streaming import tier_benchmark
from jaxllm.infer.streaming.experts.expert_stage import ExpertStage
from jaxllm.infer.streaming.layer_store import LoadedLayers, Unit, units_of
from jaxllm.infer.streaming.tier_benchmark import measure_disk, measure_tiers
from jaxllm.infer.streaming.tier_rates import TierRates
from jaxllm.models import functional
from jaxllm.text.byte_tokenizer import ByteTokenizer
from tests import quick
from tests.infer import engines


class SeenLayers(LoadedLayers):
    """Layers that remember which of them were read."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.seen = set[Unit]()

    def read(self, unit: Unit, device: jax.Device) -> Any:
        self.seen.add(unit)
        return super().read(unit, device)


@pytest.fixture
def measured(tmp_path, monkeypatch) -> TierRates:
    config = dataclasses.replace(engines.model_of("mixtral", "float32"), layers=3)
    params = jax.tree.map(jax.numpy.asarray, quick.params(config, seed=1))
    ends = {name: value for name, value in params.items() if name != "segments"}
    loaded = LoadedModel(functional(config), ends, ByteTokenizer(), None, jax.make_mesh((1,), ("data",)), 0, {}, None)
    monkeypatch.setattr(jax, "jit", quick.jit)
    monkeypatch.setattr(tier_benchmark, "ROUNDS", 1)
    monkeypatch.setattr(tier_benchmark, "FILE_BYTES", 0)
    layers = SeenLayers(params)
    rates = measure_tiers(loaded, layers, tmp_path, batches=(4, 1), prompt=3, loaders=2, steps=3)
    assert {unit.repeat for unit in layers.seen} == {0, 1}  # one computes for all, two are files: the third is not read
    assert not list(tmp_path.iterdir())
    return rates


@pytest.mark.drawn(3)
def test_rates_are_measured(measured, tmp_path):
    assert measured.tokens == (1, 4)
    assert min(measured.layer_seconds) > 0
    assert all(np.isfinite([*measured.end_seconds, measured.host, *measured.disk]))
    assert len(measured.disk) == 2
    assert measured.disk == tuple(sorted(measured.disk))
    assert not measured.disk_cold or measured.cold().disk == measured.disk_cold
    for loaders in (1, 2):
        for batch in (1, 4):
            assert measured.slowdown(batch, loaders) >= 1
            assert 0 < measured.disk_share(batch, loaders) <= 1
    said = str(measured)
    assert "host to device" in said
    assert f"{1e3 * measured.layer_seconds[1]:.2f}" in said
    assert measure_disk(tmp_path) > 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize("copied", [0, tier_benchmark.COPIED_BYTES])
def test_experts_are_loaded_ahead_in_what_is_measured(copied, tmp_path, monkeypatch):
    """Also of layers so large that one of them is more than any cache; by hand: all of n layers were ahead, and not
    n - 1 of them as in the engine that is measured."""
    config = dataclasses.replace(engines.model_of("mixtral", "float32"), layers=3)
    params = jax.tree.map(jax.numpy.asarray, quick.params(config, seed=1))
    ends = {name: value for name, value in params.items() if name != "segments"}
    loaded = LoadedModel(functional(config), ends, ByteTokenizer(), None, jax.make_mesh((1,), ("data",)), 0, {}, None)
    monkeypatch.setattr(jax, "jit", quick.jit)
    monkeypatch.setattr(tier_benchmark, "ROUNDS", 1)
    monkeypatch.setattr(tier_benchmark, "COPIED_BYTES", copied)
    asked, load_ahead = [0], ExpertStage._load_ahead

    def counted(self, *args):
        asked[0] += 1
        return load_ahead(self, *args)

    def seconds(engine, *_):  # a late layer takes 5 s, another one 2, and the end of a step 1
        stage, layers = engine.runner.experts, len(some)
        if stage is None:
            return 1.0
        load_ahead_of = layers - 1 if stage.looks_ahead and stage.slots[some[0], "0"].slots < 4 else 0
        return 1.0 + 5.0 * (layers - load_ahead_of) + 2.0 * load_ahead_of

    monkeypatch.setattr(ExpertStage, "_load_ahead", counted)
    layers, units = LoadedLayers(params), units_of(config.segments)
    some = tier_benchmark._slot_units(loaded, layers, units)
    assert len(some) == (2 if copied == 0 else 3)
    weights = tier_benchmark._alike_weights(loaded, layers, units)
    engine, decoding = tier_benchmark._engine(loaded, weights, [1], 12), tier_benchmark._Decoding([1], 3, 3)
    tier_benchmark._with_slots(engine, [0.0], loaded, layers, some, tmp_path, decoding, lambda _: None)
    assert asked[0] > 0
    monkeypatch.setattr(tier_benchmark, "decode_step_seconds", seconds)
    rates = tier_benchmark._with_slots(engine, [1.0], loaded, layers, some, tmp_path, decoding, lambda _: None)
    engine.runner.close()
    for ahead, late in ((rates.host, rates.host_late), (rates.files, rates.files_late)):
        assert ahead[0] == pytest.approx((3 * 2.0,))
        assert late[0] == pytest.approx((3 * 5.0,))
