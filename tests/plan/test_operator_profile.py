"""Operator profiles: task graphs of layouts, interpolated times, what is missing by name, predictions by replay."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxllm import cli
from jaxllm.compiler import hlo, program_walker
from jaxllm.compiler.replica_groups import Placement
from jaxllm.data import Batch, DataConfig
from jaxllm.files import DataError
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.parallel.distributed import ProcessGroup
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.profile.operator_benchmark import devices_here, measure_profile, measured, prepared
from jaxllm.plan.profile.operator_profile import (
    MissingOperators,
    OperatorProfile,
    ProfileDevices,
    measured_for,
    opened_profile,
    read_profile,
    rungs,
)
from jaxllm.plan.profile.operators import (
    CollectiveOperator,
    GradientSum,
    ModelPass,
    ParameterUpdate,
    PipelineTick,
    group_of,
)
from jaxllm.plan.profile.step_graph import step_graph
from jaxllm.plan.profile.step_prediction import beside, legal_layouts, predict_step, ranked_layouts
from jaxllm.plan.profile.task_replay import TimedTask, replay
from jaxllm.train import RunConfig
from jaxllm.train.run import build_value_and_grad, run_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import build_optimizer, build_step, run_state
from jaxllm.train.step.training_step import jit_step
from sharding import MeshSpec

BLOCK = BlockConfig(AttentionConfig(heads=4, kv_heads=2, head_dim=8), MlpConfig(hidden=64))
MODEL = DecoderConfig(vocab_size=64, embed_dim=32, layers=4, pattern=(BLOCK,), tied=False, remat="none")
RUN = RunConfig(model=MODEL, data=DataConfig(seq_len=16, batch_size=16), accumulate=4)
DEVICES = ProfileDevices("cpu", "cpu", "0", (-1,) * 4)


def graph_of(mesh: str, platform: str = "cpu", **plan):
    run = dataclasses.replace(RUN, mesh=mesh, parallel=ParallelConfig(**plan))
    return step_graph(run, MeshSpec.parse(mesh), platform)


def profile_of(graph, seconds=lambda operator: 1.0):
    """Profile with a time for each operator of a graph; rungs of collectives have that of their own bytes."""
    return OperatorProfile(DEVICES, {one.key: seconds(one) for one in measured_for(graph.operators)})


def count_of(graph, chosen, lane=0):
    return sum(n for task in graph.tasks if task.lane == lane for operator, n in task.operators if chosen(operator))


def is_pass(kind):
    return lambda one: isinstance(one, ModelPass) and one.kind == kind


def of_passes(operator):
    """One second for a layer's forward and backward pass, and for the average tick of a pipeline that has one layer."""
    return float(is_pass("forward")(operator) or is_pass("backward")(operator) or isinstance(operator, PipelineTick))


def is_sent(kind):
    return lambda one: isinstance(one, CollectiveOperator) and one.kind == kind


def test_a_plain_step_has_each_pass_of_each_layer_and_micro_batch():
    graph = graph_of("data=2,tensor=2")
    assert count_of(graph, is_pass("forward")) == count_of(graph, is_pass("backward")) == 16
    assert count_of(graph, is_pass("loss")) == count_of(graph, is_pass("embedding")) == 4
    assert count_of(graph, lambda one: isinstance(one, ParameterUpdate)) == 1
    assert count_of(graph, lambda one: isinstance(one, GradientSum)) == 4
    (one,) = {own for own in graph.operators if isinstance(own, ModelPass) and own.kind == "forward"}
    block = one.model.pattern[0]
    assert (block.attention.heads, block.attention.kv_heads, block.mlp.hidden) == (2, 1, 32)
    assert (one.rows, one.seq_len) == (2, 16)
    over = {own.group for own in graph.operators if isinstance(own, CollectiveOperator)}
    assert over == {((2, 1),), ((2, 2),)}  # tensor, data
    on_gpus = graph_of("data=2,tensor=2", "gpu").operators
    assert ((4, 1),) in {own.group for own in on_gpus if isinstance(own, CollectiveOperator)}  # both, of all norms


def test_a_collective_has_the_devices_of_its_axes():
    mesh = MeshSpec.parse("data=2,fsdp=3,tensor=4")
    assert group_of(mesh, ["tensor"]) == ((4, 1),)
    assert group_of(mesh, ["data", "fsdp"]) == ((6, 4),)
    assert group_of(mesh, ["tensor", "data"]) == ((2, 12), (4, 1))
    assert group_of(mesh, ["stage"]) == ()


@pytest.mark.drawn(0.1)
@pytest.mark.parametrize("mesh", ["data=4", "fsdp=4", "tensor=4", "data=2,fsdp=2", "data=2,tensor=2", "stage=2,data=2"])
def test_messages_between_cpus_are_those_of_the_compiled_step(mesh):
    """All-reduces of a step: as many bytes in as many arrays as the compiled program names, those of one number too.

    Over ``data`` and ``fsdp`` the program sums the gains of nine norms once, and the graph over one axis after the
    other: four times nine messages more.
    """
    run = dataclasses.replace(RUN, mesh=mesh)
    model = run_model(run)
    devices = run_mesh(run, model, jax.devices()[:4])
    optimizer = build_optimizer(run, model)
    state = run_state(run, model, optimizer, devices)
    shape = (16, 16)
    where = jax.NamedSharding(devices, model.rules.spec(("batch", "seq"), devices, shape, what="batch"))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
    with jax.set_mesh(devices):
        step = jit_step(build_step(run, model, build_value_and_grad(run, model, devices), optimizer), state)
        text = step.lower(state, Batch(tokens, tokens, tokens, tokens)).compile().as_text()  # type: ignore[attr-defined]
    compiled = counted(sums_of(text, Placement.of(devices)))
    operators = [each for task in graph_of(mesh).tasks if task.lane == 0 for each in task.operators]
    said = counted(
        (one.bytes, times)
        for one, times in operators
        if isinstance(one, CollectiveOperator) and one.kind == "all-reduce"
    )
    gains = {"messages": 36, "bytes": 36 * 4 * 16} if mesh == "data=2,fsdp=2" else {"messages": 0, "bytes": 0}
    assert said == {kind: compiled[kind] + more for kind, more in gains.items()}


def sums_of(text, placement):
    """Bytes of each array of the all-reduces of a compiled program, and how often it is sent."""
    module = hlo.parse(text)
    named = {name: one for part in module.computations.values() for name, one in part.instructions.items()}

    def inside(steps, times):
        for step in steps:
            if isinstance(step, program_walker.Loop):
                yield from inside(step.steps, times * step.turns)
            elif isinstance(step, program_walker.Start):
                yield from ((step.name, times) for one in step.what if is_sum(one))

    def is_sum(one):
        return isinstance(one, program_walker.Exchange) and (one.kind == "all-reduce" or one.summed)

    for name, times in inside(program_walker.read(text, placement).steps, 1):
        for sizes in re.findall(r"[fs]32\[([\d,]*)\]", named[name].shape):
            yield 4 * math.prod(map(int, filter(None, sizes.split(",")))), times


def counted(arrays):
    """Messages and their bytes."""
    arrays = list(arrays)
    return {
        "messages": round(sum(times for _, times in arrays)),
        "bytes": sum(size * times for size, times in arrays),
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_stages_share_the_layers_of_the_step(schedule):
    """Each stage has its layers once for each micro-batch; W is a backward pass without its input gradients.

    Beside them each tick has its own time, that of a measured tick less its passes.
    """
    graph = graph_of("stage=2,data=2", schedule=schedule)
    (tick,) = {own for own in graph.operators if isinstance(own, PipelineTick)}
    for lane in range(2):
        share = count_of(graph, lambda one: one == tick, lane) / (3 if tick.split else 2)
        assert count_of(graph, is_pass("forward"), lane) + share * tick.model.layers == pytest.approx(8)
        backward, inputs = (count_of(graph, is_pass(kind), lane) for kind in ("backward", "input gradients"))
        assert (backward + share * tick.model.layers, inputs) == (pytest.approx(8), pytest.approx(0))
        for kind, there in (("embedding", 0), ("embedding gradients", 0), ("loss", 1)):
            assert count_of(graph, is_pass(kind), lane) + share == pytest.approx(4 * (lane == there))
    assert graph.stages == (0, 0, 1, 1)
    assert all(count_of(graph, is_sent("collective-permute"), lane) for lane in range(2))


def test_a_pipeline_without_communication_is_its_schedule():
    """Equal forward and backward passes alone: m + p - 1 ticks of F and as many of B, of one second a stage's layer."""
    graph = graph_of("stage=4", schedule="gpipe")
    made = predict_step(graph, profile_of(graph, of_passes))
    assert made.seconds == pytest.approx(2 * (4 + 4 - 1))
    assert [made.computing(lane) for lane in range(4)] == [8.0] * 4
    assert made.idle(0) == pytest.approx(6.0)


def test_the_time_of_a_plain_step_is_the_sum_of_its_operators():
    graph = graph_of("fsdp=4")
    profile = profile_of(graph, lambda one: 2.0 if isinstance(one, CollectiveOperator) else 1.0)
    made = predict_step(graph, profile)
    all_of = [(operator, n) for task in graph.tasks for operator, n in task.operators]
    assert made.seconds == pytest.approx(sum(n * profile.time(operator) for operator, n in all_of))
    assert made.exposed(0) == pytest.approx(sum(2 * n for one, n in all_of if isinstance(one, CollectiveOperator)))


def test_networks_of_accelerators_send_beside_compute():
    """On a GPU weights are gathered while layers compute, and gradients are summed behind them."""
    times = {platform: predict_step(graph, profile_of(graph, lambda one: 1.0)) for platform in ("cpu", "gpu")
             for graph in [graph_of("fsdp=4", platform)]}  # fmt: skip
    assert times["gpu"].seconds < times["cpu"].seconds
    assert times["gpu"].exposed(0) < times["cpu"].exposed(0)
    assert times["gpu"].computing(0) == pytest.approx(times["cpu"].computing(0))


def test_devices_of_a_core_are_faster_while_others_wait():
    """Stages of two cores: with all four busy an operator takes twice the time that it takes alone."""
    assert beside((0, 1, 2, 3), (0, 1, 0, 1)) == [[2], [3], [0], [1]]
    assert beside((0, 0, 1, 1), (0, 1, 0, 1)) == [[1], [0]]
    assert beside((0, 0, 0, 0), (0, 1, 0, 1)) == [[0]]
    assert beside((0, 0), (-1, -1)) == [[]]
    assert beside((0, 1), (0, 1, 0, 1)) == []
    graph = graph_of("stage=4", schedule="gpipe")
    profile = profile_of(graph, of_passes)
    shared = dataclasses.replace(profile, devices=DEVICES._replace(processors=(0, 1, 0, 1)))
    assert 7.0 <= predict_step(graph, shared).seconds < predict_step(graph, profile).seconds
    whole = graph_of("data=4")
    alike = profile_of(whole)
    both = dataclasses.replace(alike, devices=shared.devices)
    assert predict_step(whole, both).seconds == pytest.approx(predict_step(whole, alike).seconds)


def test_times_of_collectives_are_linear_between_rungs():
    def sent(size):
        return CollectiveOperator("all-reduce", ((4, 1),), size, "float32")

    assert [one.bytes for one in rungs(sent(100))] == [1024, 1024]
    assert [one.bytes for one in rungs(sent(4096))] == [4096, 4096]
    assert [one.bytes for one in rungs(sent(10_000))] == [4096, 16_384]
    profile = OperatorProfile(DEVICES, {sent(4096).key: 1.0, sent(16_384).key: 4.0})
    assert profile.time(sent(10_240)) == pytest.approx(2.5)
    with pytest.raises(MissingOperators, match=r"all-reduce over 4 by 1 devices, float32: 65536\n.*jaxllm bench"):
        profile.time(sent(20_000))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mesh": "context=4"}, "the mesh axis context"),
        ({"mesh": "tensor=4", "parallel": ParallelConfig(sequence=True)}, "parallel.sequence"),
        ({"mesh": "data=4", "model": dataclasses.replace(MODEL, remat="none=2,full=2")}, "remat by layers"),
    ],
)
def test_settings_without_operators_are_refused_by_name(settings, named):
    run = dataclasses.replace(RUN, **settings)
    with pytest.raises(NotImplementedError, match=named):
        step_graph(run, MeshSpec.parse(run.mesh), "cpu")


def test_layouts_are_ranked_and_the_others_say_what_is_missing():
    layouts = legal_layouts(RUN, 4)
    meshes = {str(mesh) for _, mesh in layouts}
    assert {"data=4", "tensor=2,data=2"} & meshes
    assert {"fsdp=4", "stage=4", "data=2,fsdp=2"} <= meshes
    graph = graph_of("data=4")
    found = ranked_layouts(layouts, profile_of(graph))
    assert str(found[0].mesh) == "data=4"
    assert found[0].replay is not None
    assert found[1].replay is None
    assert "has no time of" in found[1].refusal


def test_a_graph_that_is_no_order_is_refused():
    with pytest.raises(ValueError, match="task 0"):
        replay([TimedTask(1.0, needs=(0,))])
    with pytest.raises(ValueError, match=r"-1\.0 s"):
        replay([TimedTask(-1.0)])


@pytest.mark.drawn(0.05)
def test_measured_operators_are_stored_and_not_measured_again(tmp_path):
    """All kinds of operators are measured on one device; a second run measures nothing, other devices are refused."""
    group, file = ProcessGroup(), tmp_path / "operators.json"
    run = dataclasses.replace(RUN, data=DataConfig(seq_len=8, batch_size=2), accumulate=2, mesh="data=1")
    graph = step_graph(run, MeshSpec.parse("data=1"), "cpu")
    here = devices_here(group)
    said: list[str] = []
    made = measure_profile(opened_profile(file, here), graph.operators, group, said.append, lambda one: one.write(file))
    assert len(said) == len(made.seconds) == 7
    assert all(seconds > 0 for seconds in made.seconds.values())
    again = opened_profile(file, here)
    assert again.seconds == made.seconds
    assert again.missing(graph.operators) == []
    assert predict_step(graph, again).seconds > 0
    with pytest.raises(DataError, match="kind cpu, and here it is other"):
        opened_profile(file, here._replace(kind="other"))
    file.write_text("{}")
    with pytest.raises(DataError, match="no operator profile"):
        read_profile(file)


@pytest.mark.drawn(0.1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_ticks_of_a_pipeline_are_measured_on_one_device(schedule):
    graph = graph_of("stage=4", schedule=schedule)
    own = [one for one in graph.operators if isinstance(one, PipelineTick) or is_pass("input gradients")(one)]
    assert len(own) == (2 if schedule == "zb_h1" else 1)
    assert all(seconds > 0 for seconds in measured([prepared(one) for one in own], ProcessGroup()))


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"])
def test_collectives_are_measured_over_groups_of_devices(kind):
    for group in (((8, 1),), ((2, 4), (2, 1))):
        (seconds,) = measured([prepared(CollectiveOperator(kind, group, 1024, "float32"))], ProcessGroup())
        assert seconds > 0
    with pytest.raises(ValueError, match="multiple of 16"):
        prepared(CollectiveOperator(kind, ((16, 1),), 1024, "float32"))


SMALL = ["--model.layers", "2", "--data.seq-len", "8", "--data.batch-size", "2", "--model.embed-dim", "16"]


@pytest.mark.drawn(0.1)
def test_the_commands_measure_and_predict(tmp_path, capsys):
    file, table, page = (tmp_path / name for name in ("operators.json", "plan.json", "plan.html"))
    words = ["quickstart", *SMALL, "--as-is", "--mesh", "data=1", "--devices", "1"]
    assert cli.main(["bench", words[0], "--operators", str(file), *words[1:]]) == 0
    assert "6 operators of 1 layouts, 6 of them measured now" in capsys.readouterr().out
    options = ["--profile", str(file), "--json", str(table), "--html", str(page)]
    assert cli.main(["plan", words[0], *options, *words[1:]]) == 0
    assert "data=1" in capsys.readouterr().out
    (row,) = json.loads(table.read_text())
    assert row["seconds"] == pytest.approx(row["computing"][0])
    assert "forward 0, layer 0" in page.read_text()
    assert cli.main(["plan", *words[:1], *options[:2], *words[1:], "--data.seq-len", "16"]) == 1
    assert "jaxllm bench RECIPE --operators FILE" in capsys.readouterr().out


def test_a_run_that_is_rarely_interrupted_counts_with_its_waits():
    """Two of five runs wait for another process on the processor: the mean is what a step of many runs takes."""
    turns = itertools.cycle([0.001, 0.001, 0.0035, 0.001, 0.0035])
    (seconds,) = measured([lambda: next(turns)], ProcessGroup(), 3)
    assert seconds == pytest.approx(0.002, rel=0.05)
