"""Gradients of an adapter, chunk of tokens by chunk of tokens: token-level fine-tuning (FlexLLM, arXiv:2402.18789).

    forward     chunks of a row from first to last: each computes all layers and the loss of its tokens, puts its keys
                and values into the cache, and saves what its backward pass needs (``saved_residuals``)
    backward    chunks from last to first: each has the gradient of its keys and values from the chunks after it, and
                adds to that of the chunks before it

Causal attention makes the order exact: a chunk's queries see no later chunk, and its keys are seen by no earlier one.
The sum over all chunks of all rows is the gradient of the step, as ``jaxllm.train.step.loss.value_and_grad`` has it.
Each chunk is one run of a program of fixed shapes, short enough to run between two steps of an engine.

Legend: B rows of a batch, R rows that are computed together, S tokens of a row, T tokens of a chunk, D embed, L layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import ConfigError
from jaxllm.data import Batch
from jaxllm.models import Functional, remat
from jaxllm.models.param_subset import merge, select
from jaxllm.posttrain.coserve.chunk_attention import ChunkContext, RecordedShapes, put_chunk
from jaxllm.posttrain.coserve.saved_residuals import ResidualPlan, residual_plan
from jaxllm.train.objectives.objective_base import HeadObjective, LossSums

POLICIES = ("none", "elementwise", "attention", "full")
"""Remat policies under which a chunk's residuals can be saved."""


@dataclass(frozen=True)
class Stage:
    """Repeats of a group of layers with one remat policy, which are scanned over.

    Attributes:
        segment: segment of the model's layers.
        start, count: first repeat, and number of repeats.
        layer: index of the first layer in the model.
        size: layers of a repeat.
        policy: remat policy.
    """

    segment: int
    start: int
    count: int
    layer: int
    size: int
    policy: str


class Place(NamedTuple):
    """Place of a chunk in a batch.

    Attributes:
        row: first of the R rows.
        token: first token in the row.
        fresh: whether the step's sums (forward pass) or gradients (backward pass) begin with it.
        last: whether no later chunk of the row has a backward pass.
    """

    row: Any
    token: Any
    fresh: Any
    last: Any


class SavedChunk(NamedTuple):
    """Saved chunk: what the backward pass of a chunk needs of its forward pass.

    Attributes:
        residuals: of each stage, arrays whose first dimension is its repeats.
        of_hidden: gradient of the loss with respect to the final hidden states [R T D].
    """

    residuals: list[list[Array]]
    of_hidden: Float[Array, "R T D"]


class ChunkedGradients:
    """Forward and backward pass of a training step in chunks, as pure functions of fixed shapes.

    Args:
        model: adapted model.
        objective: loss, a sum over single tokens.
        mask: trained parameters, a tree of booleans (``jaxllm.models.param_subset``).
        rows: R, rows that are computed together.
        seq_len: S, tokens of a row; a multiple of ``chunk``.
        chunk: T, tokens of a chunk.

    Raises:
        ConfigError: the objective, the trained parameters or the remat policy do not go with chunks.
        ValueError: ``chunk`` does not divide ``seq_len``.
    """

    def __init__(self, model: Functional, objective: HeadObjective, mask: Any, *, rows: int, seq_len: int, chunk: int):
        if seq_len % chunk:
            raise ValueError(f"chunks of {chunk} tokens do not divide rows of {seq_len}; pad the rows.")
        self.model, self.objective, self.mask = model, objective, mask
        self.rows, self.seq_len, self.chunk = rows, seq_len, chunk
        self.stages = stages_of(model)
        trained = select(mask, model.abstract())
        if outside := [name for name in trained if name != "segments" and jax.tree.leaves(trained[name])]:
            raise ConfigError(f"a step in chunks of tokens trains adapters of layers alone, not {outside[0]} too.")
        frozen = select(jax.tree.map(lambda own: not own, mask), model.abstract())
        self._shapes = [self._cache_shapes(stage) for stage in self.stages]
        self._plans = [
            self._plan(stage, own, trained, frozen) for stage, own in zip(self.stages, self._shapes, strict=True)
        ]

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.seq_len // self.chunk

    @property
    def saved_bytes(self) -> int:
        """Bytes that are saved of the forward pass of R whole rows, without their keys and values."""
        dtype, width = jnp.dtype(self.model.config.dtype), self.model.config.embed_dim
        residuals = sum(plan.nbytes * stage.count for plan, stage in zip(self._plans, self.stages, strict=True))
        return self.chunks * (residuals + self.rows * self.chunk * width * dtype.itemsize)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of R rows in all layers."""
        return sum(shape.size * shape.dtype.itemsize for shape in jax.tree.leaves(self._shapes))

    def empty_cache(self) -> Any:
        """Cache of keys and values: of each stage and each layer of its group, [L R S K H] and [L R S K V]."""
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), self._shapes)

    def empty_cache_gradients(self) -> Any:
        """Gradients of keys and values, in at least float32."""
        return jax.tree.map(
            lambda shape: jnp.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.float32)), self._shapes
        )

    def empty_sums(self, batch: Batch) -> LossSums:
        """Loss sums of nothing."""
        return self.objective.no_sums(batch, jnp.zeros((), self._loss_dtype))

    def forward(
        self, trained: Any, frozen: Any, batch: Batch, place: Place, cache: Any, sums: LossSums
    ) -> tuple[Any, LossSums, SavedChunk]:
        """Forward pass of a chunk and the loss of its tokens.

        Args:
            trained, frozen: the parameters, each with None in place of the others.
            batch: of the step, [B S].
            place: of the chunk.
            cache: of the row's chunks before.
            sums: loss sums of the step so far.

        Returns:
            the cache with this chunk, the sums with this chunk, and what ``backward`` needs.
        """
        part, segment_ids = self._part(batch, place)
        params = merge(trained, frozen)
        x = self.model.embed(params, part.tokens, part.positions)
        filled, residuals = [], []
        for stage, plan, own in zip(self.stages, self._plans, cache, strict=True):

            def body(x: Array, step: Any, stage: Stage = stage, plan: ResidualPlan = plan) -> tuple[Array, Any]:
                of_group, caches, layer = step
                (x, keys, values), pullback = self._group(
                    stage, of_group, x, caches, part.positions, segment_ids, place.token, layer
                )
                return x, (plan.saved(pullback), keys, values)

            steps = (self._of_stage(stage, (trained, frozen)), own, self._layers(stage))
            x, (saved, keys, values) = jax.lax.scan(body, x, steps)
            residuals.append(saved)
            new = zip(keys, values, strict=True)
            filled.append(tuple(_put(cached, chunk, place.token) for cached, chunk in zip(own, new, strict=True)))
        total = jnp.maximum(self.objective.total(batch), 1).astype(self._loss_dtype)

        def loss(hidden: Array) -> tuple[Array, LossSums]:
            found = self.objective.from_hidden(self.model, params, hidden, part)
            return found.loss / total, found

        of_hidden, found = jax.grad(loss, has_aux=True)(x)
        added = jax.tree.map(lambda old, new: jnp.where(place.fresh, 0, old) + new, sums, found)
        return filled, added, SavedChunk(residuals, of_hidden)

    def backward(
        self,
        trained: Any,
        frozen: Any,
        batch: Batch,
        place: Place,
        cache: Any,
        saved: SavedChunk,
        of_cache: Any,
        gradients: Any,
    ) -> tuple[Any, Any]:
        """Backward pass of a chunk; that of the row's later chunks must have run.

        Args:
            trained, frozen, batch, place: as for ``forward``.
            cache: of all chunks of the row.
            saved: from the chunk's ``forward``.
            of_cache: gradients of keys and values from the chunks after it; not read at the row's last chunk.
            gradients: of the trained parameters so far.

        Returns:
            the gradients of keys and values, and of the trained parameters, with those of this chunk.
        """
        part, segment_ids = self._part(batch, place)
        of_x, of_keys, grads = saved.of_hidden, [], dict(gradients["segments"])
        pieces: dict[str, list[Any]] = {}
        parts = zip(self.stages, self._plans, cache, of_cache, saved.residuals, strict=True)
        for stage, plan, own, of_own, residuals in reversed(list(parts)):

            def body(of_x: Array, step: Any, stage: Stage = stage, plan: ResidualPlan = plan) -> tuple[Array, Any]:
                of_group, caches, layer, kept, of_caches, total = step
                # The values of this x are not read: the pullback takes those that were saved.
                unread = jnp.zeros(of_x.shape, of_x.dtype)
                outs, pullback = self._group(
                    stage, of_group, unread, caches, part.positions, segment_ids, place.token, layer
                )
                of_caches = jax.tree.map(lambda g: jnp.where(place.last, 0, g), of_caches)
                of_own = jax.tree.map(
                    lambda g, out: jax.lax.dynamic_slice_in_dim(g, place.token, self.chunk, 1).astype(out.dtype),
                    tuple(zip(*of_caches, strict=True)),
                    outs[1:],
                )
                found, of_x, of_former = plan.restored(pullback, kept)((of_x, *of_own))
                of_caches = jax.tree.map(lambda total, g: total + g.astype(total.dtype), of_caches, of_former)
                return of_x, (of_caches, jax.tree.map(lambda total, g: total + g, total, found))

            so_far = self._of_stage(stage, gradients)
            so_far = jax.tree.map(lambda g: jnp.where(place.fresh, 0, g), so_far)
            groups = self._of_stage(stage, (trained, frozen))
            steps = (groups, own, self._layers(stage), residuals, of_own, so_far)
            of_x, (of_new, grown) = jax.lax.scan(body, of_x, steps, reverse=True)
            of_keys.insert(0, of_new)
            pieces.setdefault(str(stage.segment), []).insert(0, grown)
        for name, found in pieces.items():
            grads[name] = found[0] if len(found) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *found)
        return of_keys, {**gradients, "segments": grads}

    # Parts

    @property
    def _loss_dtype(self) -> Any:
        return jnp.promote_types(jnp.dtype(self.model.config.dtype), jnp.float32)

    def _part(self, batch: Any, place: Place) -> tuple[Any, Int[Array, "R S"]]:
        """Tokens of a chunk, and the segment ids of its rows."""
        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place.row, self.rows, 0), batch)
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place.token, self.chunk, 1), rows)
        return part, rows.segment_ids

    def _group(
        self,
        stage: Stage,
        params: tuple[Any, Any],
        x: Float[Array, "R T D"],
        caches: Any,
        positions: Int[Array, "R T"],
        segment_ids: Int[Array, "R S"],
        start: Int[Array, ""],
        layer: Int[Array, ""],
    ) -> tuple[Any, Any]:
        """One repeat of a stage, whose trained and frozen parameters are ``params``: (output, keys, values), and the
        pullback to the trained parameters, the input and the caches.
        """
        trained, frozen = params

        def compute(trained: Any, x: Array, caches: Any) -> tuple[Array, Any, Any]:
            context = ChunkContext(caches, start, segment_ids)
            x, context = self.model.group(stage.segment, merge(trained, frozen), x, positions, layer, context)
            assert isinstance(context, ChunkContext)
            return x, context.keys, context.values

        return jax.vjp(remat.checkpointed(stage.policy, compute), trained, x, caches)

    def _of_stage(self, stage: Stage, trees: Any) -> Any:
        """Stacked parameters of a stage, from trees of whole models."""

        def part(tree: Any) -> Any:
            own = tree["segments"][str(stage.segment)]
            count = self.model.config.segments[stage.segment][1]
            if stage.count == count:
                return own
            return jax.tree.map(lambda x: x[stage.start : stage.start + stage.count], own)

        return tuple(map(part, trees)) if isinstance(trees, tuple) else part(trees)

    def _layers(self, stage: Stage) -> Int[Array, " L"]:
        return stage.layer + stage.size * jnp.arange(stage.count, dtype=jnp.int32)

    def _hidden(self) -> jax.ShapeDtypeStruct:
        shape = (self.rows, self.chunk, self.model.config.embed_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.model.config.dtype))

    def _tokens(self, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, length), jnp.int32)

    def _cache_shapes(self, stage: Stage) -> tuple[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct], ...]:
        def record(params: Any, x: Array, positions: Array, layer: Array) -> Any:
            _, found = self.model.group(stage.segment, params, x, positions, layer, RecordedShapes())
            assert isinstance(found, RecordedShapes)
            return tuple(zip(found.keys, found.values, strict=True))

        params = _unstacked(self.model.abstract()["segments"][str(stage.segment)])
        layer = jax.ShapeDtypeStruct((), jnp.int32)
        found = jax.eval_shape(record, params, self._hidden(), self._tokens(self.chunk), layer)
        if len(found) != stage.size:
            raise ConfigError(
                f"a step in chunks of tokens needs layers that attend once each; here {stage.size} layers attend "
                f"{len(found)} times."
            )
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((stage.count, self.rows, self.seq_len, *x.shape[2:]), x.dtype), found
        )

    def _plan(self, stage: Stage, cache: Any, trained: Any, frozen: Any) -> ResidualPlan:
        """Residuals of one repeat of a stage."""

        def pullback_of(again: Any, x: Array) -> Any:
            groups, caches, positions, segment_ids, start, layer = again
            return self._group(stage, groups, x, caches, positions, segment_ids, start, layer)[1]

        number = jax.ShapeDtypeStruct((), jnp.int32)
        groups = tuple(_unstacked(tree["segments"][str(stage.segment)]) for tree in (trained, frozen))
        again = (groups, _unstacked(cache), self._tokens(self.chunk), self._tokens(self.seq_len), number, number)
        return residual_plan(pullback_of, again, self._hidden())


def stages_of(model: Functional) -> list[Stage]:
    """Stages of a model: its segments, each split where the remat policy changes.

    Raises:
        ConfigError: the remat policy of some layers is not one of ``POLICIES``.
    """
    found, first, config = [], 0, model.config
    pieces = remat.policies_by_segment(config.remat, config.segments)
    for segment, ((group, _), own) in enumerate(zip(config.segments, pieces, strict=True)):
        start = 0
        for policy, count in own:
            if policy not in POLICIES:
                raise ConfigError(
                    f"model.remat = {config.remat!r}: a step in chunks of tokens saves each chunk's residuals by "
                    f"itself, under {', '.join(POLICIES)}; give one of these."
                )
            found.append(Stage(segment, start, count, first, len(group), policy))
            first += count * len(group)
            start += count
    return found


def _put(cache: tuple[Array, Array], chunk: tuple[Array, Array], start: Array) -> tuple[Array, ...]:
    """Keys and values of all repeats with those of a chunk."""
    return jax.vmap(functools.partial(put_chunk, start=start))(cache, chunk)


def _unstacked(tree: Any) -> Any:
    """Shapes of one repeat."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
