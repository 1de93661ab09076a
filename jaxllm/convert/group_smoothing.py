"""Smoothing of a group of blocks while it is quantised: factors and shifts by its statistics, and what these become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.models import BlockConfig
from jaxllm.quant import smoothing
from jaxllm.quant.input_statistics import InputStatistics

RoundingError = Callable[[str, Any, Any, np.ndarray], float]
"""Squared error of a matrix's results: (path, matrix, Gram matrix, factors of its inputs) -> error."""


def smooth_group(
    group: Sequence[BlockConfig],
    norm: str,
    flat: dict[str, Any],
    seen: dict[str, InputStatistics],
    how: str,
    error: RoundingError,
) -> tuple[dict[str, Any], dict[str, InputStatistics], int]:
    """Parameters and statistics after factors moved from activations into weights, and the number of shifted inputs.

    Args:
        group: blocks.
        norm: kind of their norms.
        flat: parameters by path, each block's behind its number.
        seen: statistics of the inputs of matmuls, by the matrix's path.
        how: ``Method.smooths``.
        error: error of a matrix with some factors, for AWQ.
    """
    shifted = 0
    for b, block in enumerate(group):
        own = {path.removeprefix(f"{b}/"): path for path in flat if path.startswith(f"{b}/")}
        for one in smoothing.smoothed_inputs(block, norm, tuple(own)):
            inside = {short: flat[path] for short, path in own.items()}
            shape = inside[one.used[0]].shape
            if how == "smoothquant_bias" and one.bias:
                stats = seen[own[one.used[0]]]
                middle = smoothing.middle_of_channels(np.asarray(stats.low), np.asarray(stats.high), shape, one.repeats)
                inside = smoothing.shift(inside, one, middle)
                wide = jnp.asarray(smoothing.spread_heads(middle, shape, one.repeats))
                seen |= {own[short]: seen[own[short]].shifted(wide) for short in one.used}
                shifted += 1
            stats = seen[own[one.used[0]]]
            factors = _factors(one, inside, stats, shape, how, lambda short, *rest, own=own: error(own[short], *rest))
            for short, value in smoothing.smooth(inside, one, factors).items():
                flat[own[short]] = value
            wide = jnp.asarray(smoothing.spread_heads(factors, shape, one.repeats))
            seen |= {own[short]: seen[own[short]].divided(wide) for short in one.used}
    return flat, seen, shifted


def _factors(
    one: smoothing.SmoothedInput,
    inside: Mapping[str, Any],
    stats: InputStatistics,
    shape: tuple[int, ...],
    how: str,
    error: RoundingError,
) -> np.ndarray:
    gather = lambda x: smoothing.gather_heads(np.asarray(x, np.float64), shape, one.repeats)  # noqa: E731
    inputs = stats.total.shape[-1]
    matrices = {path: inside[path].reshape(inputs, -1) for path in one.used}
    if how != "awq":
        largest = np.max([np.abs(np.asarray(w)).max(1) for w in matrices.values()], axis=0)
        return smoothing.smoothquant_factors(gather(stats.most), gather(largest))

    def total(factors: np.ndarray) -> float:
        wide = smoothing.spread_heads(factors, shape, one.repeats)
        return sum(error(path, matrix, stats.gram, wide) for path, matrix in matrices.items())

    return smoothing.awq_factors(gather(stats.total / stats.count), total)[0]
