"""Samples on which the kernels of the cross-entropy are compared with the reference before their first use."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.cross_entropy.api import linear_cross_entropy


def samples(dtype: DTypeLike) -> list[Sample]:
    """Tokens and a vocabulary of no whole number of tiles and bands, some weights zero, z-loss and soft cap.

    So many tiles that a GPU's program has more than one of the vocabulary.
    """
    tokens, width, vocab = 1100, 96, 16500
    rng = np.random.default_rng(2)
    targets = jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, tokens) / tokens, jnp.float32)

    def run(name: str, hidden: Any, head: Any, weights: Any, targets: Any) -> Any:
        return linear_cross_entropy(hidden, head, targets, weights, z_loss=0.01, softcap=30.0, implementation=name)[0]

    hidden, head = normal(0, tokens, width, dtype=dtype), 0.2 * normal(1, vocab, width, dtype=dtype)
    # Logits far below zero, which is what a column beyond the vocabulary would have.
    hidden, head = hidden.at[:, 0].set(4), head.at[:, 0].set(-4)
    return [Sample("odd sizes", run, (hidden, head, weights, targets), 3)]
