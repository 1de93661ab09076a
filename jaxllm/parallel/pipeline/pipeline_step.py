"""Pipeline parallelism: the step of one device, a loop over ticks that runs the operations of the schedule table.

See ``schedule_executor``.

Legend: B batch, S sequence, D embed, U units of a segment, R places for units on a stage.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Int

from jaxllm.models import Functional, Segments
from jaxllm.models.param_subset import is_frozen, merge, select
from jaxllm.models.remat import MATMUL_RESULTS
from jaxllm.parallel.pipeline.offload_bands import OffloadedChunks, offload_bands
from jaxllm.parallel.pipeline.saved_activations import ActivationSlot, ActivationStore, Away
from jaxllm.parallel.pipeline.schedule import Schedule
from jaxllm.parallel.pipeline.schedule_table import ScheduleTable, tabulate
from jaxllm.parallel.pipeline.slot_arrays import add_trees, read_slot, write_slot, zeros
from jaxllm.parallel.pipeline.stage_collectives import (
    all_gather_over,
    dimension_over,
    gather_layer_weight,
    is_spec,
    reduce_scatter_over,
    replicate_shared_dims,
)
from jaxllm.parallel.pipeline.stage_layout import (
    STAGE,
    StageDepths,
    UnitPlacement,
    gather_units,
    place_units,
    return_gradients,
)
from jaxllm.parallel.pipeline.stage_messages import SlowLinks, lost
from jaxllm.parallel.pipeline.stage_split import SplitLayer, split_layer

MANUAL = (STAGE, "replica", "data", "fsdp")
TREE = ("embedding", "segments", "head")
OPERATIONS = ("idle", "forward", "backward", "weight_grads")
"""Named scopes of the operations, by their index in ``schedule_table.KINDS``."""

Head = Callable[[Any, Array, Any], Any]
"""Head and loss: ``(weights of embedding and head, hidden states, micro-batch) -> sums``, with a field ``loss``."""

Slots = list[list[ActivationSlot]]
"""Slots of an operation, by segment and band of its layers."""

Branch = Callable[[Any, Any, Slots, Array], tuple[Any, Slots, Array]]
"""Operation: ``(cell of the table, state, its slots, message) -> (state, slots, message to send)``."""


@runtime_checkable
class AuxLossCollector(Protocol):
    """Collects auxiliary losses of layers (such as the load-balancing loss of routers) and sums for metrics."""

    def zeros(self) -> Any:
        """Initial sums."""
        ...

    def context(self, g: int, segments: Segments, over: tuple[str, ...]) -> Any:
        """Attention context of a unit of segment g; a micro-batch is split over the manual axes ``over``."""
        ...

    def collect(self, context: Any, weight: Array) -> tuple[Array, Any]:
        """Auxiliary loss and sums of a unit from its context; ``weight`` is the micro-batch's share of targets."""
        ...

    def add(self, sums: Any, found: Any, g: int, unit: Array) -> Any:
        """``sums`` plus those of a unit of segment g."""
        ...


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Pipelined model: a model with its schedule and options.

    Attributes:
        model: functional decoder.
        schedule: pipeline schedule.
        depths: assignment of layers to virtual stages.
        zero: ZeRO stage over ``fsdp``, see ``ParallelConfig``.
        layout: assignment of a row's tokens to devices where the mesh splits the sequence.
        aux_losses: collects auxiliary losses of the layers, in a step with gradients.
        offload: share of a stage's layers whose activations are offloaded to the host, see ``saved_activations``.
        offload_chunks: chunks that the share is taken of, see ``offload_bands``.
        trainable: subset of the parameters that gradients are taken of (``jaxllm.models.param_subset``); None: all.
        links: replicas whose messages between stages are projected; None: all messages are whole.
    """

    model: Functional
    schedule: Schedule
    depths: StageDepths
    zero: Literal[1, 2, 3] = 3
    layout: Any = "contiguous"
    aux_losses: AuxLossCollector | None = None
    offload: float = 0.0
    offload_chunks: OffloadedChunks = "all"
    trainable: Any = None
    links: SlowLinks | None = None


class PipelineStep:
    """Step of a pipeline on one device, traced inside ``jax.shard_map``."""

    def __init__(
        self,
        pipeline: Pipeline,
        mesh: AbstractMesh,
        manual: tuple[str, ...],
        stored: Any,
        head: Head,
        params: Any,
        parts: Any,
        total: Array,
    ):
        self.pipeline, self.model, self.mesh, self.manual = pipeline, pipeline.model, mesh, manual
        self.table: ScheduleTable = tabulate(pipeline.schedule)
        self.stored, self.head, self.params, self.parts, self.total = stored, head, params, parts, total
        self.batch_axes = tuple(axis for axis in manual if axis != STAGE)
        targets = jnp.sum(parts.targets >= 0, axis=(1, 2)).astype(total.dtype)
        self.shares = jax.lax.psum(targets, self.batch_axes) / total if self.batch_axes else targets / total
        schedule, segments = pipeline.schedule, self.model.config.segments
        self.last = schedule.stages * schedule.chunks - 1
        self.bands = offload_bands(schedule, pipeline.depths.rooms, pipeline.offload, pipeline.offload_chunks)
        self.tables = {band.away: tabulate(schedule, band.away) for band in itertools.chain.from_iterable(self.bands)}
        self.where: list[UnitPlacement] = [
            place_units(pipeline.depths, schedule, g, repeats) for g, (_, repeats) in enumerate(segments)
        ]
        used = jax.tree.map(replicate_shared_dims, jax.tree.map(self._cast, params, self.model.matrices()), stored)
        self.ends = jax.tree.map(self._whole_end, _ends(used), _ends(stored))
        # ZeRO-1 and 2: all-gathered for the whole step. ZeRO-3 (FSDP): split over fsdp, all-gathered at each use.
        self.parts_of = [
            jax.tree.map(
                lambda w, spec, where=where: gather_units(w, where, dimension_over(spec, STAGE)),
                used["segments"][str(g)],
                stored["segments"][str(g)],
            )
            for g, where in enumerate(self.where)
        ]
        self.weights = [
            w if pipeline.zero == 3 else jax.tree.map(all_gather_over, w, stored["segments"][str(g)])
            for g, w in enumerate(self.parts_of)
        ]
        self.blank = jax.eval_shape(self._embed, self.ends, self._micro(jnp.int32(0)))
        if pipeline.links is not None:
            self.basis = pipeline.links.basis(self.blank.shape[-1], self.blank.dtype)
            holders = [schedule.holder(virtual)[0] for virtual in range(self.last + 1)]
            crossed = [False, *(a != b for a, b in itertools.pairwise(holders))]
            self.crossed = jnp.asarray(crossed) & pipeline.links.is_here()

    def run(self) -> tuple[Any, Any, Any]:
        """Sums of the head, sums of the aux-loss collector, and gradients sharded as the parameters."""
        aux_losses = self.pipeline.aux_losses
        self.cuts = [self._cut(g) for g in range(len(self.where))]
        chunks = self.pipeline.schedule.chunks
        stores = [
            [
                ActivationStore.empty(
                    cut, self.tables[one.away], one.end - one.first, len(one.away) < chunks, bool(one.away)
                )
                for one in bands
            ]
            for cut, bands in zip(self.cuts, self.bands, strict=True)
        ]
        params = select(self.pipeline.trainable, self.params)
        no_gradient = lambda p, w: jnp.zeros_like(w, p.dtype)  # noqa: E731
        state = {
            "grads": [
                jax.tree.map(no_gradient, params["segments"][str(g)], self._trained(like, g))
                for g, like in enumerate(self.weights if self.pipeline.zero == 1 else self.parts_of)
            ],
            "ends": jax.tree.map(no_gradient, _ends(params), self._trained(self.ends)),
            "sums": self._no_sums(),
            "heard": None if aux_losses is None else aux_losses.zeros(),
        }
        branches = [self._idle, self._forward, self._backward, self._weights]
        state = self._ticks(state, branches if self.pipeline.schedule.split else branches[:3], stores)
        return self._total(state["sums"]), self._total(state["heard"]), self._collect(state)

    def run_forward(self) -> Any:
        """Sums of the head (evaluation)."""
        return self._total(self._ticks({"sums": self._no_sums()}, [self._idle, self._evaluate], [])["sums"])

    def _ticks(self, state: Any, branches: list[Branch], stores: list[list[ActivationStore]]) -> Any:
        """State after all ticks; ``branches`` has one for each kind of operation."""
        table, stage = self.table, jax.lax.axis_index(STAGE)
        names = ("kind", "micro", "chunk", "virtual", "message", "pending")
        arrivals = ("from_left", "from_right", "from_self")
        rows = {name: jnp.asarray(getattr(table, name)) for name in (*names, *arrivals, "right", "left")}
        slots_of = ("saved", "out", "back", "stays")
        bands = [band for of_segment in self.bands for band in of_segment][: sum(map(len, stores))]
        places: dict[frozenset[int], Any] = {
            band.away: {name: jnp.asarray(getattr(self.tables[band.away], name)) for name in slots_of} for band in bands
        }
        structure = jax.tree.structure(stores, is_leaf=lambda x: isinstance(x, ActivationStore))

        def tick(carry: tuple[Array, Any, list[ActivationStore]], row: Any) -> tuple[Any, None]:
            (pool, state, stores), (row, places) = carry, row
            cell = {name: row[name][stage] for name in (*names, *arrivals)}
            cells = [cell | {name: places[number][name][stage] for name in slots_of} for number in numbers]
            message = read_slot(pool, cell["message"])
            opened = [store.open(own) for store, own in zip(stores, cells, strict=True)]
            does = [
                _scoped(f"pipeline_{name}", branch, cell) for name, branch in zip(OPERATIONS, branches, strict=False)
            ]
            slots = structure.unflatten([slot for slot, _, _ in opened])
            state, slots, out = jax.lax.switch(cell["kind"], does, state, slots, message)
            slots = structure.flatten_up_to(slots)
            stores = [
                store.close(slot, brought, own)
                for slot, (_, store, brought), own in zip(slots, opened, cells, strict=True)
            ]
            with jax.named_scope("pipeline_send"):
                pool = write_slot(pool, out, cell["from_self"])
                pool = self._send(pool, out, row["right"], cell["from_left"], table.pairs_right)
                pool = self._send(pool, out, row["left"], cell["from_right"], table.pairs_left)
            return (pool, state, stores), None

        keys = list(places)
        numbers = [keys.index(band.away) for band in bands]
        flat = structure.flatten_up_to(stores)
        start = zeros(self.blank, table.messages + 1), state, flat
        return jax.lax.scan(tick, start, (rows, [places[key] for key in keys]))[0][1]

    def _no_sums(self) -> Any:
        return jax.tree.map(zeros, jax.eval_shape(self._loss, self.ends, zeros(self.blank), self._micro(0))[1])

    def _total(self, sums: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.psum(x, self.manual), sums)

    def _send(self, pool: Array, out: Array, does: Array, slot: Array, pairs: tuple[tuple[int, int], ...]) -> Array:
        """Pool with the neighbour's message ``out``; the collective-permute runs in ticks in which any stage sends."""
        if not pairs:
            return pool
        links, stages = self.pipeline.links, self.pipeline.schedule.stages

        def send(pool: Array, out: Array) -> Array:
            arrived = (
                jax.lax.ppermute(out, STAGE, pairs) if links is None else links.send(out, self.basis, stages, pairs)
            )
            return write_slot(pool, arrived, slot)

        return jax.lax.cond(does, send, lambda pool, out: pool, pool, out)

    # Operations

    def _idle(self, cell: Any, state: Any, slots: Slots, message: Array) -> tuple[Any, Slots, Array]:
        return state, slots, message

    def _input(self, cell: Any, batch: Any, message: Array) -> Array:
        """Input of a forward operation: the embedding on the first virtual stage, otherwise the received message."""
        first = cell["virtual"] == 0
        if self.pipeline.links is None:
            return jax.lax.cond(first, lambda _: self._embed(self.ends, batch), lambda message: message, message)

        def filled(message: Array) -> Array:
            embedding = self._embed(self.ends, batch)
            return jnp.where(first, embedding, message + lost(embedding, self.basis))

        return jax.lax.cond(first | self.crossed[cell["virtual"]], filled, lambda message: message, message)

    def _evaluate(self, cell: Any, state: Any, slots: Slots, message: Array) -> tuple[Any, Slots, Array]:
        batch = self._micro(cell["micro"])
        x = self._input(cell, batch, message)
        consts = self._consts(cell["micro"])
        for g in range(len(self.where)):
            x = self._units(g, lambda x, i, w, b, away, g=g: self._layer(g, w, x, consts)[0][0], x, cell)
        last = cell["virtual"] == self.last
        add = lambda sums: jax.tree.map(jnp.add, sums, self._loss(self.ends, x, batch)[1])  # noqa: E731
        return {"sums": jax.lax.cond(last, add, lambda sums: sums, state["sums"])}, slots, x

    def _forward(self, cell: Any, state: Any, slots: Slots, message: Array) -> tuple[Any, Slots, Array]:
        batch = self._micro(cell["micro"])
        x = self._input(cell, batch, message)
        consts, aux_losses = self._consts(cell["micro"]), self.pipeline.aux_losses
        slots, heard = list(slots), state["heard"]
        for g, c in enumerate(self.cuts):
            first = jnp.asarray(self.pipeline.depths.firsts[:, g])[cell["virtual"]]

            def unit(
                carry: Any, i: Array, w: Any, b: int, away: Away, g: int = g, c: SplitLayer = c, first: Array = first
            ) -> Any:
                x, slots, heard = carry
                y, more, values = c.forward(w, x, consts)
                if aux_losses is not None:
                    heard = aux_losses.add(heard, more, g, first + i)
                return y, _replaced(slots, b, slots[b].save(values, i - self.bands[g][b].first, away)), heard

            x, slots[g], heard = self._units(g, unit, (x, slots[g], heard), cell)

        def end(x: Array, ends: Any, sums: Any) -> tuple[Array, Any, Any]:
            loss = lambda w, x: self._loss(merge(w, self.ends), x, batch)  # noqa: E731
            _, pull, more = jax.vjp(loss, self._trained(self.ends), x, has_aux=True)
            d_ends, dx = pull(jnp.ones((), more.loss.dtype))
            return dx, add_trees(ends, d_ends), jax.tree.map(jnp.add, sums, more)

        out, ends, sums = jax.lax.cond(
            cell["virtual"] == self.last, end, lambda x, *rest: (x, *rest), x, state["ends"], state["sums"]
        )
        return {**state, "ends": ends, "sums": sums, "heard": heard}, slots, out

    def _backward(self, cell: Any, state: Any, slots: Slots, dy: Array) -> tuple[Any, Slots, Array]:
        batch, consts = self._micro(cell["micro"]), self._consts(cell["micro"])
        grads, slots = list(state["grads"]), list(slots)
        for g in reversed(range(len(self.cuts))):

            def unit(carry: Any, i: Array, w: Any, b: int, away: Away, g: int = g, c: SplitLayer = self.cuts[g]) -> Any:
                dy, grads, slots = carry
                slot, place = slots[b], i - self.bands[g][b].first
                dx, early, left = c.backward(w, slot.saved(place, away), consts, dy)
                grads = self._add(g, grads, early, cell, i)
                pending = [write_slot(p, v, place) for p, v in zip(slot.pending, left, strict=True)]
                return dx, grads, _replaced(slots, b, slot._replace(pending=pending))

            dy, grads[g], slots[g] = self._units(g, unit, (dy, grads[g], slots[g]), cell, reverse=True)

        def begin(dx: Array, ends: Any) -> Any:
            embed = lambda w: self._embed(merge(w, self.ends), batch)  # noqa: E731
            (d_ends,) = jax.vjp(embed, self._trained(self.ends))[1](dx)
            return add_trees(ends, d_ends)

        first, dx = cell["virtual"] == 0, dy
        if self.pipeline.links is not None:
            dx = jnp.where(first, dy, lost(dy, self.basis))
        embeds = first if self.pipeline.links is None else first | self.crossed[cell["virtual"]]
        ends = jax.lax.cond(embeds, begin, lambda dx, ends: ends, dx, state["ends"])
        return {**state, "grads": grads, "ends": ends}, slots, dy

    def _weights(self, cell: Any, state: Any, slots: Slots, message: Array) -> tuple[Any, Slots, Array]:
        consts = self._consts(cell["micro"])
        grads = list(state["grads"])
        for g, c in enumerate(self.cuts):

            def unit(grads: Any, i: Array, w: Any, b: int, away: Away, g: int = g, c: SplitLayer = c) -> Any:
                slot, place = slots[g][b], i - self.bands[g][b].first
                left = [read_slot(p, place) for p in slot.pending]
                return self._add(g, grads, c.weights(w, slot.saved(place, away), consts, left), cell, i)

            grads[g] = self._units(g, unit, grads[g], cell)
        return {**state, "grads": grads}, slots, message

    def _units(self, g: int, unit: Callable[..., Any], carry: Any, cell: Any, *, reverse: bool = False) -> Any:
        """``unit(carry, i, weights, band, away)`` for each unit of segment g that the cell's virtual stage has."""
        counts = self.pipeline.depths.counts[:, g]
        room, chunks = int(counts.max()), self.pipeline.schedule.chunks
        number = jnp.asarray(counts)[cell["virtual"]]

        def step(carry: Any, i: Array, *, b: int, away: Away) -> tuple[Any, None]:
            w = jax.tree.map(lambda w: read_slot(w, cell["chunk"] * room + i), self.weights[g])
            if (counts == room).all():
                return unit(carry, i, w, b, away), None
            return jax.lax.cond(i < number, lambda carry: unit(carry, i, w, b, away), lambda carry: carry, carry), None

        bands = list(enumerate(self.bands[g]))
        for b, band in reversed(bands) if reverse else bands:
            away: Away = bool(band.away)
            if 0 < len(band.away) < chunks:
                away = jnp.asarray([chunk in band.away for chunk in range(chunks)])[cell["chunk"]]
            span = jnp.arange(band.first, band.end)
            carry = jax.lax.scan(functools.partial(step, b=b, away=away), carry, span, reverse=reverse)[0]
        return carry

    def _add(self, g: int, grads: Any, found: dict[int, Array], cell: Any, i: Array) -> Any:
        """Gradients of segment g plus those of one unit; ``found`` has them by index of the leaf."""
        leaves, tree = jax.tree.flatten(grads, is_leaf=is_frozen)
        specs = jax.tree.leaves(self.stored["segments"][str(g)], is_leaf=is_spec)
        place = cell["chunk"] * self.pipeline.depths.rooms[g] + i
        for number, value in found.items():
            if self.pipeline.zero == 2:
                value = reduce_scatter_over(value, specs[number], stacked=True)
            sum_ = read_slot(leaves[number], place) + value.astype(leaves[number].dtype)
            leaves[number] = write_slot(leaves[number], sum_, place)
        return jax.tree.unflatten(tree, leaves)

    # Weights

    def _trained(self, tree: Any, g: int | None = None) -> Any:
        """The trainable subset of a tree of segment g, or of the embedding and head."""
        mask = self.pipeline.trainable
        if mask is None:
            return tree
        return select(_ends(mask) if g is None else mask["segments"][str(g)], tree)

    def _cast(self, w: Array, matrix: bool) -> Array:
        return w.astype(self.model.config.dtype) if matrix else w

    def _whole_end(self, w: Array, spec: Any) -> Array:
        """Weight of the embedding or the head, all-gathered over the manual axes."""
        return all_gather_over(w, spec, (STAGE, "fsdp"))

    def _collect(self, state: Any) -> Any:
        """Gradients summed over devices, with the shardings and dtypes of the parameters."""
        segments = {}
        for g, grads in enumerate(state["grads"]):
            specs = self._trained(self.stored["segments"][str(g)], g)
            if self.pipeline.zero == 1:
                grads = jax.tree.map(reduce_scatter_over, grads, specs)
            back = jax.tree.map(
                lambda x, s, g=g: return_gradients(x, self.where[g], dimension_over(s, STAGE)), grads, specs
            )
            segments[str(g)] = jax.tree.map(lambda x, s: self._summed(x, s, (*self.manual[1:],)), back, specs)
        ends = jax.tree.map(
            lambda x, s: self._summed(reduce_scatter_over(x, s, (STAGE, "fsdp")), s, self.manual),
            state["ends"],
            self._trained(_ends(self.stored)),
        )
        grads = {**ends, "segments": segments}
        return jax.tree.map(
            lambda x, p: jax.sharding.reshard(x.astype(p.dtype), jax.typeof(p).sharding.spec),
            {k: grads[k] for k in TREE},
            select(self.pipeline.trainable, self.params),
        )

    def _summed(self, x: Array, spec: Any, axes: tuple[str, ...]) -> Array:
        rest = tuple(a for a in axes if dimension_over(spec, a) is None)
        return jax.lax.psum(x, rest) if rest else x

    # The model

    def _micro(self, number: Any) -> Any:
        return jax.tree.map(lambda x: read_slot(x, number), self.parts)

    def _consts(self, number: Any) -> Any:
        batch = self._micro(number)
        return batch.positions, batch.segment_ids, read_slot(self.shares, number)

    def _embed(self, ends: Any, batch: Any) -> Array:
        return self.model.embed(ends, batch.tokens, batch.positions)

    def _loss(self, ends: Any, hidden: Array, batch: Any) -> tuple[Array, Any]:
        sums = self.head(ends, hidden, batch)
        return sums.loss / self.total, sums

    def _layer(
        self, g: int, w: Any, x: Array, consts: tuple[Int[Array, "B S"], Int[Array, "B S"], Array]
    ) -> tuple[tuple[Array, Any], Any]:
        """Output of one unit of segment g: ``((y, loss), more)``, see ``split_layer``."""
        if self.pipeline.zero == 3:
            w = jax.tree.map(gather_layer_weight, w, self.stored["segments"][str(g)])
        positions, segment_ids, share = consts
        context: Any = self.model.training_context(segment_ids, self.pipeline.layout)
        aux_losses = self.pipeline.aux_losses
        if aux_losses is not None:
            context = aux_losses.context(g, context, self.batch_axes)
        # Layer indices start at this unit's first layer; ``Segments`` does not use them.
        y, context = self.model.group(g, w, x, positions, jnp.int32(0), context)
        if aux_losses is None:
            return (y, None), None
        loss, sums = aux_losses.collect(context, share)
        return (y, loss), sums

    def _cut(self, g: int) -> SplitLayer:
        return split_layer(
            functools.partial(self._layer, g),
            jax.tree.map(lambda w: read_slot(w, 0), self.weights[g]),
            zeros(self.blank),
            self._consts(0),
            remat=self.model.config.remat,  # type: ignore[arg-type]  # of those of a pipeline: ``train.run.gradients``
            names=MATMUL_RESULTS,
            split=self.pipeline.schedule.split,
            trained=None
            if self.pipeline.trainable is None
            else jax.tree.leaves(self.pipeline.trainable["segments"][str(g)]),
        )


def _replaced(slots: list[ActivationSlot], b: int, slot: ActivationSlot) -> list[ActivationSlot]:
    return [*slots[:b], slot, *slots[b + 1 :]]


def _scoped(name: str, branch: Branch, cell: Any) -> Callable[..., Any]:
    """Operation of a cell under a named scope."""

    def run(state: Any, slots: Slots, message: Array) -> Any:
        with jax.named_scope(name):
            return branch(cell, state, slots, message)

    return run


def _ends(tree: Any) -> Any:
    """Embedding and head of a parameter tree."""
    return {name: tree[name] for name in TREE if name != "segments"}
