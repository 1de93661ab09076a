"""Decoding over a paged pool: one token of each request attends to all it has, which is a matter of bandwidth.

Legend: R requests, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.measure import Cost, Work, ours
from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention


@dataclass(frozen=True)
class Shape:
    """``r`` requests of ``length`` tokens each, give or take a half, in pages of ``page`` slots."""

    r: int
    length: int
    n: int
    k: int
    h: int
    page: int = 64
    dtype: str = "bfloat16"

    def lengths(self) -> np.ndarray:
        """Lengths of the requests, this step's token included."""
        return np.random.default_rng(0).integers(self.length // 2, self.length * 3 // 2, self.r).astype(np.int32)

    def cost(self) -> Cost:
        """Every key and value that is seen once, and the new ones; queries and results."""
        item, seen = jnp.dtype(self.dtype).itemsize, int(self.lengths().sum())
        slots = (seen + self.r) * self.k * 2 * self.h
        return Cost(2 * 2 * seen * self.n * self.h, item * (slots + 2 * self.r * self.n * self.h))


SHAPES = {
    "Llama-3.1-8B, 64 x 4k": Shape(64, 4096, 32, 8, 128),
    "Llama-3.1-8B, 8 x 32k": Shape(8, 32768, 32, 8, 128),
    "Llama-3.3-70B, 1/8 heads, 256 x 2k": Shape(256, 2048, 8, 1, 128),
}
TINY = {"tiny": Shape(3, 20, 4, 2, 16, page=4, dtype="float32")}


def work(shape: Shape) -> Work:
    """Work of a shape: FLOPs, bytes, and the contenders to time."""
    lengths = shape.lengths()
    pages = -(-lengths // shape.page)
    table = np.zeros((shape.r, pages.max()), np.int32)
    free = np.random.default_rng(1).permutation(pages.sum())
    for request, (start, count) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
        table[request, :count] = free[start : start + count]
    multiple = 128 if jax.default_backend() == "tpu" else 1
    form = PageFormat(shape.k, shape.h, shape.h, multiple=multiple)
    keys = jax.random.split(jax.random.key(0), 4)
    rows = jax.random.normal(keys[3], (1, int(pages.sum()), shape.k, shape.page, form.width), shape.dtype)
    q = jax.random.normal(keys[0], (shape.r, shape.n, shape.h), shape.dtype)
    k, v = (jax.random.normal(key, (shape.r, shape.k, shape.h), shape.dtype) for key in keys[1:3])
    ragged = jnp.asarray(table), jnp.arange(shape.r + 1, dtype=jnp.int32), jnp.asarray(lengths)

    def decode(q: Any, k: Any, v: Any, table: Any, cu_q_lens: Any, kv_lens: Any, pool: PagePool, *, name: str) -> Any:
        return paged_attention(q, k, v, pool, 0, table, cu_q_lens, kv_lens, decode_only=True, implementation=name)

    return Work(
        dataclasses.asdict(shape),
        (q, k, v, *ragged, PagePool(rows, form)),
        functools.partial(decode, name="xla"),
        {name: functools.partial(decode, name=name) for name in ours()},
        (shape.cost(),),
        carried=True,
    )
