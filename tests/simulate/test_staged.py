"""Pipeline stages in the simulator: costs and bytes of stages, steps in flight by hand, the search, what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm import cli
from jaxllm.infer import EngineConfig
from jaxllm.models import MlpConfig
from jaxllm.plan.formulas.serving_step import BatchWork, StepCost
from jaxllm.plan.formulas.staged_step import StagedStepModel, pipeline_ends
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import Deployment, DeploymentError, RequestTrace, TraceRequest, make_trace, simulate
from jaxllm.simulate.oversubscription import oversubscribe
from jaxllm.simulate.search.deployment_search import meshes
from jaxllm.simulate.steady_state import prefill_seconds
from sharding import MeshSpec, ShardingError
from tests.simulate.served import MODEL, deployment


def test_stages_are_the_layers_of_one_engine():
    """FLOPs and bytes of all stages are those of the model on one device; a stage has its layers' weights."""
    staged, whole = deployment("h100:1x2", "stage=2"), deployment()
    model = staged.step_model
    assert isinstance(model, StagedStepModel)
    assert staged.engine.stages == 2
    work = [BatchWork.of([100, 30], [1, 20])]
    costs = model.stage_costs(work, 64, 16)
    together, alone = model.step(work, 64, 16), whole.step_model.step(work, 64, 16)
    assert together.flops == pytest.approx(alone.flops)
    assert together.launch == pytest.approx(alone.launch)
    assert costs[1].flops > costs[0].flops  # the head
    assert costs[0].network == 0.0
    sent = 64 * 256 * 2 / (model.hardware.link * model.calibration.link) + model.hardware.hop
    assert costs[1].network == pytest.approx(sent)
    assert model.token_bytes == whole.step_model.token_bytes / 2
    ends = 2 * (1000 * 256 + 256)  # the table of embedding and head, and the last norm
    blocks = whole.step_model.device_weight_bytes - ends
    assert model.device_weight_bytes == pytest.approx(ends + blocks / 2)


def test_models_with_a_prefix_are_cut_too():
    dense = dataclasses.replace(MODEL.pattern[0], mlp=MlpConfig(1024))
    model = dataclasses.replace(MODEL, prefix=(dense,), layers=5)
    staged = deployment("h100:1x2", "stage=2", model=model).step_model
    assert isinstance(staged, StagedStepModel)
    assert [one.config.layers for one in staged.stages] in ([2, 3], [3, 2])
    assert staged.stages[0].config.blocks[0] == dense
    work = [BatchWork.of([10], [1])]
    alone = deployment(model=model).step_model.step(work, 1, 1)
    assert staged.step(work, 1, 1).flops == pytest.approx(alone.flops)


def test_a_stage_computes_one_step_after_the_other():
    free = [0.0, 0.0]
    assert pipeline_ends(free, 0.0, [2.0, 3.0]) == 5.0
    assert pipeline_ends(free, 1.0, [2.0, 3.0]) == 8.0
    assert free == [4.0, 8.0]


def test_steps_are_in_flight_together():
    """Prompts in two chunks and two sequences: the second step begins when the first stage is free, not the last."""
    clock = lambda batches, shape, passes: [StepCost(compute=1.0), StepCost(compute=2.0)]  # noqa: E731
    one = deployment("h100:1x2", "stage=2", max_batched_tokens=64, prefix_cache=False)
    trace = RequestTrace("two", (TraceRequest(0.0, 100, 1), TraceRequest(0.0, 20, 1)))
    found = simulate(one, trace, clock=clock)
    steps = found.engines[0]
    assert [step.start for step in steps] == [0.0, 1.0]
    assert [step.cost.seconds for step in steps] == [1.5, 1.5]
    assert [result.end for result in found.results] == [5.0, 5.0]


def test_a_prompt_alone_passes_through_the_stages_in_chunks():
    one = deployment("h100:1x2", "stage=2", max_batched_tokens=64)
    found = simulate(one, RequestTrace("one", (TraceRequest(0.0, 300, 1),)))
    assert found.results[0].ttft == pytest.approx(prefill_seconds(one, 300), rel=0.05)
    assert prefill_seconds(one, 300) < sum(step.cost.seconds * 2 for step in found.engines[0])


def test_the_search_has_stages():
    found = {str(mesh) for mesh in meshes(MODEL, 4)}
    assert {"stage=2", "stage=4", "stage=2,tensor=2", "tensor=4"} <= found
    assert not any("stage=8" in str(mesh) for mesh in meshes(MODEL, 8))  # four layers


def test_what_does_not_go_with_stages_is_refused():
    with pytest.raises(ShardingError, match="give stage and tensor alone"):
        _ = deployment("h100:1x4", "stage=2,data=2").step_model
    with pytest.raises(ShardingError, match="one host"):
        _ = Deployment(MODEL, Cluster.parse("h100:2x8"), MeshSpec.parse("stage=2,tensor=8"), EngineConfig()).step_model
    watts = deployment("h100:1x4", "stage=2", max_len=1024)
    with pytest.raises(DeploymentError, match="power cap is not simulated for pipeline stages"):
        oversubscribe(watts, make_trace("poisson:10", lengths="4/2", count=4), 0.5)


def test_the_command_simulates_stages(capsys):
    words = ["simulate", "llama3_8b", "--on", "h100:2", "--mesh", "stage=2", "--trace", "poisson:4", "--requests", "8"]
    assert cli.main([*words, "--lengths", "100/10", "--no-curve"]) == 0
    assert "stage=2, bfloat16 on h100:1x2" in capsys.readouterr().out
