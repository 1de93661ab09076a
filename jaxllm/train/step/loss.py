"""Next-token loss of a packed batch.

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
from jaxllm.models.moe.packed_experts import has_packed
from jaxllm.train.step.numerics import Numerics
from jaxllm.train.step.routing_losses import RoutingAccumulator, RoutingConfig, RoutingSums
from pallas_kernels.cross_entropy import linear_cross_entropy
from pallas_kernels.ring_attention import Layout, order

HIDDEN = ("batch", "seq", "act_embed")
TOKENS = ("batch", "seq")


class LossSums(NamedTuple):
    """Sums over the target tokens of a batch, in at least float32 (nats)."""

    loss: Float[Array, ""]  # what is differentiated: nll + z_loss * z, and the routers' losses
    nll: Float[Array, ""]  # negative log-likelihood
    z: Float[Array, ""]  # squared log-partition function
    count: Float[Array, ""]  # target tokens
    routing: RoutingSums | None = None  # of a model with experts, where it is asked for


def loss_sums(
    model: Functional,
    params: Any,
    batch: Any,
    *,
    z_loss: float = 0.0,
    layout: Layout = "contiguous",
    routing: RoutingConfig | None = None,
) -> LossSums:
    """Loss of ``batch`` summed over its targets; targets below 0 do not count.

    Args:
        batch: ``jaxllm.data.Batch``, Int[B S] each.
        z_loss: weight of the squared log-partition function (arXiv:2204.02311, section 5).
        layout: which tokens of a row a device gets where the mesh splits the sequence.
        routing: weights of the routers' losses, of a model with experts; None: they are not even counted.

    The logits are never held whole: the vocabulary projection and its softmax run in chunks of tokens.
    """
    with sharding.use_rules(model.rules):
        batch = permute_sequence(batch, layout)
    segments = Segments(batch.segment_ids, layout)
    tally = None if routing is None else RoutingAccumulator.of(model.config, segments)
    hidden, heard = model.forward(params, batch.tokens, batch.positions, tally or segments)
    hidden, head = model.unembed(params, hidden)
    with sharding.use_rules(model.rules):
        sums = sharded_loss_sums(hidden, head, batch.targets, z_loss, model.config.logit_softcap)
    if routing is None or not isinstance(heard, RoutingAccumulator):
        return sums
    own = heard.sums(model.config, sums.count)
    loss = sums.loss + routing.balance_loss * own.balance + routing.z_loss * own.z
    return sums._replace(loss=loss, routing=own)


def permute_sequence(batch: Any, layout: Layout) -> Any:
    """The batch's rows in the order in which ``layout`` gives them to the devices that split the sequence.

    Raises:
        ValueError: the rows do not divide.
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
    """``(params, batch) -> (sums, gradients of the mean loss per target token)``.

    With a run's ``Numerics`` as a third argument, what its products have seen is a third result, and gradients are made
    of the scaled loss and scaled back.

    Args:
        accumulate: micro-batches the batch is cut into, one after the other, to bound memory. Each token weighs the
            same however many targets its micro-batch has, so the result does not depend on ``accumulate``, but for the
            balance loss, which is of a micro-batch.
        layout: which tokens of a row a device gets where the mesh splits the sequence.
        zero: stage of ZeRO, ``jaxllm.parallel.parallel_config.ParallelConfig``; in stages 1 and 2 weights are gathered here, once.
        routing: see ``loss_sums``.
    """

    def mean_loss(given: tuple[Any, Any], batch: Any, total: Array) -> tuple[Array, LossSums]:
        params = model.with_amax_history(*given)
        sums = loss_sums(model, params, batch, z_loss=z_loss, layout=layout, routing=routing)
        return sums.loss / total, sums

    grad = jax.value_and_grad(mean_loss, has_aux=True)

    def run(params: Any, batch: Any, numerics: Numerics | None = None) -> tuple[Any, ...]:
        if has_packed(params):
            raise NotImplementedError(
                "training: experts are packed, and packed weights have no gradients; load the model with "
                'weights = "plain".'
            )
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(jnp.sum(batch.targets >= 0), 1).astype(dtype)
        used = params if zero == 3 else model.gather(params)
        seen, scale = (None, 1.0) if numerics is None else (numerics.seen, numerics.scale)

        def stored(grads: Any) -> Any:
            """As the parameters are: in their dtype, and where they are."""
            return jax.tree.map(lambda g, p: sharding.reduce_partial_sums(g, p).astype(p.dtype), grads, params)

        def done(sums: LossSums, grads: Any, seen: Any) -> tuple[Any, ...]:
            if numerics is None:
                return sums, stored(grads)
            return sums, jax.tree.map(lambda g: g / scale, stored(grads)), seen

        if accumulate == 1:
            (_, sums), (grads, seen) = grad((used, seen), batch, total / scale)
            return done(sums, grads, seen)

        def micro(carry: tuple[LossSums, Any, Any], part: Any) -> tuple[tuple[LossSums, Any, Any], None]:
            (_, sums), (grads, now) = grad((used, seen), part, total / scale)
            grads = stored(grads) if zero > 1 else jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
            most = jax.tree.map(jnp.maximum, carry[2], now)
            return (*jax.tree.map(jnp.add, carry[:2], (sums, grads)), most), None

        with sharding.use_rules(model.rules):
            parts = jax.tree.map(lambda x: split_micro_batches(x, accumulate), batch)
        zero_sum = jnp.zeros((), dtype)
        nothing = LossSums(zero_sum, zero_sum, zero_sum, zero_sum)
        if routing is not None and (tally := RoutingAccumulator.of(model.config, Segments(None))) is not None:
            nothing = nothing._replace(routing=tally.sums(model.config, zero_sum))
        like = params if zero > 1 else used
        none = jax.tree.map(lambda p, u: _no_gradient(p.shape, p.dtype, u), params, like)
        (sums, grads, now), _ = jax.lax.scan(micro, (nothing, none, jax.tree.map(jnp.zeros_like, seen)), parts)
        return done(sums, grads, now)

    return run


def _no_gradient(shape: tuple[int, ...], dtype: jnp.dtype, weight: Array) -> Array:
    """Zeros, where the gradient of ``weight`` is: unsummed over the axes that it is to be summed over late."""
    zeros = jnp.zeros(shape, dtype)
    if sharding.current_mesh() is None:
        return zeros
    spec = jax.typeof(weight).sharding.spec
    return jax.sharding.reshard(zeros, jax.P(*spec.partitions, unreduced=spec.reduced) if spec.reduced else spec)


def split_micro_batches(x: Shaped[Array, "B S"], parts: int) -> Shaped[Array, "A B2 S"]:
    """Cuts the batch into ``parts`` interleaved micro-batches, each spread over all batch shards as the whole was."""
    b, s = x.shape
    return sharding.constrain(x.reshape(b // parts, parts, s).swapaxes(0, 1), None, *TOKENS)
