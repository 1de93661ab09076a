"""MeZO's step: the slope of the loss along a random direction, from two forward passes (arXiv:2305.17333, algorithm 1).

The direction is never held: a layer's part of it is drawn from its seed where the layer is used, once for each pass,
and once more when the layer is moved. So nothing waits for a backward pass, and parameters are moved in place. ZO2
(arXiv:2503.12668) has layers wait on the host.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import sharding
from jaxllm.models import Functional, Segments
from jaxllm.train.step.lomo import LayerwiseResult, LayerwiseUpdate, layer_slice, set_layer_slice
from jaxllm.train.step.loss import LossSums, permute_sequence, sharded_loss_sums
from jaxllm.train.step.train_state import TrainState
from pallas_kernels.ring_attention import Layout

PERTURBATION = 1e-3
"""Of the step to each side (section 2.1 and table 15)."""


def mezo_update(
    model: Functional, rules: dict[str, Any], *, z_loss: float = 0.0, layout: Layout = "contiguous"
) -> LayerwiseUpdate:
    """``(state, batch) -> Moved``; the loss is the mean of the two that were seen.

    Args:
        model: without experts.
        rules: ``jaxllm.optim.layerwise_rules.layerwise_transforms``; each moves the parameters of its part by slope times direction.
    """
    segments = {str(s): (len(group), repeats) for s, (group, repeats) in enumerate(model.config.segments)}

    def move(state: TrainState, batch: Any) -> LayerwiseResult:
        params, opt_state = state.params, dict(state.opt_state)
        key = jax.random.fold_in(state.rng, state.step)
        with sharding.use_rules(model.rules):
            batch = permute_sequence(batch, layout)
        context = Segments(batch.segment_ids, layout)
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(jnp.sum(batch.targets >= 0), 1).astype(dtype)

        def loss(aside: Array) -> LossSums:
            def shifted(own: Any, name: str, number: Any = 0) -> Any:
                there = random_direction(key, own, name, number)
                return jax.tree.map(lambda p, z: p + (aside * z).astype(p.dtype), own, there)

            ends = {name: shifted(params[name], name) for name in ("embedding", "head")}
            x, first = model.embed(ends, batch.tokens, batch.positions), 0
            for s, (size, repeats) in segments.items():

                def layer(x: Array, number: Array, s: str = s, size: int = size, first: int = first) -> Any:
                    own = shifted(layer_slice(params["segments"][s], number), s, number)
                    own = jax.tree.map(lambda p: p[0], own)
                    return model.group(int(s), own, x, batch.positions, first + number * size, context)[0], None

                x, _ = jax.lax.scan(layer, x, jnp.arange(repeats, dtype=jnp.int32))
                first += size * repeats
            hidden, weight = model.unembed(ends, x)
            with sharding.use_rules(model.rules):
                return sharded_loss_sums(hidden, weight, batch.targets, z_loss, model.config.logit_softcap)

        both = jax.lax.map(loss, jnp.array([PERTURBATION, -PERTURBATION], dtype))
        slope = (both.loss[0] - both.loss[1]) / (2 * PERTURBATION * total)

        def moved(rule: optax.GradientTransformation, own: Any, state: Any, name: str, number: Any = 0) -> Any:
            grads = jax.tree.map(lambda z: slope.astype(z.dtype) * z, random_direction(key, own, name, number))
            updates, state = rule.update(grads, state, own)
            own = optax.apply_updates(own, updates)
            norms = [optax.tree.norm(tree, squared=True).astype(dtype) for tree in (grads, updates, own)]
            return own, state, jnp.stack(norms)

        new: dict[str, Any] = {"segments": {}}
        opt_state["segments"], norms = dict(opt_state["segments"]), jnp.zeros(3, dtype)
        for name in ("embedding", "head"):
            new[name], opt_state[name], more = moved(rules[name], params[name], opt_state[name], name)
            norms += more
        for s, (_, repeats) in segments.items():
            before = opt_state["segments"][s]

            def layer(carry: Any, number: Array, s: str = s, before: Any = before) -> Any:
                stack, now, norms = carry
                own = layer_slice(stack, number), layer_slice(now, number, before)
                own, own_state, more = moved(rules["segments"][s], *own, s, number)
                return (
                    set_layer_slice(stack, own, number),
                    set_layer_slice(now, own_state, number),
                    norms + more,
                ), None

            carry, _ = jax.lax.scan(layer, (params["segments"][s], before, norms), jnp.arange(repeats, dtype=jnp.int32))
            new["segments"][s], opt_state["segments"][s], norms = carry
        sums = jax.tree.map(lambda x: jnp.mean(x, axis=0), both)
        return LayerwiseResult(sums, new, opt_state, *jnp.sqrt(norms))

    return move


def random_direction(key: Array, own: Any, name: str, number: Any = 0) -> Any:
    """Of a layer, or an end of the model: normal numbers of its parameters' shapes and places.

    Args:
        key: of the step.
        name: of the part; with ``number`` it says which layer.
    """

    def draw(path: tuple[Any, ...], p: Array) -> Float[Array, "..."]:
        leaf = zlib.crc32(f"{name}{jax.tree_util.keystr(path)}".encode())
        place = {} if jax.sharding.get_abstract_mesh().empty else {"out_sharding": jax.typeof(p).sharding}
        return jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, leaf), number), p.shape, p.dtype, **place)

    return jax.tree.map_with_path(draw, own)
