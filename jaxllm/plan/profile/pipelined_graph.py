"""Task graph of a pipelined step: operations of the schedule table on a lane for each stage, messages between them.

As the executor runs it (``jaxllm.parallel.pipeline.schedule_executor``): in a tick each stage runs one operation, then
neighbours exchange what any stage sends. Embedding and head are all-gathered over the stages before the first tick;
gradients are summed after the last. Every tick moves saved activations in and out of their slots, whatever it runs: its
time is that of a pipeline of one stage, less its passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax.numpy as jnp

from jaxllm.parallel.pipeline.schedule_table import KINDS, tabulate
from jaxllm.plan.formulas.device_work import DeviceWeight
from jaxllm.plan.profile.graph_builder import Counts, GraphBuilder, StepGraph, joined, times
from jaxllm.plan.profile.operators import GradientSum, PipelineTick
from jaxllm.train import RunConfig
from jaxllm.train.step.pipelined_loss import pipeline_plan
from sharding import MeshSpec


def pipelined_graph(run: RunConfig, mesh: MeshSpec, platform: str) -> StepGraph:
    """Task graph of a step on a mesh with stages, see ``step_graph.step_graph``."""
    return _PipelinedGraph(run, mesh, platform).built()


class _PipelinedGraph:
    def __init__(self, run: RunConfig, mesh: MeshSpec, platform: str):
        self.graph = graph = GraphBuilder(run, mesh, platform)
        self.run, self.zero, self.in_place = run, run.parallel.zero, run.parallel.in_place
        self.stages, self.fsdp = graph.sizes["stage"], ("fsdp",) if "fsdp" in graph.sizes else ()
        self.schedule, self.depths = pipeline_plan(run, self.stages)
        self.layers = [w for w in graph.work.weights if w.name.startswith("segments/")]
        self.ends = [w for w in graph.work.weights if not w.name.startswith("segments/")]
        self.over = ("stage", *self.fsdp)
        self.compute, self.param = run.model.dtype, run.model.param_dtype
        self.stream = graph.work.stream_bytes()
        self.tick = self._tick()

    def built(self) -> StepGraph:
        graph, table = self.graph, tabulate(self.schedule)
        for lane in range(self.stages):
            graph.add("weights", self._gathered(), lane)
        for tick in range(table.ticks):
            for lane in range(self.stages):
                kind, virtual = KINDS[table.kind[tick, lane]], int(table.virtual[tick, lane])
                own = {} if kind == "idle" else self._operation(kind, virtual)
                label = kind if kind == "idle" else f"{kind} {table.micro[tick, lane]}, virtual stage {virtual}"
                graph.add(label, joined(own, self.tick), lane)
            for does, pairs in ((table.right[tick], table.pairs_right), (table.left[tick], table.pairs_left)):
                if does:
                    self._exchange(tick, pairs)
        before = set(graph.last.values())
        for lane in range(self.stages):
            graph.add("gradients", self._summed(), lane, before)
        before = set(graph.last.values())
        for lane in range(self.stages):
            graph.add("scalars", graph.scalars(), lane, before)
            graph.add("update", graph.update(), lane)
        return graph.built()

    def _tick(self) -> Counts:
        """Own time of a tick, beside its operation: that of a measured tick less the passes in it."""
        graph, kinds = self.graph, len(self.schedule.kinds)
        busiest = self.depths.counts[self.depths.counts.sum(1).argmax()].tolist()
        g, units = max(enumerate(busiest), key=lambda pair: pair[1])[0], sum(busiest)
        group = graph.segments[g]
        model = replace(graph.local, prefix=(), pattern=group, layers=units * len(group))
        tick = PipelineTick(model, graph.rows, graph.work.row, self.schedule.split)
        elements = sum(w.used for w in self.layers if w.name.startswith(f"segments/{g}/"))
        passes = joined(
            times(joined(graph.layers("forward", g), graph.layers("backward", g)), units),
            {GradientSum(elements, self.param): units},
            *(graph.ends(kind) for kind in ("embedding", "embedding gradients", "loss")),
        )
        return joined({tick: 1.0}, times(passes, -1 / kinds))

    def _exchange(self, tick: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Messages of a tick: a lane that receives waits for what its source has done before."""
        before = dict(self.graph.last)
        for lane in sorted({lane for pair in pairs for lane in pair}):
            needs = {before[a, "compute"] for a, b in pairs if b == lane and (a, "compute") in before}
            message = self.graph.sent("collective-permute", ("stage",), self.stream)
            self.graph.add(f"message, tick {tick}", message, lane, needs)

    def _operation(self, kind: str, virtual: int) -> Counts:
        graph = self.graph
        parts = [times(self._group(kind, g), count) for g, count in enumerate(self.depths.counts[virtual].tolist())]
        if kind == "F" and virtual == 0:
            parts += [graph.ends("embedding"), graph.sent("all-reduce", ("tensor",), self.stream)]
        if kind == "F" and virtual == len(self.depths.counts) - 1:
            parts += [graph.ends("loss"), graph.sent("all-reduce", ("tensor",), self.stream), graph.softmax()]
        if kind == "B" and virtual == 0:
            parts.append(graph.ends("embedding gradients"))
        return joined(*parts)

    def _group(self, kind: str, g: int) -> Counts:
        """One group of layers of segment g in an operation."""
        graph, size, whole = self.graph, len(self.graph.segments[g]), self.zero == 1
        weights = [w for w in self.layers if w.name.startswith(f"segments/{g}/")]
        gathered = self._leaves("all-gather", self.fsdp, weights, self.compute) if self.zero == 3 else {}
        reduced = {} if whole else self._leaves("reduce-scatter", self.fsdp, weights, self.compute)
        added: Counts = {GradientSum(sum(w.used if whole else w.stored for w in weights), self.param): 1.0}
        sums = {"F": 2, "B": 3 if self.run.model.remat == "full" else 2, "W": 0}[kind]
        sent = joined(gathered, graph.sent("all-reduce", ("tensor",), self.stream, sums * size))
        if kind == "F":
            return joined(graph.layers("forward", g), sent)
        if kind == "W":  # a backward pass without its input gradients
            return joined(graph.layers("backward", g), graph.layers("input gradients", g, -1.0), sent, reduced, added)
        if self.schedule.split:
            return joined(graph.layers("input gradients", g), sent)
        return joined(graph.layers("backward", g), sent, reduced, added)

    def _gathered(self) -> Counts:
        """Collectives before the first tick: weights of embedding and head, of layers unless ZeRO-3 gathers them."""
        return joined(
            self._of_ends("all-gather", self.compute),
            {} if self.in_place else self._moved(self.compute),
            {} if self.zero == 3 else self._leaves("all-gather", self.fsdp, self.layers, self.compute, stacked=True),
        )

    def _summed(self) -> Counts:
        """Collectives after the last tick: sums of gradients."""
        late = (
            self._leaves("reduce-scatter", self.fsdp, self.layers, self.param, stacked=True) if self.zero == 1 else {}
        )
        parts = []
        for weight in (*self.layers, *self.ends):
            axes: tuple[str, ...] = ("data",)
            if weight.stored == weight.used:  # no axis splits it
                axes = ("data", *self.fsdp) if weight in self.layers else ("data", *self.over)
            size = weight.stored * weight.layers * jnp.dtype(self.param).itemsize
            parts.append(self.graph.sent("all-reduce", axes, size, dtype=self.param))
        ends, moved = self._of_ends("reduce-scatter", self.param), {} if self.in_place else self._moved(self.param)
        return joined(ends, late, self.graph.combined(joined(*parts)), self.graph.loss_sums(), moved)

    def _of_ends(self, kind: str, dtype: str) -> Counts:
        """Collectives of embedding and head over ``fsdp`` and over the stages, one after the other."""
        part = self._leaves(kind, ("stage",), self.ends, dtype, share=self.graph.sizes.get("fsdp", 1))
        return joined(part, self._leaves(kind, self.fsdp, self.ends, dtype))

    def _moved(self, dtype: str) -> Counts:
        """All-to-all that brings layers to their stages, or their gradients back."""
        size = jnp.dtype(dtype).itemsize
        return joined(
            *(
                self.graph.sent("all-to-all", ("stage",), w.stored * w.layers * size, dtype=dtype)
                for w in self.layers
                if w.matrix
            )
        )

    def _leaves(
        self,
        kind: str,
        axes: Sequence[str],
        weights: Iterable[DeviceWeight],
        dtype: str,
        *,
        stacked: bool = False,
        share: int = 1,
    ) -> Counts:
        """Collectives of weights that are split between steps: of one layer, or of the device's layers (stacked).

        ``share``: devices that the result stays split over.
        """
        size = jnp.dtype(dtype).itemsize
        return joined(
            *(
                self.graph.sent(kind, axes, w.used * (w.layers if stacked else 1) * size // share, dtype=dtype)
                for w in weights
                if w.stored < w.used
            )
        )
