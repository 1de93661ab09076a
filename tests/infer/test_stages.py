"""Pipeline stages: how layers are cut, what is refused, steps in flight, runs of drafts and their cancellation."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

import sharding
from jaxllm import cli
from jaxllm.cli.model_loading import load_with_progress
from jaxllm.infer import EngineConfig, Request, SamplingParams
from jaxllm.infer.runner import serving_mesh
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.speculate.ngram import NgramProposer
from jaxllm.infer.speculate.proposer_table import with_speculation
from jaxllm.infer.stages.draft_runs import DraftRuns
from jaxllm.infer.stages.pipeline_clock import SimulatedClock
from jaxllm.infer.stages.stage_cut import Stretch, cut_stages
from jaxllm.infer.stages.staged_runner import StagedRunner
from tests.infer import engines, meshes
from tests.infer.proposers import OracleProposer
from tests.infer.test_verification import equal, plainly_sampled

SMALL = dataclasses.replace(
    engines.ENGINES["tight, swap"], max_sequences=3, max_batched_tokens=8, buckets=(8,), samplers=("plain",)
)


def stages_of(model: str, stages: int) -> list[range]:
    return [one.layers for one in cut_stages(engines.model_of(model, "float32").segments, stages)]


def test_the_largest_stage_has_as_few_layers_as_possible():
    assert stages_of("deep llama", 4) == [range(1), range(1, 2), range(2, 3), range(3, 5)]
    assert stages_of("deep gemma2", 3) == [range(2), range(2, 4), range(4, 7)], "groups of two, and one more"
    assert stages_of("deep deepseek_v3", 2) == [range(2), range(2, 4)]
    first, last = cut_stages(engines.model_of("deep deepseek_v3", "float32").segments, 2)
    assert first.stretches == (Stretch(0, 0, 1, 0), Stretch(1, 0, 1, 1)), "a dense layer, then one of the mixtures"
    assert last.stretches == (Stretch(1, 1, 3, 2),)
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            cut = cut_stages((((None,), layers),), stages)
            assert [n for one in cut for n in one.layers] == list(range(layers))
            assert max(len(one.layers) for one in cut) == math.ceil(layers / stages)
            assert min(len(one.layers) for one in cut) >= 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adapter_slots": 1}, "adapter_slots = 1 does not go with stages = 2"),
        ({"layer_window": 1}, "layer_window = 1 .streamed weights. does not go with stages = 2"),
        ({"retention": "window+sinks", "prefix_cache": False}, "retention = .* does not go with stages = 2"),
        ({"kv_disk": "x"}, "kv_disk = 'x' does not go with stages = 2"),
        (
            {"speculate": "self:1"},
            "speculate = 'self:1', which .* does not go with stages = 2.*use draft:MODEL or ngram",
        ),
        ({"verify_tokens": 2, "draft_trees": True}, "draft_trees .* does not go with stages = 2"),
        ({"verify_tokens": 2, "draft_features": True}, "draft_features .* does not go with stages = 2"),
        ({"draft_runs": 3}, "draft_runs = 3 without speculate"),
        ({"verify_tokens": 2, "draft_runs": 3, "kv_dtype": "kivi4"}, "draft_runs = 3 does not go with kv_dtype"),
    ],
)
def test_what_does_not_go_with_stages_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(EngineConfig(stages=2), **fields)


def test_meshes_and_models_without_stages_are_named():
    with pytest.raises(ValueError, match=r"stage = 4: the model has 2 groups of layers.*tensor"):
        meshes.over("stage=4", "llama", SMALL)
    with pytest.raises(ValueError, match="stages = 3, and the mesh has stage = 2"):
        meshes.over("stage=2", "llama", dataclasses.replace(SMALL, stages=3))
    runs = dataclasses.replace(SMALL, verify_tokens=2, draft_runs=3)
    with pytest.raises(ValueError, match=r"draft_runs = 3 are runs in flight .* mesh with stage=N"):
        engines.build(runs, "llama", proposer=NgramProposer())
    with pytest.raises(ValueError, match="speculate_runs = 3 without speculate"):
        with_speculation(EngineConfig(), None, None, 3)


def test_a_model_for_stages_is_loaded_into_the_hosts_memory(finished, monkeypatch):
    """No device has to have room for all of it."""
    mesh = sharding.MeshSpec.parse("stage=2").build(jax.devices()[-2:])
    monkeypatch.setattr(serving_mesh, "mesh_of", lambda text: mesh)
    loaded = load_with_progress(str(finished / "runs" / "tiny"), None, mesh="stage=2")
    assert loaded.mesh is mesh
    assert {d for x in jax.tree.leaves(loaded.params) for d in x.devices()} == {jax.devices("cpu")[0]}


@pytest.mark.parametrize(
    "command", [["generate", "m", "--prompt", "a"], ["chat", "m", "--message", "a"], ["serve", "m"]]
)
def test_commands_refuse_runs_without_stages_before_they_load_a_model(command, capsys):
    assert cli.main([*command, "--speculate", "ngram", "--speculate-runs", "3"]) == 2
    assert "draft_runs = 3 are runs in flight through pipeline stages" in capsys.readouterr().err


@pytest.mark.drawn(1)
def test_stages_serve_what_one_device_serves_from_programs_on_disk(rng, float64, tmp_path):
    """Several steps are in flight; weights are swapped; a second engine loads its programs for all stages."""
    requests = plainly_sampled(rng)
    want = engines.serve(engines.build(SMALL, "deep llama", "float64"), requests)
    for compiled in (True, False):
        engine = meshes.over("stage=4", "deep llama", SMALL, "float64", manifest=tmp_path)
        assert engine.runner.program_cache is not None
        assert (engine.runner.program_cache.counts.compiled > 0) == compiled
        equal(engines.serve(engine, requests), want)
    runner = engine.runner
    assert isinstance(runner, StagedRunner)
    assert [one.devices for one in runner.stages] == [(device,) for device in jax.devices()[:4]]
    assert runner.counts.stage_steps == 4 * runner.counts.steps
    clock = SimulatedClock()
    runner.use_clock(clock)
    before = runner.counts.steps
    engine.swap(engines.params_of("deep llama", "float64"))
    together = [engine.submit([1, 2, one], SamplingParams(max_tokens=30, temperature=0.0)) for one in range(3)]
    while engine.busy:
        engine.step()
    assert clock.now < 0.5 * 4 * (runner.counts.steps - before), "a step takes 4, and steps were behind one another"
    assert {version for one in together for version in one.sequences[0].versions} == {1}


@pytest.mark.drawn(1)
def test_pages_go_to_the_host_and_back(float64):
    config = dataclasses.replace(SMALL, max_sequences=2)
    engine = meshes.over("stage=2", "deep gemma2", config, "float64")
    runner = engine.runner
    assert isinstance(runner, StagedRunner)
    request = engine.submit([3, 1, 4, 1, 5, 9], SamplingParams(max_tokens=2, temperature=0.0))
    while engine.busy:
        engine.step()
    assert request.sequences[0].finish == "length"
    for group, own in enumerate(runner.spec.groups):
        held = runner.read(0, group, [0, 1])
        assert held.data.shape[0] == len(own.layers)
        assert np.abs(held.data).max() > 0
        runner.write(0, group, [3, 2], held)
        np.testing.assert_array_equal(runner.read(0, group, [3, 2]).data, held.data)


@pytest.mark.drawn(1)
def test_runs_of_drafts_are_plain_decoding(rng, float64):
    """Wrong, right and mixed drafts, with n-grams too; the slots of cancelled requests are used again."""
    oracle = OracleProposer("silent", rng, engines.VOCAB)
    config = dataclasses.replace(SMALL, verify_tokens=2, draft_runs=4)
    engine = meshes.over("stage=3", "deep llama", config, "float64", proposer=oracle)
    runner, requests = engine.runner, plainly_sampled(rng)
    assert isinstance(runner, StagedRunner)
    want = engines.serve(engine, requests)
    assert not engine.metrics.proposed_tokens
    oracle.learn(want)
    passes = {}
    for mode in ("none", "some", "all"):
        oracle.mode, clock = mode, SimulatedClock()
        runner.use_clock(clock)
        equal(engines.serve(engine, requests), want)
        passes[mode] = clock.now
    assert passes["all"] < 0.6 * passes["none"]
    engine.proposer = engine.scheduler.proposer = NgramProposer()  # type: ignore[attr-defined]
    equal(engines.serve(engine, requests), want)
    engines.serve(engine, [one | {"cancel": 6 + 3 * i} for i, one in enumerate(requests)])
    equal(engines.serve(engine, requests), want)


@pytest.mark.drawn(1)
def test_runs_behind_a_wrong_token_are_cancelled(rng, float64):
    """By hand: no draft is right, so each token takes the three stages, and no run behind it gets beyond the second."""
    oracle = OracleProposer("silent", rng, engines.VOCAB)
    config = dataclasses.replace(SMALL, verify_tokens=1, draft_runs=3)
    engine = meshes.over("stage=3", "deep llama", config, "float64", proposer=oracle)
    runner = engine.runner
    assert isinstance(runner, StagedRunner)
    asked = [{"prompt": [1, 2, 3], "params": SamplingParams(max_tokens=11, temperature=0.0, seed=0)}]
    want = engines.serve(engine, asked)
    oracle.learn(want)
    oracle.mode, found = "none", {}
    for cancels in (True, False):
        runner.cancels, clock = cancels, SimulatedClock()
        runner.use_clock(clock)
        before = dataclasses.replace(runner.counts)
        equal(engines.serve(engine, asked), want)
        found[cancels] = clock.now, runner.counts.stage_steps - before.stage_steps
    seconds, stage_steps = found[True]
    assert seconds == 3 * 11, "prefill, and ten tokens"
    # Behind each of eight tokens there is a run on two stages and another on one; behind the last but one, one alone.
    assert stage_steps == 3 * 11 + 8 * (2 + 1) + 2
    assert found[False][0] >= seconds
    assert found[False][1] > stage_steps


def test_a_run_verifies_the_drafts_after_it():
    request = Request(0, [5], SamplingParams(max_tokens=9), b"", 0, frozenset())
    sequence, runs = Sequence(request, 0, 0, [5]), DraftRuns(EngineConfig(verify_tokens=2, draft_runs=3, stages=2))
    assert runs.has(sequence)
    assert not runs.may_start(sequence), "the first run has the last token, and waits for nothing"
    first, second = runs.start(sequence), runs.start(sequence, (7, 8))
    assert runs.extended(sequence).tokens == [5, 7, 8]
    third = runs.start(sequence, (9,))
    assert not runs.may_start(sequence)
    sequence.pending = 4
    assert runs.land(sequence, first, [7]) == ([7], 1, 1, 0)
    sequence.tokens.append(7)
    sequence.pending = 3
    assert runs.land(sequence, second, [8, 1]) == ([8, 1], 2, 1, 1)
    assert not third.valid
    assert runs.drafted(sequence) == []
    assert not runs.drop(sequence)
