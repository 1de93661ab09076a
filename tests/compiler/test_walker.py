"""The walker against counts by hand, and on unrolled programs against XLA's own count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxllm.compiler import walker


def compiled(function, *shapes, dtype=jnp.float32):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).compile()


def flops(function, *shapes) -> int:
    return walker.read(compiled(function, *shapes).as_text() or "").flops


def turns(times, body):
    return lambda x, w: jax.lax.scan(lambda c, _: (body(c, w), None), x, None, length=times)[0]


def conv(x, k, **options):
    return jax.lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def remat(x, w):
    layer = jax.checkpoint(lambda c, w: jnp.tanh(c @ w))
    return jax.grad(lambda x: jnp.sum(turns(6, layer)(x, w)))(x)


MATMUL = 2 * 8 * 24 * 24
SQUARE = ((8, 24), (24, 24))

BY_HAND = {
    "a product": (lambda x, w: x @ w, ((8, 16), (16, 24)), 2 * 8 * 16 * 24),
    "batched": (lambda x, y: jnp.einsum("bsnh,btnh->bnst", x, y), ((2, 6, 3, 8), (2, 5, 3, 8)), 2 * 2 * 3 * 6 * 5 * 8),
    "a scan": (turns(7, lambda c, w: jnp.tanh(c @ w)), SQUARE, 7 * MATMUL),
    "a scan in a scan": (turns(5, turns(3, lambda c, w: jnp.tanh(c @ w))), SQUARE, 15 * MATMUL),
    "rematerialised": (remat, SQUARE, 6 * 3 * MATMUL),  # forward, again, and backward
    "a convolution": (
        lambda x, k: conv(x, k, window_strides=(1, 1), padding="VALID"),
        ((2, 9, 9, 4), (3, 3, 4, 8)),
        2 * (2 * 7 * 7 * 8) * (3 * 3 * 4),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_flops_are_those_by_hand(name):
    function, shapes, count = BY_HAND[name]
    assert flops(function, *shapes) == count
