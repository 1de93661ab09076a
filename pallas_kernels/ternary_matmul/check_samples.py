"""Samples on which the kernel of the matmul with ternary codes is compared with the reference before first use."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.ternary_matmul.api import ternary_matmul
from pallas_kernels.ternary_matmul.codewords import HALF, LONGEST, TernaryCode, pairs_of

WORDS = 512


def drawn_code(seed: int, experts: int, outputs: int, inputs: int) -> TernaryCode:
    """Codewords of any runs: a dictionary of runs of 1 to 14 pairs, most of them zeros, and outputs of such runs."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([np.arange(1, LONGEST + 1), rng.integers(1, LONGEST + 1, WORDS - LONGEST)])
    pairs = rng.choice(9, (WORDS, LONGEST), p=[0.02, 0.06, 0.02, 0.06, 0.68, 0.06, 0.02, 0.06, 0.02]).astype(np.uint32)
    runs = np.zeros((2, WORDS), np.uint32)
    for place in range(LONGEST):
        runs[place // HALF] |= np.where(place < lengths, pairs[:, place], 0) << np.uint32(4 * (place % HALF))
    runs[1] |= lengths.astype(np.uint32) << np.uint32(28)
    words = list[list[int]]()
    for _ in range(experts):
        starts, own = list[int](), list[int]()
        for _ in range(outputs):
            starts += [len(own) % 2**16, len(own) >> 16]
            left = pairs_of(inputs)
            while left:
                word = int(rng.integers(WORDS)) if left >= LONGEST else left - 1  # the first ones have 1, 2, ... pairs
                own.append(word)
                left -= int(lengths[word])
        words.append(starts + own)
    most = max(map(len, words))
    stacked = np.stack([np.pad(one, (0, most - len(one))) for one in words]).astype(np.uint16)
    return TernaryCode(jnp.asarray(stacked), jnp.asarray(runs))


def samples(dtype: DTypeLike) -> list[Sample]:
    """Rows of several experts in no order, and of none; an odd number of inputs, outputs no multiple of a tile."""
    code = drawn_code(0, 3, 77, 301)
    x, scales = normal(0, 9, 301, dtype=dtype), 0.5 + jnp.abs(normal(1, 3, 77, dtype=jnp.float32))
    experts = jnp.asarray([2, 0, 3, 2, 2, 1, 3, 0, 2], jnp.int32)
    arguments = (x, code, scales, experts)
    run = lambda name, *args: ternary_matmul(*args, implementation=name)  # noqa: E731
    return [Sample("rows of experts", run, arguments, 1)]
