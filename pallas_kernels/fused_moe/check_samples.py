"""Samples on which the kernel of the fused mixture of experts is compared with the reference before its first use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.fused_moe.api import fused_moe


def samples(dtype: DTypeLike) -> list[Sample]:
    """Two experts a token of nine, of which four are never chosen; some tokens have one alone. Then few tokens and
    experts so wide that each passes in several parts.
    """
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation([0, 2, 3, 6, 8])[:2] for _ in range(37)])
    chosen[::5, 1] = 9
    return [
        _sample("experts of few tokens", chosen, (9, 640, 256), dtype),
        _sample("experts in parts", np.array([[2], [0], [2]]), (3, 1024, 2304), dtype),
    ]


def _sample(label: str, chosen: np.ndarray, shape: tuple[int, int, int], dtype: DTypeLike) -> Sample:
    """Sample of a choice of experts, with their number and their sizes inwards and outwards."""
    count, d, f = shape
    weights = jnp.asarray(np.random.default_rng(0).uniform(0.2, 0.8, chosen.shape), jnp.float32)
    arrays = [normal(0, len(chosen), d, dtype=dtype)]
    arrays += [normal(i, count, *one, dtype=dtype) for i, one in ((1, (d, f)), (2, (d, f)), (3, (f, d)))]
    return Sample(
        label,
        lambda name, x, gate, up, down, *routed: fused_moe(
            x, gate, up, down, routed[0], routed[1], jax.nn.silu, implementation=name
        ),
        (*arrays, jnp.asarray(chosen, jnp.int32), weights),
        4,
    )
