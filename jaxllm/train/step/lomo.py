"""LOMO's step: each layer is moved in the backward pass, before the next one's gradients exist (arXiv:2306.09782).

The forward pass keeps each layer's input. The backward pass computes a layer again, its gradients, and its update in
place; then only what the layer before needs is left. Of the whole model's gradients there are never more than those of
one layer (one group of them, where layers are of several kinds) and of the ends: embedding, output matrix, last norm.

Legend: L repeats of a segment's group, B batch, S sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import sharding
from jaxllm.models import Functional, Segments
from jaxllm.models.params import on_device, on_host
from jaxllm.train.step.loss import LossSums, permute_sequence, sharded_loss_sums
from jaxllm.train.step.train_state import TrainState
from pallas_kernels.ring_attention import Layout


class LayerwiseResult(NamedTuple):
    """What a step that has no gradients to show gives.

    Attributes:
        sums: of the loss, before the step.
        params, opt_state: after it.
        grad_norm, update_norm, param_norm: of all gradients, of what was added to the parameters, and of these.
    """

    sums: LossSums
    params: Any
    opt_state: Any
    grad_norm: Float[Array, ""]
    update_norm: Float[Array, ""]
    param_norm: Float[Array, ""]


LayerwiseUpdate = Callable[[TrainState, Any], LayerwiseResult]


def lomo_update(
    model: Functional, rules: dict[str, Any], *, z_loss: float = 0.0, layout: Layout = "contiguous"
) -> LayerwiseUpdate:
    """``(state, batch) -> Moved``.

    Args:
        model: without experts, whose losses other layers' routers would hear of.
        rules: ``jaxllm.optim.layerwise_rules.layerwise_transforms``; each moves the parameters of its part.
    """

    def move(state: TrainState, batch: Any) -> LayerwiseResult:
        params, opt_state = state.params, dict(state.opt_state)
        with sharding.use_rules(model.rules):
            batch = permute_sequence(batch, layout)
        segments = Segments(batch.segment_ids, layout)
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(jnp.sum(batch.targets >= 0), 1).astype(dtype)

        def embed(own: Any) -> Array:
            return model.embed({"embedding": own}, batch.tokens, batch.positions)

        def loss(ends: Any, x: Array) -> tuple[Array, LossSums]:
            hidden, weight = model.unembed(ends, x)
            with sharding.use_rules(model.rules):
                sums = sharded_loss_sums(hidden, weight, batch.targets, z_loss, model.config.logit_softcap)
            return sums.loss / total, sums

        x, to_embedding = jax.vjp(embed, params["embedding"])
        inputs = {}
        for s in params["segments"]:
            x, inputs[s] = _forward(model, int(s), params["segments"][s], x, batch.positions, segments)
        ends = {name: params[name] for name in ("embedding", "head")}
        (grads, dx), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(ends, x)

        new, norms = dict(params["segments"]), jnp.zeros(3, dtype)
        opt_state["segments"] = dict(opt_state["segments"])
        for s in reversed(params["segments"]):

            def layer(own: Any, x: Array, number: Array, s: str = s) -> Array:
                first = _first_layer(model, int(s)) + number * len(model.config.segments[int(s)][0])
                return model.group(int(s), own, x, batch.positions, first, segments)[0]

            new[s], opt_state["segments"][s], dx, more = _backward(
                layer, rules["segments"][s], new[s], opt_state["segments"][s], inputs[s], dx, model.config.unroll
            )
            norms += more
        (of_embedding,) = to_embedding(dx)
        grads = grads | {"embedding": jax.tree.map(jnp.add, grads["embedding"], of_embedding)}
        moved = {}
        for name, own in ends.items():
            moved[name], opt_state[name], more = _apply_gradients(rules[name], own, opt_state[name], grads[name])
            norms += more
        return LayerwiseResult(sums, params | moved | {"segments": new}, opt_state, *jnp.sqrt(norms))

    return move


def _first_layer(model: Functional, s: int) -> int:
    """Number of a segment's first layer."""
    return sum(len(group) * repeats for group, repeats in model.config.segments[:s])


def _forward(
    model: Functional, s: int, params: Any, x: Array, positions: Array, segments: Segments
) -> tuple[Float[Array, "B S D"], Float[Array, "L B S D"]]:
    """A segment's result, and the input of each of its groups."""
    group, repeats = model.config.segments[s]

    def one(x: Array, step: tuple[Any, Array]) -> tuple[Array, Array]:
        own, number = step
        return model.group(s, own, x, positions, _first_layer(model, s) + number * len(group), segments)[0], x

    steps = params, jnp.arange(repeats, dtype=jnp.int32)
    return jax.lax.scan(one, x, steps, unroll=model.config.unroll or repeats)


def _backward(
    layer: Callable[..., Array],
    rule: optax.GradientTransformation,
    params: Any,
    state: Any,
    inputs: Float[Array, "L B S D"],
    dx: Float[Array, "B S D"],
    unroll: int,
) -> tuple[Any, Any, Float[Array, "B S D"], Float[Array, " 3"]]:
    """A segment's parameters and state moved, the gradient of its input, and ``_moved``'s norms.

    Stacks are carried, not stacked anew: they are moved in place.
    """

    def one(carry: tuple[Any, ...], step: tuple[Array, Array]) -> tuple[tuple[Any, ...], None]:
        params, now, dx, norms = carry
        x, number = step
        own = layer_slice(params, number)
        _, pull = jax.vjp(lambda own, x: layer(own, x, number), jax.tree.map(lambda p: p[0], own), x)
        grads, dx = pull(dx)
        grads = jax.tree.map(lambda g: g[None], grads)
        own, own_state, more = _apply_gradients(rule, own, layer_slice(now, number, state), grads)
        return (set_layer_slice(params, own, number), set_layer_slice(now, own_state, number), dx, norms + more), None

    repeats = len(inputs)
    steps = inputs, jnp.arange(repeats, dtype=jnp.int32)
    norms = jnp.zeros(3, jnp.promote_types(inputs.dtype, jnp.float32))
    carry, _ = jax.lax.scan(one, (params, state, dx, norms), steps, reverse=True, unroll=unroll or repeats)
    return carry


def layer_slice(stack: Any, number: Array, before: Any = None) -> Any:
    """A layer's part of a tree of stacked arrays, on the device; scalars, which layers share, are of ``before``."""

    def of(x: Array, shared: Array) -> Array:
        return on_device(jax.lax.dynamic_slice_in_dim(x, number, 1)) if x.ndim else shared

    return jax.tree.map(of, stack, stack if before is None else before)


def set_layer_slice(stack: Any, own: Any, number: Array) -> Any:
    """``row`` put back, where the stack is."""

    def into(x: Array, own: Array) -> Array:
        if not x.ndim:
            return own
        if on_host(x):
            own = jax.device_put(own, jax.memory.Space.Host)
        return jax.lax.dynamic_update_slice_in_dim(x, own, number, 0)

    return jax.tree.map(into, stack, own)


def _apply_gradients(rule: optax.GradientTransformation, params: Any, state: Any, grads: Any) -> tuple[Any, Any, Array]:
    """Parameters after a step, the rule's state, and the squared norms of gradients, updates and parameters."""
    grads = jax.tree.map(lambda g, p: sharding.reduce_partial_sums(g, p).astype(p.dtype), grads, params)
    updates, state = rule.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, jnp.stack([optax.tree.norm(tree, squared=True) for tree in (grads, updates, params)])
