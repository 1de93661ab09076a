"""LOMO's training step: updates each layer in the backward pass, before the next layer's gradients exist.

LOMO (arXiv:2306.09782) and AdaLomo (arXiv:2310.10195). The forward pass saves the input of each layer. The backward
pass recomputes a layer, takes its gradients and updates it in place; then only the gradient of the layer's input
remains. Gradients in memory are never more than those of one layer (one group of layers, where layers are of several
kinds) plus those outside the layers: embedding, output matrix and final norm ("ends" below).

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
from jaxllm.models import Functional
from jaxllm.models.attention_context import AttentionContext
from jaxllm.models.param_subset import is_frozen, merge, select
from jaxllm.models.params import on_device, on_host
from jaxllm.optim import StepHooks
from jaxllm.optim.build import layerwise_parts
from jaxllm.train.config import RunConfig
from jaxllm.train.run_model import trained_params
from jaxllm.train.step.loss import permute_sequence
from jaxllm.train.step.objective import CrossEntropyObjective, HeadObjective, LossSums, make_objective
from jaxllm.train.step.train_state import TrainState
from pallas_kernels.ring_attention import Layout


class LayerwiseResult(NamedTuple):
    """Result of a step that updates layer by layer and has no gradients to return.

    Attributes:
        sums: loss before the update.
        params, opt_state: after the update.
        grad_norm, update_norm, param_norm: global norms of the gradients, the updates and the updated parameters.
        extras: new states of links by name, empty where the update keeps no state there.
    """

    sums: LossSums
    params: Any
    opt_state: Any
    grad_norm: Float[Array, ""]
    update_norm: Float[Array, ""]
    param_norm: Float[Array, ""]
    extras: dict[str, Any]


LayerwiseUpdate = Callable[[TrainState, Any], LayerwiseResult]
"""``(state, batch) -> LayerwiseResult``."""


def lomo_hooks(run: RunConfig, model: Functional) -> StepHooks:
    """Step hooks of LOMO and AdaLomo."""
    trainable = trained_params(run, model)
    parts = layerwise_parts(run.optim, run.steps, select(trainable, model.logical_axes()))
    objective: Any = make_objective(run.objective, run.z_loss)
    own: dict[str, Any] = {"objective": objective, "layout": run.parallel.layout, "trainable": trainable}
    return StepHooks(update=lomo_update(model, parts, **own))


def lomo_update(
    model: Functional,
    rules: dict[str, Any],
    *,
    z_loss: float = 0.0,
    layout: Layout = "contiguous",
    objective: HeadObjective | None = None,
    trainable: Any = None,
) -> LayerwiseUpdate:
    """Function ``(state, batch) -> LayerwiseResult`` of LOMO or AdaLomo.

    Args:
        model: without experts, whose routing losses need all layers together.
        rules: from ``jaxllm.optim.layerwise_rules.layerwise_transforms``; each updates its part of the parameters.
        z_loss: weight of the z-loss of the cross-entropy, the objective if none is given.
        layout: which tokens of a row each device gets.
        objective: the loss, of the final hidden states.
        trainable: subset of the parameters that is updated, a tree of booleans; None: all.
    """

    objective = CrossEntropyObjective(z_loss) if objective is None else objective

    def update(state: TrainState, batch: Any) -> LayerwiseResult:
        params, opt_state = state.params, dict(state.opt_state)
        with sharding.use_rules(model.rules):
            batch = permute_sequence(batch, layout)
        segments = model.training_context(batch.segment_ids, layout)
        trained = select(trainable, params)
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(objective.total(batch), 1).astype(dtype)

        def embed(own: Any) -> Array:
            return model.embed({"embedding": merge(own, params["embedding"])}, batch.tokens, batch.positions)

        def loss(ends: Any, x: Array) -> tuple[Array, LossSums]:
            whole = merge(ends, {name: params[name] for name in ends})
            sums = objective.from_hidden(model, whole, x, batch)
            return sums.loss / total, sums

        x, embed_vjp = jax.vjp(embed, trained["embedding"])
        inputs = {}
        for s in params["segments"]:
            x, inputs[s] = _forward(model, int(s), params["segments"][s], x, batch.positions, segments)
        ends = {name: trained[name] for name in ("embedding", "head")}
        (grads, dx), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(ends, x)

        new, norms = dict(params["segments"]), jnp.zeros(3, dtype)
        opt_state["segments"] = dict(opt_state["segments"])
        for s in reversed(params["segments"]):

            def layer(own: Any, x: Array, number: Array, s: str = s) -> Array:
                first = _first_layer(model, int(s)) + number * len(model.config.segments[int(s)][0])
                return model.group(int(s), own, x, batch.positions, first, segments)[0]

            own, opt_state["segments"][s], dx, more = _backward(
                layer,
                rules["segments"][s],
                trained["segments"][s],
                params["segments"][s],
                opt_state["segments"][s],
                inputs[s],
                dx,
                model.config.unroll,
            )
            new[s] = merge(own, params["segments"][s])
            norms += more
        (lookup_grads,) = embed_vjp(dx)
        grads = grads | {"embedding": jax.tree.map(jnp.add, grads["embedding"], lookup_grads)}
        new_ends = {}
        for name, own in ends.items():
            after, opt_state[name], more = _apply_gradients(rules[name], own, opt_state[name], grads[name])
            new_ends[name] = merge(after, params[name])
            norms += more
        sums = sums._replace(items=objective.items(batch))
        return LayerwiseResult(sums, params | new_ends | {"segments": new}, opt_state, *jnp.sqrt(norms), extras={})

    return update


def _first_layer(model: Functional, s: int) -> int:
    """Index of a segment's first layer."""
    return sum(len(group) * repeats for group, repeats in model.config.segments[:s])


def _forward(
    model: Functional, s: int, params: Any, x: Array, positions: Array, segments: AttentionContext
) -> tuple[Float[Array, "B S D"], Float[Array, "L B S D"]]:
    """Forward pass of a segment; returns its output and the input of each of its groups."""
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
    whole: Any,
    state: Any,
    inputs: Float[Array, "L B S D"],
    dx: Float[Array, "B S D"],
    unroll: int,
) -> tuple[Any, Any, Float[Array, "B S D"], Float[Array, " 3"]]:
    """Backward pass of a segment that updates each group in place.

    The stacked parameters and states are carried through the scan, so that XLA updates their buffers in place.

    Args:
        params: those that are updated, of ``whole``.

    Returns:
        the segment's parameters and optimizer state after the update, the gradient of its input, and the squared norms
        of ``_apply_gradients``.
    """

    def one(carry: tuple[Any, ...], step: tuple[Array, Array]) -> tuple[tuple[Any, ...], None]:
        params, now, dx, norms = carry
        x, number = step
        own = layer_slice(params, number)

        def forward(own: Any, x: Array) -> Array:
            frozen = jax.tree.map(lambda mine, p: None if mine is not None else p, own, whole, is_leaf=is_frozen)
            return layer(merge(own, jax.tree.map(lambda p: p[0], layer_slice(frozen, number))), x, number)

        _, pull = jax.vjp(forward, jax.tree.map(lambda p: p[0], own), x)
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
    """One layer of a tree of stacked arrays, on the device.

    Args:
        stack: arrays with layers on the first dimension; scalars are shared by all layers.
        number: index of the layer.
        before: where scalars are taken from instead, so that each layer sees the same count; None: from ``stack``.
    """

    def of(x: Array, shared: Array) -> Array:
        return on_device(jax.lax.dynamic_slice_in_dim(x, number, 1)) if x.ndim else shared

    return jax.tree.map(of, stack, stack if before is None else before)


def set_layer_slice(stack: Any, own: Any, number: Array) -> Any:
    """Writes one layer back into a tree of stacked arrays, in the memory (device or host) where the stack is."""

    def into(x: Array, own: Array) -> Array:
        if not x.ndim:
            return own
        if on_host(x):
            own = jax.device_put(own, jax.memory.Space.Host)
        return jax.lax.dynamic_update_slice_in_dim(x, own, number, 0)

    return jax.tree.map(into, stack, own)


def _apply_gradients(rule: optax.GradientTransformation, params: Any, state: Any, grads: Any) -> tuple[Any, Any, Array]:
    """Parameters and optimizer state after an update, and the squared norms of gradients, updates and parameters."""
    grads = jax.tree.map(lambda g, p: sharding.reduce_partial_sums(g, p).astype(p.dtype), grads, params)
    updates, state = rule.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, jnp.stack([optax.tree.norm(tree, squared=True) for tree in (grads, updates, params)])
