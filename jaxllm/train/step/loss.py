"""Next-token cross-entropy of a packed batch, and its gradients with gradient accumulation over micro-batches.

Padding and masked tokens have targets below 0, the loss mask. The z-loss (arXiv:2204.02311, section 5) is added here;
load-balancing losses come from ``routing_losses``.

Legend: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

import sharding
from jaxllm.models import Functional, Segments
from jaxllm.models.packed_weight import has_packed
from jaxllm.train.step.numerics import Numerics
from jaxllm.train.step.routing_losses import RoutingAccumulator, RoutingConfig, RoutingSums
from pallas_kernels.cross_entropy import linear_cross_entropy
from pallas_kernels.ring_attention import Layout, order

HIDDEN = ("batch", "seq", "act_embed")
TOKENS = ("batch", "seq")


class LossSums(NamedTuple):
    """Loss terms summed over a batch's target tokens, in nats and at least float32; divide by ``count`` for means."""

    loss: Float[Array, ""]  # the differentiated sum: nll + z_loss * z + routing losses
    nll: Float[Array, ""]  # cross-entropy (negative log-likelihood)
    z: Float[Array, ""]  # squared log-partition function (logsumexp)
    count: Float[Array, ""]  # target tokens
    routing: RoutingSums | None = None  # models with experts, where requested


def loss_sums(
    model: Functional,
    params: Any,
    batch: Any,
    *,
    z_loss: float = 0.0,
    layout: Layout = "contiguous",
    routing: RoutingConfig | None = None,
) -> LossSums:
    """Forward pass and loss of a batch, summed over its targets; targets below 0 are masked.

    The vocabulary projection and its softmax run in chunks of tokens, so the logits are never materialised whole.

    Args:
        model: the architecture.
        params: of the model.
        batch: ``jaxllm.data.Batch``, Int[B S] each.
        z_loss: weight of the z-loss, the squared log-partition function (arXiv:2204.02311, section 5).
        layout: which tokens of a row each device gets where the mesh splits the sequence (context parallelism).
        routing: weights of the load-balancing loss and router z-loss; None: routing statistics are not even collected.
    """
    with sharding.use_rules(model.rules):
        batch = permute_sequence(batch, layout)
    segments = Segments(batch.segment_ids, layout)
    tally = None if routing is None else RoutingAccumulator.of(model.config, segments)
    hidden, context = model.forward(params, batch.tokens, batch.positions, tally or segments)
    hidden, head = model.unembed(params, hidden)
    with sharding.use_rules(model.rules):
        sums = sharded_loss_sums(hidden, head, batch.targets, z_loss, model.config.logit_softcap)
    if routing is None or not isinstance(context, RoutingAccumulator):
        return sums
    routers = context.sums(model.config, sums.count)
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


def sharded_loss_sums(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    z_loss: float,
    softcap: float | None,
) -> LossSums:
    """Cross-entropy of hidden states, fused with the vocabulary projection and summed over all devices.

    Args:
        hidden: final hidden states.
        head: output matrix, possibly sharded over the vocabulary.
        targets: token ids; below 0: masked.
        z_loss: weight of the z-loss.
        softcap: of the logits; None: none.
    """
    token_axes = sharding.axis_names(*TOKENS)
    vocab_axes = sharding.axis_names("act_vocab")

    def local(hidden: Array, head: Array, targets: Array) -> tuple[Array, ...]:
        flat = targets.reshape(-1)
        weights = (flat >= 0).astype(jnp.promote_types(hidden.dtype, jnp.float32))
        loss, stats = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            flat,
            weights,
            z_loss=z_loss,
            softcap=softcap,
            vocab_axis=vocab_axes[0] if vocab_axes else None,
        )
        sums = (loss, stats.nll_sum, stats.z_sum, weights.sum())
        return tuple(jax.lax.psum(x, token_axes) for x in sums) if token_axes else sums

    sums = sharding.shard_map(local, (HIDDEN, ("act_vocab", None), TOKENS), ((), (), (), ()))
    with jax.named_scope("loss"):
        return LossSums(*sums(hidden, head, targets))


def value_and_grad(
    model: Functional,
    *,
    z_loss: float = 0.0,
    accumulate: int = 1,
    layout: Layout = "contiguous",
    zero: Literal[1, 2, 3] = 3,
    routing: RoutingConfig | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """Loss and gradients of a step: ``(params, batch) -> (LossSums, gradients of the mean loss per target token)``.

    With ``Numerics`` as a third argument, gradients are taken of the scaled loss and divided by the loss scale, and
    the matmuls' new amax values are a third result.

    Args:
        model: the architecture; its remat policy (gradient checkpointing) applies inside.
        z_loss: see ``loss_sums``.
        accumulate: micro-batches that the batch is split into, run one after the other to bound activation memory.
            Every token has the same weight however many targets its micro-batch has, so the result does not depend on
            ``accumulate``, except for the load-balancing loss, which is computed per micro-batch.
        layout: see ``loss_sums``.
        zero: ZeRO stage (``jaxllm.parallel.parallel_config.ParallelConfig``); in stages 1 and 2 the all-gather of
            weights happens here, once per step; in stage 3 (FSDP) layer by layer.
        routing: see ``loss_sums``.

    Raises:
        NotImplementedError: when traced with packed expert weights, which have no gradients.
    """

    def mean_loss(inputs: tuple[Any, Any], batch: Any, total: Array) -> tuple[Array, LossSums]:
        params = model.with_amax_history(*inputs)
        sums = loss_sums(model, params, batch, z_loss=z_loss, layout=layout, routing=routing)
        return sums.loss / total, sums

    grad = jax.value_and_grad(mean_loss, has_aux=True)

    def run(params: Any, batch: Any, numerics: Numerics | None = None) -> tuple[Any, ...]:
        if has_packed(params):
            raise NotImplementedError(
                'training: weights are packed (quantised) and have no gradients; load the model with weights = "plain".'
            )
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(jnp.sum(batch.targets >= 0), 1).astype(dtype)
        used = params if zero == 3 else model.gather(params)
        amax, scale = (None, 1.0) if numerics is None else (numerics.seen, numerics.scale)

        def reduce(grads: Any) -> Any:
            """Gradients in the parameters' dtype and sharding: the reduce-scatter (or all-reduce) of partial sums."""
            return jax.tree.map(lambda g, p: sharding.reduce_partial_sums(g, p).astype(p.dtype), grads, params)

        def result(sums: LossSums, grads: Any, amax: Any) -> tuple[Any, ...]:
            if numerics is None:
                return sums, reduce(grads)
            return sums, jax.tree.map(lambda g: g / scale, reduce(grads)), amax

        if accumulate == 1:
            (_, sums), (grads, amax) = grad((used, amax), batch, total / scale)
            return result(sums, grads, amax)

        # Gradient accumulation: a scan over micro-batches that adds losses and gradients. ZeRO stages 2 and 3 reduce
        # the gradients of each micro-batch, stage 1 those of all once at the end.
        def micro_step(carry: tuple[LossSums, Any, Any], micro_batch: Any) -> tuple[tuple[LossSums, Any, Any], None]:
            (_, sums), (grads, new_amax) = grad((used, amax), micro_batch, total / scale)
            grads = reduce(grads) if zero > 1 else jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
            largest = jax.tree.map(jnp.maximum, carry[2], new_amax)
            return (*jax.tree.map(jnp.add, carry[:2], (sums, grads)), largest), None

        with sharding.use_rules(model.rules):
            micro_batches = jax.tree.map(lambda x: split_micro_batches(x, accumulate), batch)
        zero_sum = jnp.zeros((), dtype)
        no_sums = LossSums(zero_sum, zero_sum, zero_sum, zero_sum)
        if routing is not None and (tally := RoutingAccumulator.of(model.config, Segments(None))) is not None:
            no_sums = no_sums._replace(routing=tally.sums(model.config, zero_sum))
        like = params if zero > 1 else used
        no_grads = jax.tree.map(lambda p, u: _no_gradient(p.shape, p.dtype, u), params, like)
        start = no_sums, no_grads, jax.tree.map(jnp.zeros_like, amax)
        (sums, grads, new_amax), _ = jax.lax.scan(micro_step, start, micro_batches)
        return result(sums, grads, new_amax)

    return run


def _no_gradient(shape: tuple[int, ...], dtype: jnp.dtype, weight: Array) -> Array:
    """Zeros, sharded as the gradient of ``weight`` is: unreduced over axes whose partial sums are added later."""
    zeros = jnp.zeros(shape, dtype)
    if sharding.current_mesh() is None:
        return zeros
    spec = jax.typeof(weight).sharding.spec
    return jax.sharding.reshard(zeros, jax.P(*spec.partitions, unreduced=spec.reduced) if spec.reduced else spec)


def split_micro_batches(x: Shaped[Array, "B S"], parts: int) -> Shaped[Array, "A B2 S"]:
    """Splits a batch into ``parts`` interleaved micro-batches, each spread over all batch shards as the whole was."""
    b, s = x.shape
    return sharding.constrain(x.reshape(b // parts, parts, s).swapaxes(0, 1), None, *TOKENS)
