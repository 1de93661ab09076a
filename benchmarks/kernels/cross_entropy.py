"""Linear layer and cross-entropy in one: ours, and logits in memory with optax's loss.

The backward pass counts two products: one that computes the logits again gets no credit for it.

Legend: T tokens, D embed, V vocab.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from benchmarks.kernels.measure import Cost, Work, ours
from pallas_kernels.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Shape:
    """The loss of ``t`` tokens."""

    t: int
    d: int
    v: int
    dtype: str = "bfloat16"

    def cost(self, *, backward: bool) -> Cost:
        """Hidden states and head once, and their gradients."""
        item = jnp.dtype(self.dtype).itemsize
        both = item * (self.t + self.v) * self.d
        return Cost((4 if backward else 2) * self.t * self.d * self.v, (2 if backward else 1) * both)


SHAPES = {
    "Llama-3.1-8B, 8k tokens": Shape(8192, 4096, 128256),
    "Gemma-2-9B, 4k tokens": Shape(4096, 3584, 256000),
    "SmolLM2-135M, 16k tokens": Shape(16384, 576, 49152),
}
TINY = {"tiny": Shape(24, 16, 70, "float32")}


def work(shape: Shape) -> Work:
    """Work of a shape: FLOPs, bytes, and the contenders to time."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (shape.t, shape.d), shape.dtype)
    head = jax.random.normal(keys[1], (shape.v, shape.d), shape.dtype) * shape.d**-0.5
    targets = jax.random.randint(keys[2], (shape.t,), 0, shape.v)

    def fused(hidden: jax.Array, head: jax.Array, targets: jax.Array, *, name: str) -> jax.Array:
        weights = jnp.full(targets.shape, 1 / targets.size, jnp.float32)
        return linear_cross_entropy(hidden, head, targets, weights, implementation=name)[0]

    def materialised(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        logits = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return Work(
        dataclasses.asdict(shape),
        (hidden, head, targets),
        functools.partial(fused, name="xla"),
        {**{name: functools.partial(fused, name=name) for name in ours()}, "logits, optax": materialised},
        (shape.cost(backward=False), shape.cost(backward=True)),
        differentiated=2,
        d_out=jnp.ones((), jnp.float32),
    )
