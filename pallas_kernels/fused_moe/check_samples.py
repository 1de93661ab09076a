"""Samples on which the kernel of the fused mixture of experts is compared with the reference before its first use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.fused_moe.api import fused_moe


def samples(dtype: DTypeLike) -> list[Sample]:
    """Two experts a token of nine, of which four are never chosen; some tokens have one alone; a width of two parts."""
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation([0, 2, 3, 6, 8])[:2] for _ in range(37)])
    chosen[::5, 1] = 9
    weights = jnp.asarray(rng.uniform(0.2, 0.8, chosen.shape), jnp.float32)
    arrays = [normal(0, 37, 640, dtype=dtype)]
    arrays += [normal(i, 9, *shape, dtype=dtype) for i, shape in ((1, (640, 256)), (2, (640, 256)), (3, (256, 640)))]
    return [
        Sample(
            "experts of few tokens",
            lambda name, x, gate, up, down, *routed: fused_moe(
                x, gate, up, down, routed[0], routed[1], jax.nn.silu, implementation=name
            ),
            (*arrays, jnp.asarray(chosen, jnp.int32), weights),
            4,
        )
    ]
