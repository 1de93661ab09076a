"""Block graph: values of one transformer block and what its backward pass needs of them, from the traced step.

The step is traced with ``model.remat`` "none" on an abstract mesh: nothing is compiled and no device is needed. The
body of the forward loop over layers is the block's forward pass, and what the loop stacks is what the backward pass
reads. So ``kept_values`` finds, for the bytes that a policy of ``model.remat`` keeps, the set of named values of the
block with the least recomputation, which is a policy too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

import sharding
from jaxllm.models.remat import BEFORE_ATTENTION, MATMUL_RESULTS, VALUES, Policy, save_policy, saved_values
from jaxllm.plan.graphs.jaxpr_graph import TracedGraph, graph_of, inner_jaxprs, scan_counts
from jaxllm.plan.graphs.kept_values import KeptValues, keep, recompute
from jaxllm.plan.graphs.value_graph import Operation, ValueGraph
from jaxllm.train.compile_step import abstract_batch, step_settings
from jaxllm.train.config import RunConfig
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.run_model import run_model
from pallas_kernels.flash_attention import RESIDUALS
from sharding import MeshSpec

SECONDS = 20.0
"""Time of the solver for one policy of one block."""


class BlockGraph(NamedTuple):
    """Block that repeats, or group of blocks that repeats together.

    Attributes:
        traced: its forward pass; values that depend on parameters alone are arguments.
        needed: values that its backward pass reads.
        repeats: how often it repeats.
        stream: bytes of its input.
    """

    traced: TracedGraph
    needed: frozenset[int]
    repeats: int
    stream: int

    def kept_by(self, policy: Policy) -> KeptValues | None:
        """Values that a policy keeps, and operations that it runs again; None for a policy whose values are not kept
        whole on the device.
        """
        names = names_kept(policy)
        if policy == "none":
            return recompute(self.traced.graph, self.needed, self.needed)
        if names is None:
            return None
        kept = [i for i, own in enumerate(self.traced.names) if own & set(names) and self._computed(i)]
        return recompute(self.traced.graph, self.needed, kept)

    def values(self) -> dict[str, tuple[int, ...]]:
        """Operations of each of ``jaxllm.models.remat.VALUES`` that the block has; of a group those of all blocks."""
        found = {
            value: tuple(i for i, own in enumerate(self.traced.names) if own & set(names) and self._computed(i))
            for value, names in VALUES.items()
        }
        return {value: operations for value, operations in found.items() if operations}

    def bytes_of(self, value: str) -> int:
        """Bytes of one of ``jaxllm.models.remat.VALUES``; 0 if the block has none."""
        return sum(self.traced.graph.operations[i].bytes for i in self.values().get(value, ()))

    def best(self, room: int) -> Policy:
        """Policy that keeps at most so many bytes of named values, with which the least is computed again."""
        values = self.values()
        found = keep(self.traced.graph, self.needed, room, together=list(values.values()), seconds=SECONDS)
        return save_policy(value for value, own in values.items() if set(own) & set(found.kept))

    def best_of_any(self, room: int) -> KeptValues:
        """Values in so many bytes, named or not, with which the least is computed again."""
        return keep(self.traced.graph, self.needed, room, seconds=SECONDS)

    def _computed(self, i: int) -> bool:
        return not self.traced.graph.operations[i].given


def value_bytes(blocks: Sequence[BlockGraph]) -> dict[str, float]:
    """Bytes of each value that "save" can keep or move, of all layers; of "input" once for each group of blocks."""
    found = {value: float(sum(block.repeats * block.bytes_of(value) for block in blocks)) for value in VALUES}
    found["input"] = float(sum(block.repeats * block.stream for block in blocks))
    return {value: size for value, size in found.items() if size}


def names_kept(policy: Policy) -> tuple[str, ...] | None:
    """``checkpoint_name``s that a policy keeps on the device beside the block's input; None for other policies."""
    by_policy: Mapping[str, tuple[str, ...]] = {
        "full": (),
        "attention": BEFORE_ATTENTION,
        "elementwise": MATMUL_RESULTS,
    }
    if (values := saved_values(policy)) is not None:
        return tuple(name for value in values for name in VALUES[value])
    return by_policy.get(policy)


def block_graphs(config: RunConfig, mesh: MeshSpec) -> list[BlockGraph]:
    """Graphs of the blocks of a run's segments, for one device of a mesh and one micro-batch; none for a pipeline, and
    for a model whose segments are not traced as loops over layers.

    Raises:
        ShardingError, ConfigError: the run does not fit the mesh (``jaxllm.train.run``).
    """
    if dict(mesh.axes).get("stage", 1) > 1:
        return []
    run = step_settings(config)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, remat="none"))
    model, abstract = run_model(run), mesh.abstract()
    with jax.sharding.use_abstract_mesh(abstract):
        params = sharding.abstract_params(model.abstract(), model.logical_axes(), abstract, model.rules)
        batch = abstract_batch(run, model, abstract)
        jaxpr = jax.make_jaxpr(build_value_and_grad(run, model, abstract))(params, batch)
    loops = _layer_loops(jaxpr.jaxpr)[: len(run.model.segments)]
    return [_block(one) for one in loops] if len(loops) == len(run.model.segments) else []


def _layer_loops(jaxpr: Any) -> list[Any]:
    """Loops over layers in order, those of the forward pass first: their bodies name the residual stream."""
    found: list[Any] = []
    for equation in jaxpr.eqns:
        bodies = inner_jaxprs(equation)
        if equation.primitive.name == "scan" and any("residual" in names for names in graph_of(bodies[0]).names):
            found.append(equation)
        else:
            found += [loop for body in bodies for loop in _layer_loops(body)]
    return found


def _block(loop: Any) -> BlockGraph:
    """Block of a forward loop."""
    body, (first, carries) = loop.params["jaxpr"], scan_counts(loop)
    traced = graph_of(body)
    streams = range(first, first + carries)
    depends: set[int] = set(streams)
    operations: list[Operation] = []
    for i, one in enumerate(traced.graph.operations):
        if any(j in depends for j in one.inputs):
            depends.add(i)
            operations.append(one)
        else:  # of parameters alone, or an argument: there in any case
            operations.append(Operation(one.name, (), 0, given=True))
    computed = [i for i in traced.results[carries:] if i is not None and not operations[i].given]
    needed = frozenset(computed)
    for i in _within_attention(traced) - needed:
        operations[i] = dataclasses.replace(operations[i], bytes=0)
    stream = max(traced.graph.operations[i].bytes for i in streams)
    traced = dataclasses.replace(traced, graph=ValueGraph(tuple(operations)))
    return BlockGraph(traced, needed, loop.params["length"], stream)


def _within_attention(traced: TracedGraph) -> set[int]:
    """Operations between attention's queries, keys and values and its results: one kernel, which keeps none of their
    values, also where the trace has them one by one.
    """
    *into, out, sums = RESIDUALS
    operations, names = traced.graph.operations, traced.names
    after: set[int] = set()
    for i, one in enumerate(operations):
        if names[i] & set(into) or any(j in after for j in one.inputs):
            after.add(i)
    before: set[int] = set()
    for i in reversed(range(len(operations))):
        if names[i] & {out, sums} or i in before:
            before |= set(operations[i].inputs)
    return {i for i in after & before if not names[i]}
