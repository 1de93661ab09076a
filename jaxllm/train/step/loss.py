"""Loss of a packed batch by a training objective, and its gradients with gradient accumulation over micro-batches.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

import sharding
from jaxllm.models import Functional, Segments
from jaxllm.models.packed_weight import has_packed
from jaxllm.models.param_subset import merge, select
from jaxllm.models.value_head import state_values
from jaxllm.optim import DifferentiatedTree
from jaxllm.train.step.numerics import Numerics
from jaxllm.train.step.objective import (
    TOKENS,
    CrossEntropyObjective,
    HeadObjective,
    LossSums,
    Objective,
    sharded_token_logprobs,
)
from jaxllm.train.step.routing_losses import RoutingAccumulator, RoutingConfig
from jaxllm.train.unequal.unequal_gradients import own_count, sums_over_uneven_rows, uneven_axes
from pallas_kernels.ring_attention import Layout, order


def loss_sums(
    model: Functional,
    params: Any,
    batch: Any,
    *,
    z_loss: float = 0.0,
    layout: Layout = "contiguous",
    routing: RoutingConfig | None = None,
    objective: Objective | None = None,
    ring: tuple[tuple[int, ...], Int[Array, ""]] | None = None,
    permuted: bool = False,
) -> LossSums:
    """Forward pass and loss of a batch, summed over its targets; targets below 0 are masked.

    The vocabulary projection and its softmax run in chunks of tokens, so the logits are never materialised whole.

    Args:
        model: the architecture.
        params: of the model.
        batch: ``jaxllm.data.Batch``, [B S] each.
        z_loss: weight of the z-loss, the squared log-partition function (arXiv:2204.02311, section 5).
        layout: which tokens of a row each device gets where the mesh splits the sequence (context parallelism).
        routing: weights of the load-balancing loss and router z-loss; None: routing statistics are not even collected.
        objective: the loss; None: next-token cross-entropy with this z-loss. One that runs its own forward passes has
            no routing losses.
        ring: ring sizes, and the index of the one in use, where the documents of the batch lie in slots
            (``jaxllm.data.context_by_need``); None: rows are split by the layout.
        permuted: whether the tokens are in the order of the layout already (``permute_sequence``).
    """
    objective = _given_or_cross_entropy(objective, z_loss)
    items = objective.items(batch)
    if not isinstance(objective, HeadObjective):
        return objective(model, params, batch)._replace(items=items)
    if ring is None and not permuted:
        with sharding.use_rules(model.rules):
            batch = permute_sequence(batch, layout)
    segments = model.training_context(batch.segment_ids, layout)
    if ring is not None:
        segments = replace(segments, ring_sizes=ring[0], ring=ring[1])
    tally = None if routing is None else RoutingAccumulator.of(model.config, segments)
    hidden, context = model.forward(params, batch.tokens, batch.positions, tally or segments)
    sums = objective.from_hidden(model, params, hidden, batch)._replace(items=items)
    if routing is None or not isinstance(context, RoutingAccumulator):
        return sums
    routers = context.sums(model.config, sums.total)
    loss = sums.loss + routing.balance_loss * routers.balance + routing.z_loss * routers.z
    return sums._replace(loss=loss, routing=routers)


def permute_sequence(batch: Any, layout: Layout) -> Any:
    """Reorders the tokens of each row so that a contiguous split over devices gives each its tokens under ``layout``.

    Raises:
        ValueError: the sequence does not divide over the devices.
    """
    shards = sharding.axis_size("attn_seq")
    if shards == 1 or layout == "contiguous":
        return batch
    to = order(layout, shards, batch.tokens.shape[1])
    here = sharding.spec(*TOKENS)
    return jax.tree.map(lambda x: x.at[:, to].get(out_sharding=here), batch)


def unpermute_sequence(x: Shaped[Array, "B S"], layout: Layout) -> Shaped[Array, "B S"]:
    """Inverse of ``permute_sequence``."""
    shards = sharding.axis_size("attn_seq")
    if shards == 1 or layout == "contiguous":
        return x
    back = np.argsort(order(layout, shards, x.shape[1]))
    return x.at[:, back].get(out_sharding=sharding.spec(*TOKENS))


def token_logprobs(
    model: Functional, params: Any, batch: Any, *, accumulate: int = 1, layout: Layout = "contiguous"
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Log-probability of each target of a batch and entropy of its distribution; zero where targets are masked.

    Args:
        model, params, batch, layout: see ``loss_sums``.
        accumulate: micro-batches that the batch is split into, one after the other, to bound activation memory.
    """

    def score(hidden: Array, batch: Any) -> tuple[Array, Array]:
        hidden, head = model.unembed(params, hidden)
        with sharding.use_rules(model.rules):
            return sharded_token_logprobs(hidden, head, batch.targets, model.config.logit_softcap)

    return token_scores(score, model, params, batch, accumulate, layout)


def token_values(
    model: Functional, params: Any, batch: Any, *, accumulate: int = 1, layout: Layout = "contiguous"
) -> Float[Array, "B S"]:
    """Value of the state after each token of a batch, by the value head.

    Args:
        model: with a value head (``jaxllm.models.value_head``).
        params, batch, accumulate, layout: see ``token_logprobs``.
    """

    def score(hidden: Array, batch: Any) -> Array:
        hidden, _ = model.unembed(params, hidden)
        with sharding.use_rules(model.rules):
            return state_values(params, hidden)

    return token_scores(score, model, params, batch, accumulate, layout)


def token_scores(
    score: Callable[[Array, Any], Any], model: Functional, params: Any, batch: Any, accumulate: int, layout: Layout
) -> Any:
    """Scores of the tokens of a batch, after a forward pass: a tree of arrays [B S].

    Args:
        score: ``(hidden states before the final norm, micro-batch) -> scores``.
        model, params, batch, accumulate, layout: see ``token_logprobs``.
    """

    def of_micro_batch(batch: Any) -> Any:
        with sharding.use_rules(model.rules):
            batch = permute_sequence(batch, layout)
        segments = model.text_context(batch.segment_ids, layout)
        hidden, _ = model.forward(params, batch.tokens, batch.positions, segments)
        found = score(hidden, batch)
        with sharding.use_rules(model.rules):
            return jax.tree.map(lambda x: unpermute_sequence(x, layout), found)

    if accumulate == 1:
        return of_micro_batch(batch)
    with sharding.use_rules(model.rules):
        parts = jax.tree.map(lambda x: split_micro_batches(x, accumulate), batch)
    found = jax.lax.map(of_micro_batch, parts)
    with sharding.use_rules(model.rules):
        return jax.tree.map(join_micro_batches, found)


def _given_or_cross_entropy(objective: Objective | None, z_loss: float) -> Objective:
    if objective is None:
        return CrossEntropyObjective(z_loss)
    if z_loss:
        raise ValueError(
            f"loss: z_loss = {z_loss} is that of the cross-entropy; give the objective its own, and 0 here."
        )
    return objective


def value_and_grad(
    model: Functional,
    *,
    z_loss: float = 0.0,
    accumulate: int = 1,
    layout: Layout = "contiguous",
    zero: Literal[1, 2, 3, "3level"] = 3,
    routing: RoutingConfig | None = None,
    objective: Objective | None = None,
    trainable: Any = None,
    ring_sizes: tuple[int, ...] = (),
    micro_batches: tuple[int, ...] = (),
) -> Callable[..., tuple[Any, ...]]:
    """Loss and gradients of a step: ``(params, batch) -> (LossSums, gradients of the mean loss per target token)``.

    With ``Numerics`` as a third argument, gradients are taken of the scaled loss and divided by the loss scale, and
    the matmuls' new amax values are a third result. A ``DifferentiatedTree`` as ``tree`` says what gradients are taken
    of; by default that is the parameters, or the trainable ones.

    Args:
        model: the architecture; its remat policy (gradient checkpointing) applies inside.
        z_loss: see ``loss_sums``.
        accumulate: micro-batches that the batch is split into, run one after the other to bound activation memory.
            Every token has the same weight however many targets its micro-batch has, so the result does not depend on
            ``accumulate``, except for the load-balancing loss, which is computed per micro-batch.
        layout: see ``loss_sums``.
        zero: ZeRO stage (``jaxllm.parallel.parallel_config.ParallelConfig``); in stages 1 and 2 the all-gather of
            weights happens here, once per step; in stage 3 (FSDP) layer by layer; in "3level" over the outer axes here,
            and over the inner ones layer by layer.
        routing, objective: see ``loss_sums``.
        trainable: subset of the parameters that gradients are taken of (``jaxllm.models.param_subset``), a tree of
            booleans; None: all.
        ring_sizes: those of batches whose documents lie in slots: the function then takes a ``SlottedBatch``
            (``jaxllm.data.context_by_need``), of which each micro-step is a micro-batch. Empty: a plain batch.
        micro_batches: those of each index of the mesh axis ``data``, or of ``data`` x ``fsdp`` with ZeRO-1, where they
            are uneven; the function then takes a batch that ``jaxllm.train.unequal.unequal_rows.UnequalRows`` has
            arranged. Empty: ``accumulate`` each.

    Raises:
        NotImplementedError: when traced with packed expert weights, which have no gradients.
    """

    objective = _given_or_cross_entropy(objective, z_loss)
    routed = routing is not None and isinstance(objective, HeadObjective)

    trained_params = DifferentiatedTree(
        functools.partial(select, trainable),
        lambda points, whole: points if trainable is None else merge(points, whole),
    )

    def run(
        params: Any, batch: Any, numerics: Numerics | None = None, tree: DifferentiatedTree = trained_params
    ) -> tuple[Any, ...]:
        if has_packed(params if trainable is None else select(trainable, params)):
            raise NotImplementedError(
                'training: weights are packed (quantised) and have no gradients; load the model with weights = "plain".'
            )
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(objective.total(batch.rows if ring_sizes else batch), 1).astype(dtype)
        if micro_batches:
            # XLA does not partition this gather where a part of the mesh axes is manual.
            with sharding.use_rules(model.rules):
                batch = permute_sequence(batch, layout)
            over = uneven_axes(micro_batches, zero, jax.sharding.get_abstract_mesh().shape)
            summed = sums_over_uneven_rows(
                functools.partial(of_rows, tree=tree, over=over), over, params, batch, total, numerics
            )
            stored = tree.of_params(params)
            return summed[0], jax.tree.map(_sharded_as, summed[1], stored), *summed[2:]
        return of_rows(params, batch, total, numerics, tree)

    def of_rows(
        params: Any,
        batch: Any,
        total: Array,
        numerics: Numerics | None,
        tree: DifferentiatedTree,
        over: tuple[str, ...] = (),
    ) -> tuple[Any, ...]:
        """Sums over all rows, or over those of one index of the uneven axes ``over``; ``total`` is of the batch."""
        dtype = total.dtype
        gather = {3: lambda params: params, "3level": model.gather_for_step}.get(zero, model.gather)
        whole = gather(params)
        params, used = tree.of_params(params), tree.of_params(whole)

        def mean_loss(
            inputs: tuple[Any, Any], whole: Any, batch: Any, total: Array, ring: Array | None = None
        ) -> tuple[Array, LossSums]:
            points, amax = inputs
            of_forward = model.with_amax_history(tree.into_params(points, whole), amax)
            rings = None if ring is None else (ring_sizes, ring)
            settings: dict[str, Any] = {"routing": routing, "objective": objective, "permuted": bool(micro_batches)}
            sums = loss_sums(model, of_forward, batch, layout=layout, ring=rings, **settings)
            return sums.loss / total, sums

        grad = jax.value_and_grad(mean_loss, has_aux=True)
        amax, scale = (None, 1.0) if numerics is None else (numerics.seen, numerics.scale)

        def reduce(grads: Any, in_step: bool = False) -> Any:
            """Gradients in the parameters' dtype and sharding: the reduce-scatter (or all-reduce) of partial sums.

            ``in_step``: of one micro-batch; with 3-level ZeRO the sums over the outermost axis stay.
            """

            def one(g: Array, p: Array) -> Array:
                return sharding.reduce_partial_sums(g, p, in_step=in_step and zero == "3level").astype(p.dtype)

            with sharding.use_rules(model.rules):
                return jax.tree.map(one, grads, params)

        def result(sums: LossSums, grads: Any, amax: Any) -> tuple[Any, ...]:
            if numerics is None:
                return sums, reduce(grads)
            return sums, jax.tree.map(lambda g: g / scale, reduce(grads)), amax

        if accumulate == 1 and not ring_sizes and not micro_batches:
            (_, sums), (grads, amax) = grad((used, amax), whole, batch, total / scale)
            return result(sums, grads, amax)

        # Gradient accumulation: a loop over micro-batches that adds losses and gradients. ZeRO stages 2 and 3 reduce
        # the gradients of each micro-batch, stage 1 those of all once at the end.
        def micro_step(
            carry: tuple[LossSums, Any, Any], micro_batch: Any, ring: Array | None = None
        ) -> tuple[LossSums, Any, Any]:
            (_, sums), (grads, new_amax) = grad((used, amax), whole, micro_batch, total / scale, ring)
            if zero == 1:
                grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
            else:
                grads = reduce(grads, in_step=True)
            largest = jax.tree.map(jnp.maximum, carry[2], new_amax)
            return (*jax.tree.map(jnp.add, carry[:2], (sums, grads)), largest)

        zero_sum = jnp.zeros((), dtype)
        no_sums = objective.no_sums(batch.rows if ring_sizes else batch, zero_sum)
        if routed and (tally := RoutingAccumulator.of(model.config, Segments(None))) is not None:
            no_sums = no_sums._replace(routing=tally.sums(model.config, zero_sum))
        no_grads = jax.tree.map(_no_gradient, params, params if zero in (2, 3) else used)
        if zero == "3level":
            no_grads = jax.tree.map(
                zeros_like_abstract, jax.eval_shape(lambda grads: reduce(grads, in_step=True), no_grads)
            )
        start = no_sums, no_grads, jax.tree.map(jnp.zeros_like, amax)
        if ring_sizes:
            # Each batch has as many micro-steps as its documents need.
            sums, grads, new_amax = jax.lax.fori_loop(
                0,
                batch.count,
                lambda i, carry: micro_step(carry, jax.tree.map(lambda x: x[i], batch.rows), batch.rings[i]),
                start,
            )
        else:
            with sharding.use_rules(model.rules):
                parts = jax.tree.map(lambda x: split_micro_batches(x, max(micro_batches, default=accumulate)), batch)
            if micro_batches:
                sums, grads, new_amax = jax.lax.fori_loop(
                    0,
                    own_count(micro_batches, over),
                    lambda i, carry: micro_step(carry, jax.tree.map(lambda x: x[i], parts)),
                    start,
                )
            else:
                (sums, grads, new_amax), _ = jax.lax.scan(
                    lambda carry, micro_batch: (micro_step(carry, micro_batch), None), start, parts
                )
        return result(sums, grads, new_amax)

    return run


def _no_gradient(param: Array, weight: Array) -> Array:
    """Zeros, sharded as the gradient of ``weight`` is: unreduced over axes whose partial sums are added later."""
    zeros = jnp.zeros(param.shape, param.dtype)
    if sharding.current_mesh() is None:
        return zeros
    spec = jax.typeof(weight).sharding.spec
    return jax.sharding.reshard(zeros, jax.P(*spec.partitions, unreduced=spec.reduced) if spec.reduced else spec)


def _sharded_as(gradient: Array, param: Array) -> Array:
    """Gradient sharded as its parameter."""
    if sharding.current_mesh() is None:
        return gradient
    return jax.sharding.reshard(gradient, jax.P(*jax.typeof(param).sharding.spec.partitions))


def zeros_like_abstract(like: jax.ShapeDtypeStruct) -> Array:
    """Zeros with the shape, dtype and sharding of an abstract array."""
    zeros = jnp.zeros(like.shape, like.dtype)
    if sharding.current_mesh() is None or like.sharding is None:
        return zeros
    return jax.sharding.reshard(zeros, like.sharding.spec)


def split_micro_batches(x: Shaped[Array, "B S"], parts: int) -> Shaped[Array, "A B2 S"]:
    """Splits a batch into ``parts`` interleaved micro-batches, each spread over all batch shards as the whole was."""
    b, s = x.shape
    return sharding.constrain(x.reshape(b // parts, parts, s).swapaxes(0, 1), None, *TOKENS)


def join_micro_batches(x: Shaped[Array, "A B2 S"]) -> Shaped[Array, "B S"]:
    """Inverse of ``split_micro_batches``."""
    a, b, s = x.shape
    x = x.swapaxes(0, 1)
    if sharding.current_mesh() is None:
        return x.reshape(a * b, s)
    return jax.lax.reshape(x, (a * b, s), out_sharding=sharding.spec(*TOKENS))
