"""Draft models on devices of their own: weights and KV cache lie there, and completions are plain decoding's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.speculate import draft_argument
from jaxllm.infer.speculate.draft_argument import devices_of, load_draft, parse_draft
from jaxllm.infer.speculate.draft_model import ServedModel
from jaxllm.models import functional
from sharding import MeshSpec
from tests import quick
from tests.infer import engines
from tests.infer.proposers import OracleProposer
from tests.infer.test_verification import asked, equal

SIZES = dataclasses.replace(engines.ENGINES["tight, recompute"], max_sequences=2, decode_steps=1, verify_tokens=3)


def served(engine: Any) -> ServedModel:
    return ServedModel(engine.runner.model, engine.runner.params, engine.config, None, engine.vocab_size, strict=True)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("options", "numbers"), [("devices=3", {3}), ("devices=4-5", {4, 5}), ("devices=6-7,parallel=2", {6, 7})]
)
def test_a_draft_on_devices_of_its_own(options, numbers, rng, float64, monkeypatch):
    """The served model on device 0, and the same model as its draft elsewhere."""
    engine = engines.build(SIZES, "wide", "float64", proposer=OracleProposer("silent", rng, 1))
    requests = asked(rng, engine.config, 2)
    want = engines.serve(engine, requests)
    model, params = functional(engines.model_of("wide", "float64")), engines.params_of("wide", "float64")

    def placed(name: str, served: ServedModel, mesh: Any = None) -> Any:
        return model, jax.device_put(params, mesh.devices.flat[0])

    monkeypatch.setattr(draft_argument, "load_draft_model", placed)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        proposer: Any = load_draft(parse_draft(f"small,{options}"), served(engine))
    held = proposer.weights() if "parallel" in options else (proposer.runner.params, proposer.runner.pools)
    assert {d.id for x in jax.tree.leaves(held) for d in x.sharding.device_set} == numbers
    monkeypatch.setattr(engine.scheduler, "proposer", proposer)
    monkeypatch.setattr(engine, "metrics", EngineMetrics())
    equal(engines.serve(engine, requests), want)
    assert engine.metrics.accepted_tokens > 0
    assert {d.id for x in jax.tree.leaves(engine.runner.params) for d in x.sharding.device_set} == {0}


def test_devices_that_are_not_there_are_refused():
    one = ServedModel(functional(engines.MODELS["llama"]), None, SIZES, None, engines.VOCAB)
    assert [device.id for device in devices_of((2, 3), one)] == [2, 3]
    for numbers in ((7, 8), (3, 2)):
        with pytest.raises(ValueError, match="there are devices 0 to 7"):
            devices_of(numbers, one)
    replicas = dataclasses.replace(one, mesh=MeshSpec.parse("data=2,tensor=2").build(jax.devices()[:4]))
    with pytest.raises(ValueError, match="devices of a draft model do not go with data=2, whose replicas"):
        devices_of((4, 5), replicas)
    assert parse_draft("runs/small,parallel=3,devices=2-5") == draft_argument.DraftArgument("runs/small", 3, (2, 5))
