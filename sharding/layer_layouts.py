"""Layouts by layer: one mesh axis splits heads and width in some layers, and rows in others.

    tensor   the axis ``tensor`` splits heads and feed-forward width (tensor parallelism)
    fsdp     it splits rows, and weights are all-gathered over it before use (FSDP)

Galvatron (arXiv:2211.13878) and Galvatron-BMW (arXiv:2307.02031) choose such layouts layer by layer. Weights are stored
in one layout, that of tensor parallelism, so that layers of one stack may be used in both: a weight that is split by
heads over ``tensor`` is 1/n of a device's bytes either way, and an all-gather undoes any split.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal, get_args

from jax.sharding import PartitionSpec

from sharding.rules import Rules, mesh_axes_of, without_axes

LayerLayout = Literal["tensor", "fsdp"]
"""Use of the mesh axis ``tensor`` in a layer."""
LAYOUTS: tuple[LayerLayout, ...] = get_args(LayerLayout)
AXIS = "tensor"
"""The mesh axis whose use differs between layers."""
_ROWS = ("batch", "expert_batch")
_STORED = ("embed", "expert_embed", "latent")


@functools.lru_cache(maxsize=256)
def rules_of(rules: Rules, layout: str) -> Rules:
    """Rules of layers with a layout: activations, and weights as they are used.

    Args:
        rules: of the whole model.
        layout: one of ``LAYOUTS``.
    """
    own = replace(rules, layouts=())
    if layout == AXIS:
        return own
    split = {name: tuple(axis for axis in axes if axis != AXIS) for name, axes in rules.table}
    rows = {name: (*split[name], AXIS) for name in (*_ROWS, *_STORED)}
    rings = tuple(axis for axis in rules.rings if axis != AXIS)
    return replace(own.override(**{**split, **rows}), rings=rings)


def row_axes(rules: Rules) -> tuple[str, ...]:
    """Mesh axes that rows of a batch are split over in the layers that split them most."""
    axes = rules.mesh_axes("batch")
    return (*axes, AXIS) if any(layout != AXIS for layout, _ in rules.layouts) else axes


def between(stored: PartitionSpec, whole: PartitionSpec) -> PartitionSpec | None:
    """Partition spec of a weight that is all-gathered over all axes but ``tensor``, which is the last and fastest.

    Its gradient is reduce-scattered over one axis after the other then: of two dimensions at once, compilers for GPUs
    make an all-reduce.

    Args:
        stored: partition spec before the all-gather.
        whole: after it.

    Returns:
        None where the weight is not gathered over both, or along one dimension: its gradient's shards would have to
        change places then, and the partitioner of jax 0.10.2 mixes up those of partial sums.
    """
    gathered = mesh_axes_of(stored.partitions) - mesh_axes_of(whole.partitions)
    along = [axes for dim in stored.partitions if (axes := gathered & mesh_axes_of(PartitionSpec(dim)))]
    if {AXIS} not in along or len(along) == 1:
        return None
    return without_axes(PartitionSpec(*stored.partitions), gathered - {AXIS})
