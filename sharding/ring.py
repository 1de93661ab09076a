"""Products around a ring: a sequence is gathered, or sums are scattered over it, beside the products it is for.

Tensor parallelism with a split sequence gathers the residual stream before a layer's products, and scatters the sums
after them. Whole, these transfers wait for the products, or the products for them. Around a ring each device multiplies
the part that it has while the next one is on its way (Wang et al., "Overlap communication with dependent computation
via decomposition in large deep learning models", ASPLOS 2023). The gradient of one is the other, and a weight's is one
product of all tokens.

For bodies of ``jax.shard_map``. Legend: B batch, S tokens of a device's part, T of all parts, D one side of a weight, F
the other, of any number of dimensions.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_gather_matmul(axis: str, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    """``all_gather(x) @ w`` for each weight: x[B, S, D], w[D, *F] -> [B, T, *F].

    Args:
        axis: mesh axis, whose devices hold the parts of the sequence in its order.
        x: this device's part; varies over all that the weights vary over, and they over all that it does.
    """
    return _gather(axis, x, weights)[1]


def _gather(axis: str, x: Array, weights: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    """The whole sequence, and its products."""
    ring, here, part = jax.lax.axis_size(axis), jax.lax.axis_index(axis), x.shape[1]
    to_last = [(i, (i - 1) % ring) for i in range(ring)]
    outs: list[Array] = []
    for step in range(ring):
        coming = jax.lax.ppermute(x, axis, to_last) if step < ring - 1 else x
        start = (here + step) % ring * part
        found = [x, *(jnp.tensordot(x, w, 1) for w in weights)]
        outs = outs or [jnp.zeros_like(f, shape=(f.shape[0], ring * part, *f.shape[2:])) for f in found]
        outs = [jax.lax.dynamic_update_slice_in_dim(o, f, start, 1) for o, f in zip(outs, found, strict=True)]
        x = coming
    return outs[0], tuple(outs[1:])


def _gather_forward(axis: str, x: Array, weights: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    whole, outs = _gather(axis, x, weights)
    return outs, (whole, *weights)


def _gather_backward(axis: str, saved: tuple[Array, ...], d_outs: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    whole, *weights = saved
    flat = [(_flat(d, 2), _flat(w, 1)) for d, w in zip(d_outs, weights, strict=True)]
    # One sum goes around, of all the weights' products.
    d_x = _scatter(axis, tuple(d for d, _ in flat), tuple(w.T for _, w in flat))
    d_weights = (jnp.tensordot(whole, d, ((0, 1), (0, 1))) for d in d_outs)
    return d_x, tuple(d_weights)


all_gather_matmul.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_reduce_scatter(axis: str, x: Array, weight: Array) -> Array:
    """``psum_scatter(x @ weight)`` over the sequence: x[B, T, F], w[F, D] -> [B, S, D]; see ``all_gather_matmul``."""
    return _scatter(axis, (x,), (weight,))


def _scatter(axis: str, xs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    ring, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    part = xs[0].shape[1] // ring
    to_next = [(i, (i + 1) % ring) for i in range(ring)]
    total: Array | None = None
    for step in range(ring):
        # What began a device before, for the part of the device before that, arrives at its place with the last step.
        start = (here - step - 1) % ring * part
        products = [jax.lax.dynamic_slice_in_dim(x, start, part, 1) @ w for x, w in zip(xs, weights, strict=True)]
        mine = functools.reduce(jnp.add, products)
        total = mine if total is None else jax.lax.ppermute(total, axis, to_next) + mine
    assert total is not None
    return total


def _scatter_forward(axis: str, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scatter(axis, (x,), (weight,)), (x, weight)


def _scatter_backward(axis: str, saved: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weight = saved
    whole, (d_x,) = _gather(axis, d_out, (weight.T,))
    return d_x, jnp.tensordot(x, whole, ((0, 1), (0, 1)))


matmul_reduce_scatter.defvjp(_scatter_forward, _scatter_backward)


def _flat(x: Array, leading: int) -> Array:
    """The dimensions after the leading ones as one."""
    return x.reshape(*x.shape[:leading], math.prod(x.shape[leading:]))
