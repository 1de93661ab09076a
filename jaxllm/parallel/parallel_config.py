"""A plan is data: the sizes of the mesh's axes, and this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import sharding
from jaxllm.parallel.pipeline.schedule_generators import Name, default_chunks
from pallas_kernels.ring_attention.layout import Layout
from sharding import Rules


@dataclass(frozen=True)
class ParallelConfig:
    """How arrays are split over the mesh, beyond the sizes of its axes.

    Attributes:
        zero: what a device holds a part of, over the axes that split tokens but for ``data`` (ZeRO,
            arXiv:1910.02054). 3: of parameters, gradients and optimizer state; a layer's weights are gathered when it
            uses them. 2: of gradients and optimizer state; all weights are gathered once a step, in compute dtype. 1:
            of optimizer state; gradients are added up over devices once a step, whatever ``accumulate`` is. The float32
            parameters that the optimizer updates count as its state.
        sequence: the residual stream and norms are split by sequence over ``tensor`` as well (Megatron sequence
            parallelism, arXiv:2205.05198): less memory for the same bytes sent.
        overlap: with ``sequence``, whether the gathers before a layer's products and the scatters after them are left
            to the compiler whole, or go around a ring beside the products (``sharding.ring``, collective matmul).
        context: how queries meet keys of other parts of the sequence over the axis ``context``: keys and values go
            around a ring (arXiv:2310.01889), or each device gathers them all (as Llama 3 trains, arXiv:2407.21783).
        layout: which tokens of a row a device gets over ``context`` (``pallas_kernels.ring_attention.layout``).
        schedule: of the pipeline, where the mesh has ``stage`` (``jaxllm.parallel.pipeline``); its micro-batches are
            the run's ``accumulate``.
        chunks: virtual stages of a stage, for the schedule "interleaved"; 0 for the schedule's own number.
        depths: layers (or groups of them, where a pattern repeats) of each virtual stage, in the model's order; as even
            as can be if empty.
        offload: share of a stage's layers whose activations wait in the host's memory for the backward pass
            (PipeOffload, arXiv:2503.01328); 0: none, 1: all.
    """

    zero: Literal[1, 2, 3] = 3
    sequence: bool = False
    overlap: Literal["compiler", "ring"] = "compiler"
    context: Literal["ring", "all_gather"] = "ring"
    layout: Layout = "zigzag"
    schedule: Name = "1f1b"
    chunks: int = 0
    depths: tuple[int, ...] = ()
    offload: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.offload <= 1:
            raise ValueError(f"parallel: offload = {self.offload}; give a share of a stage's layers, from 0 to 1.")
        if self.overlap == "ring" and not self.sequence:
            raise ValueError(
                'parallel: overlap = "ring" is for a sequence that is split over tensor: give sequence = true as well, '
                'or overlap = "compiler".'
            )

    def rules(self, base: Rules = sharding.DEFAULT) -> Rules:
        """The sharding table of this plan."""
        if self.sequence:
            base = base.override(residual_seq=(*base.mesh_axes("residual_seq"), "tensor"))
        if self.overlap == "ring":
            base = replace(base, rings=("tensor",))
        if self.context == "all_gather":
            base = base.override(attn_kv_seq=())
        return self._staged(base)

    def _staged(self, base: Rules) -> Rules:
        """Parameters stored split over ``stage``: layers where they are used, or all by width; the ends by width."""
        stored = ("vocab_embed",) if self.in_place else ("vocab_embed", "embed", "expert_embed")
        axes = {name: tuple(a for axis in base.mesh_axes(name) for a in _after_fsdp(axis)) for name in stored}
        return base.override(**axes, layers=("stage",) if self.in_place else ())

    @property
    def in_place(self) -> bool:
        """Whether a stage's layers follow each other and are as many as another's: they lie where they are used."""
        return not self.depths and (self.chunks or default_chunks(self.schedule)) == 1


def _after_fsdp(axis: str) -> tuple[str, ...]:
    """Manual axes of the pipeline go before all others of a dimension."""
    return (axis, "stage") if axis == "fsdp" else (axis,)
