"""Task graph of a training step: operators on the lanes of a layout, in order (vTrain, arXiv:2312.12391).

Without a pipeline there is one lane, since all devices do the same: micro-batches one after the other, layers in order
and back. With a pipeline each stage is a lane (``pipelined_graph``). Collectives are those of
``jaxllm.parallel.collective_traffic``; on GPUs and TPUs those of weights and gradients have a stream of their own. XLA
combines the sums of a layer's gradients; those of embedding and head are counted in equal parts with the layers'.
"""

from __future__ import annotations

from jaxllm.parallel.sharding_table import ExpectedCollective
from jaxllm.plan.formulas.step_time import WEIGHTS, collectives
from jaxllm.plan.profile.graph_builder import Counts, GraphBuilder, StepGraph, joined, times
from jaxllm.plan.profile.operators import GradientSum
from jaxllm.plan.profile.pipelined_graph import pipelined_graph
from jaxllm.plan.profile.task_replay import Stream
from jaxllm.train import RunConfig
from sharding import MeshSpec

AXES = ("data", "fsdp", "tensor", "stage")
"""Mesh axes whose layouts have operators."""
SUMS = ("gradients", "end")
PLACES = ("start", "forward weights", "forward", "loss", "backward weights", "backward", *SUMS)
"""Places of collectives in a step without a pipeline: its start and end, and per layer and micro-batch the others."""


def check_profiled(run: RunConfig, mesh: MeshSpec) -> None:
    """Checks that a run on a mesh has operators.

    Raises:
        NotImplementedError: it has not; names the settings.
    """
    parallel = run.parallel
    unknown = {
        **{f"the mesh axis {name}": size > 1 and name not in AXES for name, size in mesh.axes},
        "parallel.sequence": parallel.sequence,
        'parallel.overlap = "ring"': parallel.overlap == "ring",
        f'parallel.zero = "{parallel.zero}"': parallel.zero == "3level",
        f'parallel.gather = "{parallel.gather}"': parallel.gather != "plain",
        f'parallel.tensor = "{parallel.tensor}"': parallel.tensor != "1d",
        "parallel.layers": bool(parallel.layouts()),
        "parallel.micro_batches": bool(parallel.micro_batches),
        "parallel.offload": parallel.offload > 0,
        "remat by layers": "=" in run.model.remat,
        f'model.residual = "{run.model.residual}"': run.model.residual != "plain",
        "an adapter or trainable parameters": bool(run.adapter) or bool(run.trainable),
        "outer steps": run.outer.kind != "none",
        "compressed gradients": bool(run.grads.compress),
        "a reference model": bool(run.reference),
        "an optimizer that goes layer by layer": run.optim.spec.layerwise,
        "host": run.host.optimizer or run.host.params,
        "disk": bool(run.disk.directory),
        "device_order": bool(run.device_order),
    }
    if names := [name for name, is_so in unknown.items() if is_so]:
        raise NotImplementedError(
            f"profile: {', '.join(names)}: there are operators of the mesh axes {', '.join(AXES)} and of plain "
            "settings alone; leave it out."
        )


def step_graph(run: RunConfig, mesh: MeshSpec, platform: str) -> StepGraph:
    """Task graph of a run's step.

    Args:
        run: the run.
        mesh: legal for it, all sizes known.
        platform: of the devices.

    Raises:
        NotImplementedError: there are no operators for its settings; names them.
    """
    check_profiled(run, mesh)
    if dict(mesh.axes).get("stage", 1) > 1:
        return pipelined_graph(run, mesh, platform)
    graph = GraphBuilder(run, mesh, platform)
    sent: dict[str, Counts] = {place: {} for place in PLACES}
    for one in collectives(run, mesh):
        if one.why == "softmax over the vocabulary":
            sent["loss"] = joined(sent["loss"], graph.softmax())
            continue
        for place, count in _places(run, one):
            kind = "all-reduce" if graph.sends_each and place in SUMS else one.kind  # of which a CPU takes its part
            sent[place] = joined(sent[place], graph.sent(kind, one.axes, one.bytes, count))
    graph.add("weights", sent["start"])
    for micro in range(run.accumulate):
        _micro_batch(graph, micro, sent)
        if run.accumulate > 1:
            whole = run.parallel.zero == 1
            elements = sum((w.used if whole else w.stored) * w.layers for w in graph.work.weights)
            graph.add(f"sum of gradients {micro}", {GradientSum(elements, run.model.param_dtype): 1.0})
    graph.add("gradients", joined(graph.combined(sent["end"]), graph.scalars()), needs=set(graph.last.values()))
    graph.add("update", graph.update())
    return graph.built()


def _micro_batch(graph: GraphBuilder, micro: int, sent: dict[str, Counts]) -> None:
    """Tasks of a micro-batch on the only lane."""
    stream: Stream = "communication" if graph.platform in ("gpu", "tpu") else "compute"
    order = [s for s, (_, repeats) in enumerate(graph.run.model.segments) for _ in range(repeats)]

    def layer(kind: str, number: int, segment: int) -> int:
        size, name = len(graph.segments[segment]), f"{micro}, layer {number}"
        gathered = graph.add(f"weights {name}", times(sent[f"{kind} weights"], size), stream=stream)
        own = graph.layers("forward" if kind == "forward" else "backward", segment)
        made = joined(own, times(sent[kind], size))
        return graph.add(f"{kind} {name}", made, needs={gathered} - {-1})

    graph.add(f"embedding {micro}", graph.ends("embedding"))
    for number, segment in enumerate(order):
        layer("forward", number, segment)
    graph.add(f"loss {micro}", joined(graph.ends("loss"), graph.loss_sums(), sent["loss"]))
    for number, segment in reversed([*enumerate(order)]):
        done = layer("backward", number, segment)
        sums = graph.combined(times(sent["gradients"], len(graph.segments[segment])))
        graph.add(f"gradients {micro}, layer {number}", sums, needs={done}, stream=stream)
    graph.add(f"embedding gradients {micro}", graph.ends("embedding gradients"))


def _places(run: RunConfig, one: ExpectedCollective) -> list[tuple[str, float]]:
    """Places of a collective, with its count in each; those of weights are spread evenly over layers.

    Raises:
        NotImplementedError: it has none.
    """
    zero, each = run.parallel.zero, one.count / run.accumulate / run.model.layers
    if one.why == "weights":
        return [("forward weights", each / 2), ("backward weights", each / 2)] if zero == 3 else [("start", one.count)]
    if one.why in WEIGHTS:
        return [("end", one.count)] if zero == 1 else [("gradients", each)]
    if one.why == "activations":  # two sums in a layer's forward pass, the others behind it
        return [("forward", 2.0), ("backward", each - 2)]
    if one.why == "embedding; loss, backward":
        return [("loss", one.count / run.accumulate)]
    raise NotImplementedError(f"profile: collectives of {one.why} have no place in the step yet.")
