"""Programs of a training step whose parameters are streamed layer by layer: one for each kind of layer, not per layer.

    split       batch -> micro-batches, items of the whole batch
    embed       embedding of a micro-batch
    forward     one layer of a segment, of a micro-batch, and its named values that ``model.remat`` saves
    head        loss and its gradients, of a micro-batch
    backward    one layer again from its input and these values, and its gradients, of a micro-batch
    update      one layer, from its gradients over all micro-batches
    lookup      gradient of the embedding, of a micro-batch
    squared     squared norm of one layer's gradients, and ``norm`` that of all, where gradients are clipped
    ends        update of what is outside of layers
    finish      links and metrics

``layer_stream_step`` calls them. ``jaxllm.train.step.lomo`` does the same in one program, with all layers there.

Legend: B sequences of a micro-batch, S tokens of a sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import sharding
from jaxllm.models import Functional
from jaxllm.models.params import at_least_f32
from jaxllm.models.remat import Policy, policies_by_segment
from jaxllm.train.disk.disk_step import Make, clipped_by, part_of, unit_update
from jaxllm.train.disk.layer_values import LayerValues, saves_values
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.disk.state_units import StateUnit
from jaxllm.train.step.loss import permute_sequence, split_micro_batches, zeros_like_abstract
from jaxllm.train.step.objective import HeadObjective
from jaxllm.train.step.routing_losses import RoutingAccumulator, RoutingConfig
from jaxllm.train.step.step_chain import Report, StepLink, StepResult, finished
from jaxllm.train.step.train_state import TrainState
from pallas_kernels.ring_attention import Layout
from sharding import shardings_of

Tally = tuple[Array, Array, Array, Array] | None
"""Routing statistics of the layers so far (``RoutingAccumulator``); None: a model without experts."""


class LayerKind(NamedTuple):
    """Kind of layer that has programs of its own.

    Attributes:
        segment: of the model.
        policy: of ``model.remat``.
    """

    segment: str
    policy: Policy

    def __str__(self) -> str:
        """Key of the programs."""
        return f"{self.segment} {self.policy}" if saves_values(self.policy) else self.segment


@dataclass(frozen=True)
class StreamedModel:
    """Model, objective and state that the programs of a streamed step are made of.

    Attributes:
        model: the architecture.
        objective: the loss, of the final hidden states.
        routing: weights of the routing losses.
        layout: which tokens of a row each device gets.
        accumulate: micro-batches of a step.
        params: files with the parameters of layers.
        abstract: the train state, with ``DiskLeaf`` for what is in files.
    """

    model: Functional
    objective: HeadObjective
    routing: RoutingConfig
    layout: Layout
    accumulate: int
    params: StateFiles
    abstract: TrainState

    @property
    def dtype(self) -> Any:
        """Dtype of losses."""
        return jnp.promote_types(jnp.dtype(self.model.config.dtype), jnp.float32)

    @property
    def segments(self) -> list[str]:
        """Names of the segments, each of which is a kind of layer."""
        return list(self.abstract.params["segments"])

    @property
    def kinds(self) -> dict[str, LayerKind]:
        """Kinds of layers that have programs of their own: segments, and policies of ``model.remat`` within them."""
        config = self.model.config
        found = {}
        for s, pieces in enumerate(policies_by_segment(config.remat, config.segments)):
            for policy, _ in pieces:
                kind = LayerKind(str(s), policy)
                found[str(kind)] = kind
        return found

    def kind_of(self, unit: StateUnit) -> str:
        """Name of a unit's kind in ``kinds``."""
        config = self.model.config
        pieces = policies_by_segment(config.remat, config.segments)[int(unit.segment)]
        policies = [policy for policy, repeats in pieces for _ in range(repeats)]
        return str(LayerKind(unit.segment, policies[unit.row]))

    def layer_of(self, unit: StateUnit) -> int:
        """Index of the first layer of a unit."""
        shapes, s = self.model.config.segments, int(unit.segment)
        return sum(len(group) * repeats for group, repeats in shapes[:s]) + unit.row * len(shapes[s][0])

    def tree_of(self, segment: str, rows: Sequence[Any]) -> Any:
        """Parameters of a unit as a tree over the model, from its arrays [1, ...] in the order of the file."""
        return jax.tree.structure(part_of(self.abstract.params, segment)).unflatten(rows)

    def embed(self, ends: Any, micro: Any) -> tuple[Float[Array, "B S D"], Tally]:
        """Token embeddings of a micro-batch, and empty routing statistics."""
        x = self.model.embed(ends, micro.tokens, micro.positions)
        return x, _arrays(RoutingAccumulator.of(self.model.config, None))

    def layer(
        self, segment: str, params: Any, x: Float[Array, "B S D"], tally: Tally, micro: Any, first: Any, context: Any
    ) -> tuple[Float[Array, "B S D"], Tally]:
        """One repeat of a segment's layers.

        Args:
            params: of the repeat, not stacked.
            first: index of its first layer.
            context: attention context.
        """
        given = context if tally is None else RoutingAccumulator(context, *tally)
        x, after = self.model.group(int(segment), params, x, micro.positions, first, given)
        return x, None if tally is None else _arrays(after)

    def forward(
        self, segment: str, rows: Any, x: Array, tally: Tally, micro: Any, first: Any, values: LayerValues | None
    ) -> tuple[Array, Tally, list[Array]]:
        """One layer from its arrays in the order of the file, and what it saves beside its input.

        Args:
            values: which it saves; None: none.
        """
        own = _unstacked(self.tree_of(segment, rows), segment)
        if values is None:
            return *self.layer(segment, own, x, tally, micro, first, self.context(micro)), []

        def layer(own: Any, x: Array) -> tuple[Any, Any]:
            x, after = self.layer(segment, own, x, tally, micro, first, self.context(micro))
            return (x, None if after is None else after[2:]), None if after is None else after[:2]

        (x, losses), counts, saved = values.forward(layer, own, x, (micro, first))
        return x, None if counts is None else (*counts, *losses), saved

    def context(self, micro: Any) -> Any:
        """Attention context of training."""
        return self.model.training_context(micro.segment_ids, self.layout)

    def split(self, batch: Any) -> tuple[tuple[Any, ...], Float[Array, ""]]:
        """Micro-batches of a batch, and the number of items that the loss is a mean over."""
        total = jnp.maximum(self.objective.total(batch), 1).astype(self.dtype)
        with sharding.use_rules(self.model.rules):
            parts = [batch]
            if self.accumulate > 1:
                stack = jax.tree.map(lambda x: split_micro_batches(x, self.accumulate), batch)
                parts = [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(self.accumulate)]
            return tuple(permute_sequence(part, self.layout) for part in parts), total

    def head(self, ends: Any, x: Array, tally: Tally, micro: Any, total: Array, before: Any) -> tuple[Any, Array]:
        """Loss of a micro-batch and its gradients: ((loss sums, gradients of the ends), gradient of the input).

        Args:
            before: sums and gradients of earlier micro-batches, which are added; None: this is the only one.
        """

        def loss(ends: Any, x: Array) -> tuple[Array, Any]:
            sums = self.objective.from_hidden(self.model, ends, x, micro)
            sums = sums._replace(items=self.objective.items(micro))
            if tally is not None:
                routers = RoutingAccumulator(None, *tally).sums(self.model.config, sums.total)
                whole = sums.loss + self.routing.balance_loss * routers.balance + self.routing.z_loss * routers.z
                sums = sums._replace(loss=whole, routing=routers)
            return sums.loss / total, sums

        (grads, dx), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(ends, x)
        return _added(before, (sums, self._reduced(grads, ends))), dx

    def backward(
        self,
        segment: str,
        rows: Any,
        x: Array,
        saved: Sequence[Array],
        micro: Any,
        dx: Array,
        total: Array,
        first: Any,
        before: Any,
        values: LayerValues | None,
    ) -> tuple[Any, Float[Array, "B S D"]]:
        """Gradients of one layer, which is computed again from what it saved, and the gradient of its input.

        Args:
            saved: values that ``forward`` returned beside the input.
            before: gradients of earlier micro-batches, which are added; None: this is the only one.
            values: of ``forward``.
        """
        params = self.tree_of(segment, rows)
        empty = _arrays(RoutingAccumulator.of(self.model.config, None))

        def layer(own: Any, x: Array) -> tuple[Array, Any]:
            x, tally = self.layer(segment, own, x, empty, micro, first, self.context(micro))
            return x, None if tally is None else tally[2:]

        of_losses = None
        if empty is not None:  # the routing losses are sums over layers, so each has a part whose weight is known
            items = self.objective.total(micro).astype(self.dtype)
            each = items / len(self.model.config.routed_layers) / total
            of_losses = (self.routing.balance_loss * each, self.routing.z_loss * each)
        own = _unstacked(params, segment)
        pull = jax.vjp(layer, own, x)[1] if values is None else values.pull(own, x, (micro, first), saved)
        grads, dx = pull((dx, of_losses))
        stacked = {"segments": {segment: jax.tree.map(lambda g: g[None], grads)}}
        return _added(before, self._reduced(stacked, params)), dx

    def lookup(self, ends: Any, micro: Any, dx: Array, grads: Any) -> Any:
        """Gradients of the ends, with that of the embedding's lookup added."""

        def embed(own: Any) -> Array:
            return self.model.embed({"embedding": own}, micro.tokens, micro.positions)

        (own,) = jax.vjp(embed, ends["embedding"])[1](dx)
        return grads | _added({"embedding": grads["embedding"]}, self._reduced({"embedding": own}, ends))

    def _reduced(self, grads: Any, params: Any) -> Any:
        with sharding.use_rules(self.model.rules):
            return {
                name: jax.tree.map(lambda g, p: sharding.reduce_partial_sums(g, p).astype(p.dtype), part, params[name])
                for name, part in grads.items()
            }


@dataclass(frozen=True)
class StreamedPrograms:
    """Programs of a streamed step, compiled. Those of layers are by segment; see the head of this file.

    Attributes:
        forward, backward: by kind of layer (``StreamedModel.kinds``).
        head_zeros, layer_zeros: sums and gradients before the first of several micro-batches.
        hidden: input of a layer, abstract.
        squared, norm: None without gradient clipping.
        values: by kind of layer, what it saves beside its input: names, and abstract arrays on the run's mesh.
    """

    split: Any
    embed: Any
    forward: dict[str, Any]
    head: Any
    backward: dict[str, Any]
    update: dict[str, Any]
    lookup: Any
    ends: Any
    finish: Any
    head_zeros: Any
    layer_zeros: dict[str, Any]
    hidden: Any
    squared: dict[str, Any]
    norm: Any
    values: dict[str, list[tuple[str, jax.ShapeDtypeStruct]]]


def compiled_streamed_programs(
    of: StreamedModel,
    make: Make,
    clip_norm: float | None,
    rate: optax.Schedule,
    links: Sequence[StepLink],
    reports: Sequence[Report],
    files: StateFiles,
    batch: Any,
    options: dict[str, Any] | None,
) -> StreamedPrograms:
    """Compiles the programs of a step; the run's mesh is set.

    Args:
        of: model and state.
        make: logical axes of a part of the parameters -> its optimizer, without gradient clipping.
        clip_norm: global norm that gradients are clipped to; None: any.
        rate: learning-rate schedule, for the metrics.
        links: techniques that need neither parameters, gradients nor updates.
        reports: further metrics, of the same kind.
        files: of the optimizer state.
        batch: abstract.
        options: of the compiler.
    """
    axes, state = of.model.logical_axes(), of.abstract
    ends = part_of(state.params, "")
    everywhere = NamedSharding(jax.tree.leaves(shardings_of(ends))[0].mesh, PartitionSpec())
    counters = files.kept_of(state.opt_state)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    chosen: Any = options

    def ready(function: Callable[..., Any], *given: Any, donate: Any = (), outs: Any = None) -> tuple[Any, Any]:
        """The compiled program, and what it returns, abstract."""
        program = jax.jit(function, donate_argnums=donate, **({} if outs is None else {"out_shardings": outs}))
        return program.lower(*given).compile(compiler_options=chosen), jax.eval_shape(program, *given)

    def zeros(like: Any) -> Any:
        """Program without arguments that returns zeros, and None where nothing is accumulated."""
        if of.accumulate == 1:
            return lambda: None
        made = jax.jit(lambda: jax.tree.map(zeros_like_abstract, like))
        return made.lower().compile(compiler_options=chosen)

    def updating(segment: str, params: Any, grads: Any, outs: Any) -> Any:
        """Update of a unit; its arrays are those of files, but the ends' parameters, which are a tree."""
        rule = unit_update(make(part_of(axes, segment)), state.opt_state, segment)

        def update(own: Any, grads: Any, counters: Any, arrays: Any, norm: Any) -> Any:
            tree, clipped = of.tree_of(segment, own) if segment else own, grads
            if clip_norm is not None:
                clipped = jax.tree.map(lambda g, most=clip_norm: clipped_by(norm, most, g), grads)
            new, arrays, counters, changes = rule(tree, clipped, counters, arrays)
            norms = jnp.stack([_squared(grads), *(optax.tree.norm(x, squared=True) for x in (changes, new))])
            return jax.tree.leaves(new) if segment else new, arrays, counters, norms

        rows = files.abstract_rows(segment)
        shardings = outs, [one.sharding for one in rows], [everywhere] * len(counters), everywhere
        # Parameters of layers may be views of the tier's buffers, which are not donated: the gradients become them.
        donate = 1 if segment else 0
        return ready(update, params, grads, counters, rows, whole_norm, donate=donate, outs=shardings)

    split, (micros, total) = ready(of.split, batch)
    micro = micros[0]
    embed, (x, tally) = ready(of.embed, ends, micro)
    several = of.accumulate > 1
    whole_norm = None if clip_norm is None else jax.ShapeDtypeStruct((), of.dtype, sharding=everywhere)

    head, (sums_grads, dx) = ready(of.head, ends, x, tally, micro, total, None)
    head_zeros = zeros(sums_grads)
    if several:
        head, _ = ready(of.head, ends, x, tally, micro, total, sums_grads, donate=5)
    forward, backward, update, layer_zeros, squared, norms, squares = {}, {}, {}, {}, {}, [], []
    values: dict[str, list[tuple[str, jax.ShapeDtypeStruct]]] = {}
    gradients: dict[str, Any] = {}
    for name, (s, policy) in of.kinds.items():
        rows = of.params.abstract_rows(s)
        own = LayerValues(f"layers {s}", policy) if saves_values(policy) else None

        def layer(rows: Any, x: Any, tally: Any, micro: Any, first: Any, s: str = s, own: Any = own) -> Any:
            return of.forward(s, rows, x, tally, micro, first, own)

        def back(
            rows: Any, x: Any, saved: Any, micro: Any, dx: Any, total: Any, first: Any, before: Any, s: str = s,
            own: Any = own,
        ) -> Any:  # fmt: skip
            return of.backward(s, rows, x, saved, micro, dx, total, first, before, own)

        traced = jax.jit(layer).trace(rows, x, tally, micro, number)
        forward[name] = traced.lower().compile(compiler_options=chosen)
        saved = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(everywhere.mesh, there.spec))
            for one, there in zip(traced.out_info[2], forward[name].output_shardings[2], strict=True)
        ]
        values[name] = list(zip(own.names(traced.jaxpr, len(saved)), saved, strict=True)) if own is not None else []
        given = rows, x, saved, micro, dx, total, number
        backward[name], (grads, _) = ready(back, *given, None)
        gradients[s] = grads
        if several:
            backward[name], _ = ready(back, *given, grads, donate=7)
    for s, grads in gradients.items():
        rows = of.params.abstract_rows(s)
        layer_zeros[s] = zeros(grads)
        update[s], out = updating(s, rows, grads, [one.sharding for one in rows])
        count = sum(unit.segment == s for unit in of.params.units)
        norms += [out[3]] * count
        if clip_norm is not None:
            squared[s], square = ready(_squared, grads, outs=everywhere)
            squares += [square] * count
    lookup, _ = ready(of.lookup, ends, micro, dx, sums_grads[1], donate=3)
    last, out = updating("", ends, sums_grads[1], shardings_of(ends))
    norms.append(out[3])

    def whole(squares: Any, ends: Any) -> Array:
        return jnp.sqrt(jnp.sum(jnp.stack([*squares, _squared(ends)]))).astype(of.dtype)

    norm = None if clip_norm is None else ready(whole, squares, sums_grads[1], outs=everywhere)[0]

    def finish(state: TrainState, counters: Any, sums: Any, norms: Any) -> Any:
        def inner(state: TrainState, batch: Any) -> StepResult:
            new = replace(state, opt_state=tuple(counters), step=state.step + 1)
            found = jnp.sqrt(jnp.sum(jnp.stack(norms), axis=0))
            metrics = {"update_norm": found[1], "param_norm": found[2]}
            return StepResult(new, sums, rate(state.step), found[0], metrics=metrics)

        new, metrics = finished(inner, links, reports)(state, None)
        return new.step, new.extras, metrics

    resident = replace(state, params=(), opt_state=())
    outs = (state.step.sharding, shardings_of(state.extras), None)
    finishing, _ = ready(finish, resident, counters, sums_grads[0], norms, outs=outs)
    return StreamedPrograms(
        split,
        embed,
        forward,
        head,
        backward,
        update,
        lookup,
        last,
        finishing,
        head_zeros,
        layer_zeros,
        x,
        squared,
        norm,
        values,
    )


def _arrays(tally: Any) -> Tally:
    return None if tally is None else (tally.counts, tally.dropped, tally.balance, tally.z)


def _unstacked(tree: Any, segment: str) -> Any:
    """Parameters of one repeat of a segment, from a tree over the model with arrays [1, ...]."""
    return jax.tree.map(lambda p: p[0], tree["segments"][segment])


def _added(before: Any, now: Any) -> Any:
    return now if before is None else jax.tree.map(jnp.add, before, now)


def _squared(grads: Any) -> Array:
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(at_least_f32(g.dtype)), grads), squared=True)
