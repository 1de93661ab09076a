"""Collective matmul: all-gathers and reduce-scatters of a split sequence, overlapped with the matmuls that need them.

Tensor parallelism with sequence parallelism all-gathers the residual stream before a layer's matmuls, and
reduce-scatters the partial sums after them. As single collectives, communication and matmuls wait for each other. On a
ring, each device multiplies the part that it has while the next one is in flight (Wang et al., "Overlap communication
with dependent computation via decomposition in large deep learning models", ASPLOS 2023). Each of the two functions is
the gradient of the other; a weight gradient is one matmul over all tokens.

For use inside ``jax.shard_map``. Legend: B batch, S tokens of a device's part, T tokens of all parts, D one side of a
weight, F the other side, of any number of dimensions.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_gather_matmul(axis: str, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    """All-gather matmul: ``all_gather(x) @ w`` for each weight: x[B, S, D], w[D, *F] -> [B, T, *F].

    Args:
        axis: mesh axis whose devices hold the parts of the sequence, in order.
        x: this device's part; x and the weights vary over the same manual mesh axes.
    """
    return _gather(axis, x, weights)[1]


def _gather(axis: str, x: Array, weights: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    """All-gathered sequence, and its product with each weight."""
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
    # One partial sum goes around the ring: the sum over all weights.
    d_x = _scatter(axis, tuple(d for d, _ in flat), tuple(w.T for _, w in flat))
    d_weights = (jnp.tensordot(whole, d, ((0, 1), (0, 1))) for d in d_outs)
    return d_x, tuple(d_weights)


all_gather_matmul.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_reduce_scatter(axis: str, x: Array, weight: Array) -> Array:
    """Matmul reduce-scatter over the sequence: ``psum_scatter(x @ weight)``: x[B, T, F], w[F, D] -> [B, S, D].

    Args:
        axis: mesh axis whose devices hold the parts of the sequence, in order.
    """
    return _scatter(axis, (x,), (weight,))


def _scatter(axis: str, xs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    ring, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    part = xs[0].shape[1] // ring
    to_next = [(i, (i + 1) % ring) for i in range(ring)]
    total: Array | None = None
    for step in range(ring):
        # The partial sum of a part starts at the next device and arrives at the part's own device in the last step.
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
    """Array whose dimensions after the ``leading`` ones are merged into one."""
    return x.reshape(*x.shape[:leading], math.prod(x.shape[leading:]))
