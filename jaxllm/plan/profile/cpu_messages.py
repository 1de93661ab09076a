"""Small messages of a step between CPUs, where each array of a collective is a message of its own.

A program names many arrays in one all-reduce, and accelerators send them as one. Gloo, by which processes of CPUs
exchange arrays, sends one after the other: what counts there is their number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from jaxllm.plan.formulas.device_work import DeviceWork, leaves_of, rules_of
from jaxllm.train import RunConfig
from pallas_kernels.cross_entropy.xla import default_chunk
from sharding import MeshSpec
from sharding.rules import mesh_axes_of

LOSS_SUMS = 3
"""Sums of a loss: of the loss, of the targets' negative log-likelihoods, and of squared log-sum-exps."""
NORMS = 4
"""Norms of a step: of gradients, as they are reported and as they are clipped, of updates and of parameters."""
BATCH = ("data", "fsdp")


class CpuMessages(NamedTuple):
    """All-reduces of float32 arrays.

    Attributes:
        axes: mesh axes that they go over.
        bytes: of an array.
        count: of arrays.
    """

    axes: tuple[str, ...]
    bytes: int
    count: int


def loss_messages(mesh: MeshSpec) -> CpuMessages:
    """Sums of the loss of a micro-batch over devices with other rows; of all micro-batches, where there are stages."""
    return CpuMessages(_larger(mesh, (*BATCH, "stage")), 4, LOSS_SUMS)


def softmax_messages(work: DeviceWork) -> CpuMessages:
    """Maxima, sums and targets' logits of a vocabulary that ``tensor`` splits, for a chunk of tokens at a time."""
    sizes = dict(work.mesh.axes)
    chunk = min(work.tokens, default_chunk(work.tokens, work.run.model.vocab_size // sizes.get("tensor", 1)))
    return CpuMessages(_larger(work.mesh, ("tensor",)), 4 * chunk, 3 * math.ceil(work.tokens / chunk))


def last_messages(run: RunConfig, mesh: MeshSpec) -> list[CpuMessages]:
    """At the end of a step: the number of targets, and the norms of each array that devices split."""
    rules, abstract = rules_of(run.parallel), mesh.abstract()
    over = Counter(
        _larger(mesh, mesh_axes_of(rules.spec(leaf.axes, abstract, leaf.shape))) for leaf in leaves_of(run.model)
    )
    norms = [CpuMessages(axes, 4, NORMS * count) for axes, count in over.items() if axes]
    return [CpuMessages(_larger(mesh, BATCH), 4, 1), *norms]


def _larger(mesh: MeshSpec, axes: Collection[str]) -> tuple[str, ...]:
    """Those of several devices, in the order of the mesh."""
    return tuple(name for name, size in mesh.axes if name in axes and size > 1)
