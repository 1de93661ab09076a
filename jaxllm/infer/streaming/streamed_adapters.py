"""Streamed adapters: weights of a repeat of layers with its part of the pool of adapters, which is on the device whole.

All factors stay on the device, as they do where layers do, and a program takes those of the repeat that it computes; a
placement is solved with the room that they leave.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxllm.infer.runner.adapted_weight import AdaptedWeight, with_rows
from jaxllm.infer.runner.adapter_pool import FACTORS
from jaxllm.models import Functional


def with_factors(
    model: Functional,
    params: Any,
    weights: Any,
    adapters: tuple[Array, ...] | None,
    layer: Int[Array, ""],
    segment: int,
    block: str | None = None,
) -> Any:
    """Weights of a repeat of a segment, or of one block of it, with the adapters of a step's rows.

    Called in a step, under the model's rules.

    Args:
        model: the model.
        params: parameters outside of blocks, with the arrays of the pool of adapters, see ``AdapterPool.weights``.
        weights: of the repeat or of the block, not stacked.
        adapters: see ``StepBatch``; None: the engine serves none.
        layer: number of a layer of the repeat.
        segment: of it.
        block: the block; None: all of the repeat.
    """
    if adapters is None:
        return weights
    groups = [(len(group), repeats) for group, repeats in model.config.segments]
    size, _ = groups[segment]
    repeat = (layer - sum(size * repeats for size, repeats in groups[:segment])) // size
    # Layers of a segment are stacked in the pool.
    arrays = iter(params[FACTORS])
    found = _own_dicts(weights)
    for path in model.linears():
        a, b = next(arrays), next(arrays)
        _, s, name, *keys, last = path.split("/")
        if int(s) != segment or block not in (None, name):
            continue
        node = found[name] if block is None else found
        for key in keys:
            node = node[key]
        left, right = (jax.lax.dynamic_index_in_dim(x, repeat, keepdims=False) for x in (a, b))
        node[last] = AdaptedWeight(node[last], left, right)
    return with_rows(found, *adapters)


def adapter_rank_bytes(model: Functional) -> int:
    """Bytes of a rank of an adapter of all matrices, in the dtype of the model."""
    numbers = (
        math.prod(one.stack) * (math.prod(one.inputs) + math.prod(one.outputs)) for one in model.linears().values()
    )
    return sum(numbers) * np.dtype(model.config.dtype).itemsize


def _own_dicts(tree: Any) -> Any:
    return {key: _own_dicts(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
