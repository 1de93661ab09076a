"""Samples on which the kernels of flash attention are compared with the reference before their first use."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.flash_attention.api import flash_attention_and_lse


def samples(dtype: DTypeLike) -> list[Sample]:
    """Rows of no whole number of blocks: causal; then packed documents with a window, a soft cap and sinks. In 16 bits
    then what cuDNN takes too: a window alone, without the logsumexp, whose gradient it has not; a wider head dim.
    """
    s, heads, kv_heads, dim = 300, 4, 2, 64
    q, k, v = (normal(i, 1, s, n, dim, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads)))
    segments = jnp.asarray(np.repeat(np.array([1, 2, 3, 0], np.int32), [130, 40, 120, 10])[None])

    def run(name: str, q: Any, k: Any, v: Any, sinks: Any = None, segments: Any = None, **options: Any) -> Any:
        found = flash_attention_and_lse(
            q, k, v, sinks=sinks, q_segment_ids=segments, kv_segment_ids=segments, implementation=name, **options
        )
        return found[0] if segments is not None else found  # a query that sees nothing has an infinite logsumexp

    def output(name: str, q: Any, k: Any, v: Any) -> Any:
        return run(name, q, k, v, window=70)[0]

    packed = functools.partial(run, window=70, softcap=20.0)
    wide = tuple(normal(4 + i, 1, 200, n, 128, dtype=dtype) for i, n in enumerate((2, 1, 1)))
    found = [
        Sample("causal", run, (q, k, v), 3),
        Sample("packed, window, soft cap, sinks", packed, (q, k, v, normal(3, heads, dtype=dtype), segments), 4),
    ]
    return found if jnp.dtype(dtype).itemsize > 2 else [*found, Sample("window, head dim 128", output, wide, 3)]
