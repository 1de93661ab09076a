"""MeZO's training step: a zeroth-order update from two forward passes and no backward pass.

The loss difference between the parameters perturbed by plus and minus epsilon along a random direction gives the
directional derivative (arXiv:2305.17333, algorithm 1). The direction is never stored: each layer's part is drawn from
a seed where the layer is used, once per forward pass and once for the update. There are no gradients to hold, and
parameters are updated in place. With parameters in host memory the step is ``jaxllm.train.step.zo2``'s.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import sharding
from jaxllm.models import Functional
from jaxllm.models.param_subset import merge, select
from jaxllm.train.step.lomo import LayerwiseResult, LayerwiseUpdate, layer_slice, set_layer_slice
from jaxllm.train.step.loss import permute_sequence
from jaxllm.train.step.objective import CrossEntropyObjective, HeadObjective, LossSums
from jaxllm.train.step.train_state import TrainState
from pallas_kernels.ring_attention import Layout

PERTURBATION = 1e-3
"""Epsilon: size of the perturbation to each side (section 2.1 and table 15)."""


def mezo_update(
    model: Functional,
    rules: dict[str, Any],
    *,
    z_loss: float = 0.0,
    layout: Layout = "contiguous",
    objective: HeadObjective | None = None,
    trainable: Any = None,
) -> LayerwiseUpdate:
    """Function ``(state, batch) -> LayerwiseResult`` of MeZO; the reported loss is the mean of the two forward passes.

    Args:
        model: without experts.
        rules: from ``jaxllm.optim.layerwise_rules.layerwise_transforms``; each updates its part of the parameters by
            the directional derivative times the direction.
        z_loss: weight of the z-loss of the cross-entropy, the objective if none is given.
        layout: which tokens of a row each device gets.
        objective: the loss, of the final hidden states.
        trainable: subset of the parameters that is perturbed and updated, a tree of booleans; None: all.
    """
    objective = CrossEntropyObjective(z_loss) if objective is None else objective
    segments = {str(s): (len(group), repeats) for s, (group, repeats) in enumerate(model.config.segments)}

    def update(state: TrainState, batch: Any) -> LayerwiseResult:
        params, opt_state = state.params, dict(state.opt_state)
        key = jax.random.fold_in(state.rng, state.step)
        with sharding.use_rules(model.rules):
            batch = permute_sequence(batch, layout)
        context = model.training_context(batch.segment_ids, layout)
        trained = select(trainable, params)
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(objective.total(batch), 1).astype(dtype)

        def loss(epsilon: Array) -> LossSums:
            def perturbed(own: Any, whole: Any, name: str, number: Any = 0) -> Any:
                z = random_direction(key, own, name, number)
                return merge(jax.tree.map(lambda p, z: p + (epsilon * z).astype(p.dtype), own, z), whole)

            ends = {name: perturbed(trained[name], params[name], name) for name in ("embedding", "head")}
            x, first = model.embed(ends, batch.tokens, batch.positions), 0
            for s, (size, repeats) in segments.items():

                def layer(x: Array, number: Array, s: str = s, size: int = size, first: int = first) -> Any:
                    own, whole = (layer_slice(tree["segments"][s], number) for tree in (trained, params))
                    own = perturbed(own, whole, s, number)
                    own = jax.tree.map(lambda p: p[0], own)
                    return model.group(int(s), own, x, batch.positions, first + number * size, context)[0], None

                x, _ = jax.lax.scan(layer, x, jnp.arange(repeats, dtype=jnp.int32))
                first += size * repeats
            return objective.from_hidden(model, ends, x, batch)

        both = jax.lax.map(loss, jnp.array([PERTURBATION, -PERTURBATION], dtype))
        slope = (both.loss[0] - both.loss[1]) / (2 * PERTURBATION * total)

        def apply(rule: optax.GradientTransformation, own: Any, state: Any, name: str, number: Any = 0) -> Any:
            return apply_direction(rule, own, state, key, slope, name, number)

        new: dict[str, Any] = {"segments": {}}
        opt_state["segments"], norms = dict(opt_state["segments"]), jnp.zeros(3, dtype)
        for name in ("embedding", "head"):
            own, opt_state[name], more = apply(rules[name], trained[name], opt_state[name], name)
            new[name] = merge(own, params[name])
            norms += more
        for s, (_, repeats) in segments.items():
            before = opt_state["segments"][s]

            def layer(carry: Any, number: Array, s: str = s, before: Any = before) -> Any:
                stack, now, norms = carry
                own = layer_slice(stack, number), layer_slice(now, number, before)
                own, own_state, more = apply(rules["segments"][s], *own, s, number)
                return (
                    set_layer_slice(stack, own, number),
                    set_layer_slice(now, own_state, number),
                    norms + more,
                ), None

            carry = trained["segments"][s], before, norms
            (own, opt_state["segments"][s], norms), _ = jax.lax.scan(layer, carry, jnp.arange(repeats, dtype=jnp.int32))
            new["segments"][s] = merge(own, params["segments"][s])
        sums = jax.tree.map(lambda x: jnp.mean(x, axis=0), both)._replace(items=objective.items(batch))
        return LayerwiseResult(sums, new, opt_state, *jnp.sqrt(norms), extras={})

    return update


def apply_direction(
    rule: optax.GradientTransformation, own: Any, state: Any, key: Array, slope: Array, name: str, number: Any = 0
) -> tuple[Any, Any, Float[Array, " 3"]]:
    """Update of a part of the parameters along its random direction.

    Args:
        rule: of the part.
        own, state: parameters and optimizer state of the part.
        key: of the step that the direction belongs to.
        slope: directional derivative.
        name, number: identify the part, see ``random_direction``.

    Returns:
        parameters and state after the update, and the squared norms of gradients, updates and parameters.
    """
    grads = jax.tree.map(lambda z: slope.astype(z.dtype) * z, random_direction(key, own, name, number))
    updates, state = rule.update(grads, state, own)
    own = optax.apply_updates(own, updates)
    norms = [optax.tree.norm(tree, squared=True).astype(slope.dtype) for tree in (grads, updates, own)]
    return own, state, jnp.stack(norms)


def random_direction(key: Array, own: Any, name: str, number: Any = 0) -> Any:
    """Standard normal values with the shapes, dtypes and shardings of a layer's (or end's) parameters.

    Args:
        key: of the step.
        own: parameters of the part.
        name: of the part: "embedding", "head" or a segment; with ``number`` it identifies the layer.
        number: index of the layer in its segment.
    """

    def draw(path: tuple[Any, ...], p: Array) -> Float[Array, "..."]:
        leaf = zlib.crc32(f"{name}{jax.tree_util.keystr(path)}".encode())
        place = {} if jax.sharding.get_abstract_mesh().empty else {"out_sharding": jax.typeof(p).sharding}
        return jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, leaf), number), p.shape, p.dtype, **place)

    return jax.tree.map_with_path(draw, own)
