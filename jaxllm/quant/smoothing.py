"""Smoothing: factors of channels that move from activations into weights, before these are rounded.

``y = x w = (x / s) (s w)``: a layer's inputs are divided by s where they are made, in the gain of the norm or in the
columns of the matrix before it, and the rows of its weights are multiplied by s. Exact before rounding.

SmoothQuant (arXiv:2211.10438) chooses s so that activations and weights share the range; AWQ (arXiv:2306.00978) so
that the weights of large activations are rounded finely, by the error of the result.

With a bias term (SQ-b of MPTQ-ViT, arXiv:2401.14895) an input is shifted first, so that the range of every channel is
around 0: ``x w + c = (x - z) w + (c + z w)``. The shift is taken from the bias of the layer that makes the input, and
added to those of the layers that use it, so that both have to be there.

Legend: I channels, O outputs, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.models import BlockConfig

ALPHAS = tuple(i / 20 for i in range(20))
"""Exponents of the activations that AWQ tries."""
LEAST = 1e-5
"""Least factor."""


@dataclass(frozen=True)
class SmoothedInput:
    """An input of matmuls, and where it is made.

    Attributes:
        made: path of the gain, bias or matrix whose last dimensions are the input's channels; its values are divided.
        used: paths of the matrices whose first dimensions are the channels; they are multiplied.
        repeats: consumers' channels for each of the producer's (query heads that share a value head).
        bias: path of the bias that a shift is taken from; "" where the input cannot be shifted.
    """

    made: tuple[str, ...]
    used: tuple[str, ...]
    repeats: int = 1
    bias: str = ""


def smoothed_inputs(block: BlockConfig, norm: str, paths: Sequence[str]) -> list[SmoothedInput]:
    """Inputs of a block that can be smoothed, for a block with parameters at these paths.

    Those of matmuls behind a nonlinearity without a gate stay as they are, and so do norms whose gain is stored less
    one: a factor would take the gain's place.
    """
    found = []
    if block.norms != "post" and norm != "rms_plus_one":
        for place, used in (
            ("attention_norm", ("attention/q", "attention/k", "attention/v")),
            ("mlp_norm", ("mlp/gate", "mlp/up")),
        ):
            made = tuple(p for p in (f"{place}/gain", f"{place}/bias") if p in paths)
            used = tuple(p for p in used if p in paths or p != "mlp/gate")
            if made and all(p in paths for p in used):
                shifts = len(made) == 2 and all(f"{p}_bias" in paths for p in used)
                found.append(SmoothedInput(made, used, bias=made[-1] if shifts else ""))
    made = tuple(p for p in ("mlp/up", "mlp/up_bias") if p in paths)
    if "mlp/gate" in paths and "mlp/down" in paths:
        found.append(SmoothedInput(made, ("mlp/down",)))
    if all(p in paths for p in ("attention/v", "attention/o")) and not hasattr(block.attention, "latent"):
        made = tuple(p for p in ("attention/v", "attention/v_bias") if p in paths)
        # The rows of the softmax sum to 1, but for a sink, so that the heads' results shift as the values do.
        shifts = len(made) == 2 and "attention/o_bias" in paths and "attention/sinks" not in paths
        repeats = block.attention.heads // block.attention.kv_heads
        found.append(SmoothedInput(made, ("attention/o",), repeats, made[-1] if shifts else ""))
    return found


def smooth(
    params: Mapping[str, Any], one: SmoothedInput, factors: Float[np.ndarray, " I"]
) -> dict[str, Float[Array, "..."]]:
    """The parameters with an input's factors moved from the activations into the weights.

    Args:
        factors: of the producer's channels, in its order.
    """
    out = dict(params)
    for path in one.made:
        value = out[path]
        channels = value.shape[-_dims(value, factors.size) :]
        out[path] = value / jnp.asarray(factors, value.dtype).reshape(channels)
    for path in one.used:
        value = out[path]
        rows = value.reshape(factors.size * one.repeats, -1)
        out[path] = (rows * jnp.asarray(spread_heads(factors, value.shape, one.repeats), value.dtype)[:, None]).reshape(
            value.shape
        )
    return out


def shift(
    params: Mapping[str, Any], one: SmoothedInput, middle: Float[np.ndarray, " I"]
) -> dict[str, Float[Array, "..."]]:
    """The parameters with an input shifted by ``-middle``, which moves into the biases of the layers that use it.

    Args:
        middle: of the producer's channels, in its order.
    """
    out = dict(params)
    bias = out[one.bias]
    out[one.bias] = bias - jnp.asarray(middle, bias.dtype).reshape(bias.shape)
    for path in one.used:
        value, own = out[path], out[f"{path}_bias"]
        wide = jnp.asarray(spread_heads(middle, value.shape, one.repeats), value.dtype)
        out[f"{path}_bias"] = own + (wide @ value.reshape(wide.size, -1)).reshape(own.shape).astype(own.dtype)
    return out


def middle_of_channels(
    low: Float[np.ndarray, " J"], high: Float[np.ndarray, " J"], shape: tuple[int, ...], repeats: int
) -> Float[np.ndarray, " I"]:
    """Middle of each producer's channel's range, by the smallest and largest of the consumer's (SQ-b, equation 5)."""
    return (gather_heads(high, shape, repeats) - gather_heads(-low, shape, repeats)) / 2


def spread_heads(factors: Float[np.ndarray, " I"], shape: tuple[int, ...], repeats: int) -> Float[np.ndarray, " J"]:
    """Factors of the consumer's channels: each kv head's for all query heads that share it; shape[0] heads of those."""
    if repeats == 1:
        return factors
    heads, width = shape[0], shape[1]
    return np.repeat(factors.reshape(heads // repeats, 1, width), repeats, axis=1).reshape(-1)


def gather_heads(values: Float[np.ndarray, " J"], shape: tuple[int, ...], repeats: int) -> Float[np.ndarray, " I"]:
    """The largest of the consumer's channels for each of the producer's: the inverse of ``spread_heads``."""
    if repeats == 1:
        return values
    heads, width = shape[0], shape[1]
    return values.reshape(heads // repeats, repeats, width).max(axis=1).reshape(-1)


def smoothquant_factors(
    activations: Float[np.ndarray, " I"], weights: Float[np.ndarray, " I"], alpha: float = 0.5
) -> Float[np.ndarray, " I"]:
    """Factors ``max|x|^alpha / max|w|^(1 - alpha)`` of every channel (equation 4); 1 for channels without values.

    Args:
        activations: largest magnitude of each channel's activations.
        weights: largest magnitude of each channel's weights, in all matmuls with the input.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = activations**alpha / weights ** (1 - alpha)
    return np.where((activations > 0) & (weights > 0), np.maximum(factors, LEAST), 1.0)


def awq_factors(
    activations: Float[np.ndarray, " I"], error: Callable[[Float[np.ndarray, " I"]], float]
) -> tuple[Float[np.ndarray, " I"], float]:
    """Factors ``mean|x|^alpha`` with the alpha of the least error, and that alpha; 0 changes nothing (equation 5).

    Args:
        activations: mean magnitude of each channel's activations.
        error: squared error of the results with these factors.
    """
    best: tuple[float, float, np.ndarray] | None = None
    for alpha in ALPHAS:
        factors = np.maximum(np.where(activations > 0, activations, 1.0) ** alpha, 1e-4)
        factors = factors / np.sqrt(factors.max() * factors.min())
        found = error(factors)
        if best is None or found < best[0]:
            best = found, alpha, factors
    assert best is not None
    return best[2], best[1]


def _dims(value: Array, channels: int) -> int:
    """Number of last dimensions of an array that are its channels."""
    for dims in range(1, value.ndim + 1):
        if int(np.prod(value.shape[-dims:])) == channels:
            return dims
    raise ValueError(f"an array of shape {list(value.shape)} does not end in {channels} channels.")
