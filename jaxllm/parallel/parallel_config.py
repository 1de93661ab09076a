"""Parallelism configuration: how a run is split over its mesh. A plan is this and the sizes of the mesh axes.

Data parallelism, FSDP (ZeRO-3), tensor parallelism, sequence parallelism, context parallelism, expert parallelism and
pipeline parallelism are chosen by the mesh axes (``sharding.AXES``); the options here refine them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import sharding
from jaxllm.models.layers.values_by_layers import ByLayers, parse_by_layers
from jaxllm.parallel.pipeline.offload_bands import OffloadedChunks
from jaxllm.parallel.pipeline.schedule_generators import Name, default_chunks
from pallas_kernels.ring_attention.layout import Layout
from sharding import MeshSpec, Rules, ShardingError
from sharding.folding import Folding
from sharding.layer_layouts import AXIS, LAYOUTS
from sharding.tensor_factoring import TensorFactoring

OUTER = ("local", "data")
"""Mesh axes of the outer levels of 3-level ZeRO, the innermost first."""


@dataclass(frozen=True)
class ParallelConfig:
    """Options of parallelism, beyond the sizes of the mesh axes.

    Attributes:
        zero: ZeRO stage (arXiv:1910.02054), over the axes that split tokens except ``data``. 3 (FSDP): parameters,
            gradients and optimizer state are sharded; a layer's weights are all-gathered when it uses them. 2:
            gradients and optimizer state are sharded; all weights are all-gathered once per step, in compute dtype. 1:
            optimizer state is sharded; gradients are summed over devices once per step, whatever ``accumulate`` is. The
            float32 parameters that the optimizer updates count as optimizer state. "3level" (ZeRO++ with three levels,
            arXiv:2501.04266): optimizer state is sharded over ``data`` and ``local`` too, gradients over ``local`` and
            the inner axes, weights in compute dtype over the inner axes alone: they are all-gathered over the outer
            ones once per step, and over the inner ones (the fastest links) when a layer uses them.
        gather: all-gathers of weights: "plain" in compute dtype; "int8": blocks of 8-bit integers with a scale each
            (ZeRO++, arXiv:2306.10209); gradients are taken at the rounded weights.
        reduce: sums of gradients over ``data`` and ``local``. "two_level": reduce-scatter over ``local``, all-reduce of
            the parts over ``data``, all-gather over ``local`` (HFReduce, arXiv:2408.14158); on several slices or nodes
            a mesh without ``local`` gets it: its ``data`` is split by them. "flat": one all-reduce over both. "auto":
            two levels where the mesh has ``local``, or ``data`` spans several TPU slices with several devices in each.
        tensor: tensor parallelism over the mesh axis ``tensor``: "1d" (Megatron, arXiv:1909.08053); "2d" factors the
            axis near-square into parts of the residual stream's features and parts of heads and width, "2x4" into so
            many of each (``sharding.tensor_factoring``).
        layers: use of the mesh axis ``tensor`` by layers, such as "tensor=8,fsdp=24", the last number of layers may be
            left out: "tensor" splits heads and width over it, "fsdp" splits rows over it and all-gathers weights, which
            are stored as those of "tensor" (``sharding.layer_layouts``). Embedding and head are as in "tensor".
        sequence: sequence parallelism (Megatron, arXiv:2205.05198): the residual stream and the norms are split by
            sequence over ``tensor`` as well; less memory for the same communication.
        overlap: with ``sequence``, "compiler" leaves the all-gathers before a layer's matmuls and the reduce-scatters
            after them to the compiler; "ring" overlaps them with the matmuls (collective matmul,
            ``sharding.collective_matmul``).
        context: context parallelism over the axis ``context``: "ring" is ring attention (arXiv:2310.01889);
            "all_gather" gathers all keys and values on each device (as in Llama 3, arXiv:2407.21783); "by_need" gives
            each document a ring of as many devices as it needs, and short ones none
            (``jaxllm.data.context_by_need``).
        slot: with context "by_need", tokens that a device has at a time; 0: as many as of a micro-batch.
        experts: factoring of the devices for experts, where it is another one than attention's (``sharding.folding``):
            "expert=8", or with the experts' width split too, "expert=4,tensor=2"; empty: experts are split over
            ``expert``, and their width over ``tensor``.
        layout: assignment of a row's tokens to devices over ``context`` (``pallas_kernels.ring_attention.layout``).
        micro_batches: uneven rows (Cephalo, arXiv:2411.01075): micro-batches of each index of the mesh axis ``data`` in
            a step, or with ZeRO-1 of each of ``data`` x ``fsdp``, for devices of unequal speed; their mean is the run's
            ``accumulate``. Gradients are then summed over these axes once a step (``jaxllm.train.unequal``). Empty:
            ``accumulate`` each.
        state_shares: uneven optimizer state (Cephalo): weights of the shares that devices hold, one for each index of
            ``data``, or with ZeRO-1 of each of ``data`` x ``fsdp``, for devices of unequal memory
            (``jaxllm.train.unequal.uneven_state``). Empty: the state is sharded as the parameters are.
        schedule: pipeline schedule, where the mesh has ``stage`` (``jaxllm.parallel.pipeline``); its micro-batches are
            the run's ``accumulate``.
        chunks: virtual stages per stage for "interleaved", "gis" and "gis_min"; 0 for the default of the schedule.
        depths: layers (or groups, where a pattern repeats) of each virtual stage, in model order; empty for an even
            split.
        offload: share of a stage's layers whose activations are offloaded to host memory until the backward pass
            (PipeOffload, arXiv:2503.01328); 0 none, 1 all.
        offload_chunks: chunks of a stage that the share is taken of: "all", the same share of each; or "longest", those
            whose activations live longest first (``jaxllm.parallel.pipeline.offload_bands``).
    """

    zero: Literal[1, 2, 3, "3level"] = 3
    gather: Literal["plain", "int8"] = "plain"
    reduce: Literal["auto", "two_level", "flat"] = "auto"
    tensor: str = "1d"
    layers: str = "tensor"
    sequence: bool = False
    overlap: Literal["compiler", "ring"] = "compiler"
    context: Literal["ring", "all_gather", "by_need"] = "ring"
    slot: int = 0
    experts: str = ""
    layout: Layout = "zigzag"
    micro_batches: tuple[int, ...] = ()
    state_shares: tuple[int, ...] = ()
    schedule: Name = "1f1b"
    chunks: int = 0
    depths: tuple[int, ...] = ()
    offload: float = 0.0
    offload_chunks: OffloadedChunks = "all"

    def __post_init__(self) -> None:
        if not 0 <= self.offload <= 1:
            raise ValueError(f"parallel: offload = {self.offload}; give a share of a stage's layers, from 0 to 1.")
        if self.offload_chunks == "longest" and not self.offload:
            raise ValueError(
                'parallel: offload_chunks = "longest" needs offload, a share of a stage\'s layers above 0.'
            )
        if self.overlap == "ring" and not self.sequence:
            raise ValueError(
                'parallel: overlap = "ring" is for a sequence that is split over tensor: give sequence = true as well, '
                'or overlap = "compiler".'
            )
        if self.slot < 0 or (self.slot and self.context != "by_need"):
            raise ValueError(
                f'parallel: slot = {self.slot} is for context = "by_need": give both and a number of tokens, or leave '
                "slot 0."
            )
        if any(n < 1 for n in self.micro_batches):
            given = " ".join(map(str, self.micro_batches))
            raise ValueError(f"parallel: micro_batches = {given}; give each device one or more.")
        if any(n < 1 for n in self.state_shares):
            given, least = (
                " ".join(map(str, found)) for found in (self.state_shares, (max(n, 1) for n in self.state_shares))
            )
            raise ValueError(
                f"parallel: state_shares = {given}; a share is a weight of 1 or more, such as {least}. A device with "
                "next to no memory left gets 1 beside larger weights of the others."
            )
        self.folding()
        self.factoring()
        self.layouts()

    def layouts(self) -> ByLayers:
        """Layouts of the layers in order, each with its number of layers, None for all that are left; () for one.

        Raises:
            ShardingError: ``layers`` is not written as such.
        """
        try:
            found = parse_by_layers(self.layers)
            if unknown := [layout for layout, _ in found if layout not in LAYOUTS]:
                raise ValueError(f"there is no {unknown[0]!r}")
        except ValueError as error:
            raise ShardingError(
                f"parallel: layers = {self.layers!r}: {error}. Give one of {', '.join(LAYOUTS)}, or both with their "
                'numbers of layers, such as "tensor=8,fsdp=24".'
            ) from None
        return () if found == ((AXIS, None),) else found

    def folding(self) -> Folding | None:
        """Factoring of the devices for experts, or None.

        Raises:
            ShardingError: ``experts`` is not written as one.
        """
        return Folding.parse(self.experts) if self.experts else None

    def factoring(self) -> TensorFactoring | None:
        """Factoring of the mesh axis ``tensor``, or None.

        Raises:
            ShardingError: ``tensor`` is not written as one.
        """
        return None if self.tensor == "1d" else TensorFactoring.parse(self.tensor)

    def factored(self, mesh: MeshSpec) -> MeshSpec:
        """Mesh with ``tensor`` factored in two, where the plan has it so; all sizes are known.

        Raises:
            ShardingError: it does not factor so; names what does.
        """
        factoring = self.factoring()
        return mesh if factoring is None else factoring.on(mesh)

    def rules(self, base: Rules = sharding.DEFAULT) -> Rules:
        """Sharding rules of this plan: logical axes to mesh axes."""
        if self.sequence:
            base = base.override(residual_seq=(*base.mesh_axes("residual_seq"), "tensor"))
        if self.overlap == "ring":
            base = replace(base, rings=("tensor",))
        if self.zero == "3level":
            stored = {name: (*base.mesh_axes(name), *OUTER) for name in base.storage}
            base = replace(base.override(**stored), between_steps=OUTER)
        if self.gather == "int8":
            base = replace(base, int8_gather=True)
        if self.reduce == "flat":
            base = replace(base, two_level=False)
        if self.context == "all_gather":
            base = base.override(attn_kv_seq=())
        return replace(self._staged(base), folding=self.folding(), layouts=self.layouts())

    def _staged(self, base: Rules) -> Rules:
        """Rules that store parameters split over ``stage``: layers by depth or width, embedding and head by width.

        Where layers are stored by depth, embedding and head of a width that stages do not divide are on every stage.
        """
        stored = ("vocab_embed",) if self.in_place else ("vocab_embed", "embed", "expert_embed")
        axes = {name: tuple(a for axis in base.mesh_axes(name) for a in _after_fsdp(axis)) for name in stored}
        staged = base.override(**axes, layers=("stage",) if self.in_place else ())
        return (
            replace(staged, where_divisible=(*staged.where_divisible, ("vocab_embed", "stage")))
            if self.in_place
            else staged
        )

    @property
    def in_place(self) -> bool:
        """Whether stages have equal numbers of consecutive layers: they are then stored where they are used."""
        return not self.depths and (self.chunks or default_chunks(self.schedule)) == 1


def _after_fsdp(axis: str) -> tuple[str, ...]:
    """Mesh axes that replace ``axis``: the manual axes of a pipeline go before all others of a dimension."""
    return (axis, "stage") if axis == "fsdp" else (axis,)
