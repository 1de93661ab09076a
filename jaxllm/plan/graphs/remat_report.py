"""Remat report: what each policy of a run recomputes, beside the least by any values of the block in the same bytes."""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.models.remat import Policy, policies_by_segment
from jaxllm.parallel.sharding_table_view import columns
from jaxllm.plan.graphs.block_graph import BlockGraph, block_graphs
from jaxllm.plan.graphs.kept_values import KeptValues
from jaxllm.train.config import RunConfig
from sharding import MeshSpec


class RematComparison(NamedTuple):
    """Policy of some layers beside the best choice of values.

    Attributes:
        segment: number of the segment of the model.
        policy: of ``model.remat``.
        layers: how many layers have it.
        own: what it keeps and recomputes in one repeat of the segment's group, of one micro-batch on one device.
        best: the same of the values that recompute least in as many bytes.
        block: the group.
    """

    segment: int
    policy: Policy
    layers: int
    own: KeptValues
    best: KeptValues
    block: BlockGraph

    @property
    def more(self) -> float:
        """Share of the recomputed FLOPs that the best choice does without."""
        return 1 - self.best.time / self.own.time if self.own.time else 0.0


def compare_remat(config: RunConfig, mesh: MeshSpec) -> list[RematComparison]:
    """Comparisons of a run's policies, segment by segment; policies that move or project activations, or recompute
    whole runs of layers, have none. Empty for a pipeline, whose schedule decides what is kept, and for a model whose
    segments are not traced as loops over layers.

    Raises:
        RematError: the policies do not fit the layers.
        ShardingError, ConfigError: the run does not fit the mesh.
    """
    if dict(mesh.axes).get("stage", 1) > 1:
        return []
    segments = config.model.segments
    pieces = policies_by_segment(config.model.remat, segments)
    found: list[RematComparison] = []
    blocks = block_graphs(config, mesh)
    if len(blocks) != len(pieces):
        return []
    for place, (block, own) in enumerate(zip(blocks, pieces, strict=True)):
        for policy, repeats in own:
            if (kept := block.kept_by(policy)) is not None:
                best = block.best(kept.bytes)
                found.append(RematComparison(place, policy, repeats * len(segments[place][0]), kept, best, block))
    return found


def remat_table(found: list[RematComparison]) -> str:
    """Text table of comparisons, and below it the values that the best choices keep; "" if there are none."""
    if not found:
        return ""
    rows = [
        (
            one.policy,
            str(one.layers),
            f"{one.own.bytes / 2**20:.2f}",
            f"{one.own.time / 1e9:.2f}",
            f"{one.best.time / 1e9:.2f}",
            f"{100 * one.more:.1f}%",
        )
        for one in found
    ]
    head = ("kept by a layer", "layers", "MiB", "GFLOP again", "least in as many MiB", "less")
    lines = [columns(head, rows, "<>>>>>")]
    lines += [f"the least, beside {one.policy}: {one.block.describe(one.best.kept)}" for one in found if one.more > 0]
    return "\n".join(lines)
