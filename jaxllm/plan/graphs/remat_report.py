"""Remat report: what each policy of a run recomputes, beside the least by any named values in the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.models.remat import Policy, policies_by_segment
from jaxllm.parallel.sharding_table_view import columns
from jaxllm.plan.graphs.block_graph import BlockGraph
from jaxllm.plan.graphs.kept_values import KeptValues
from jaxllm.train.config import RunConfig


class RematComparison(NamedTuple):
    """Policy of some layers beside the best choice of values.

    Attributes:
        segment: number of the segment of the model.
        policy: of ``model.remat``.
        layers: how many layers have it.
        own: what it keeps and recomputes in one repeat of the segment's group, of one micro-batch on one device.
        instead: policy of named values that recomputes least in as many bytes; the same one where it does.
        best: the same of that policy.
    """

    segment: int
    policy: Policy
    layers: int
    own: KeptValues
    instead: Policy
    best: KeptValues

    @property
    def more(self) -> float:
        """Share of the recomputed FLOPs that the best choice does without."""
        return 1 - self.best.time / self.own.time if self.own.time else 0.0


def compare_remat(config: RunConfig, blocks: Sequence[BlockGraph]) -> list[RematComparison]:
    """Comparisons of a run's policies, segment by segment; policies that move or project activations, or recompute
    whole runs of layers, have none.

    Args:
        config: the run.
        blocks: of ``block_graphs``; none for a pipeline, whose schedule decides what is kept.

    Raises:
        RematError: the policies do not fit the layers.
    """
    if not blocks:
        return []
    segments = config.model.segments
    pieces = policies_by_segment(config.model.remat, segments)
    found: list[RematComparison] = []
    for place, (block, own) in enumerate(zip(blocks, pieces, strict=True)):
        for policy, repeats in own:
            if (kept := block.kept_by(policy)) is not None:
                instead = block.best(kept.bytes)
                best = block.kept_by(instead)
                assert best is not None
                if best.time >= kept.time:
                    instead, best = policy, kept
                layers = repeats * len(segments[place][0])
                found.append(RematComparison(place, policy, layers, kept, instead, best))
    return found


def remat_table(found: list[RematComparison]) -> str:
    """Text table of comparisons; "" if there are none."""
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
            one.instead if one.more > 0 else "",
        )
        for one in found
    ]
    head = ("kept by a layer", "layers", "MiB", "GFLOP again", "least in as many MiB", "less", "by")
    return columns(head, rows, "<>>>>><")
