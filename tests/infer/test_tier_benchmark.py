"""Tier benchmark: rates of a tiny model, and a placement that is solved with them and served."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.convert.load import LoadedModel
from jaxllm.infer.streaming import tier_benchmark
from jaxllm.infer.streaming.layer_store import LoadedLayers, Unit
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
