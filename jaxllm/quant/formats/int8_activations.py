"""Integer matmuls: activations in int8 with a scale for every token, weights in 8 or 4 bits, sums in int32.

A token's scale is its largest magnitude over 127, found when it is multiplied (dynamic, as in ZeroQuant,
arXiv:2206.01861, and SmoothQuant's O1, arXiv:2211.10438). With weights of 8 bits this is w8a8, of 4 bits w4a8. The sums
over a group of inputs are integers, exactly; they are multiplied with the token's and the group's scale. (The reference
code of compressed-tensors divides by 127.5, so that its codes differ by a rounding.)

Legend: T tokens, I inputs, G groups of inputs, O outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from jaxllm.models.params import at_least_f32
from jaxllm.quant.formats.code_groups import WORDS, CodeGroups
from jaxllm.quant.grids import IntGrid
from pallas_kernels._compat import target_device
from pallas_kernels.packed_matmul import packed_matmul

KERNEL_ROWS = 128
"""Most rows of a matmul that a kernel multiplies with packed bytes; more are multiplied by XLA as integers."""
MOST = 127
"""Largest magnitude of an activation's code."""


@dataclass(frozen=True)
class Int8Activations(CodeGroups):
    """Codes in groups whose matmuls round the activations to int8, see ``jaxllm.models.packed_weight``."""

    def __post_init__(self) -> None:
        if not isinstance(self.grid, IntGrid) or not self.grid.symmetric or self.grid.bits not in (4, 8):
            raise ValueError(f"int8 activations are multiplied with symmetric int8 or int4, not {self.grid.name}.")

    def __str__(self) -> str:
        return f"{super().__str__()}, activations in int8"

    @property
    def depends_on_batch(self) -> bool:
        """A token's scale is its own."""
        return False

    def round_activations(self, x: Float[Array, "... I"]) -> Float[Array, "... I"]:
        """The values that activations have when they are multiplied."""
        codes, scale = quantise_tokens(x, ())
        return (codes * scale).astype(x.dtype)

    def multiply(
        self, x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: Array, over: tuple[str, ...],
        tokens: tuple[str, ...],
    ) -> Float[Array, "..."]:  # fmt: skip
        """Matmul of a device's inputs, in at least float32.

        Args:
            x: activations with one dimension of inputs.
            over: mesh axes that the inputs are split over; the scale of a token is that of all its inputs.
            tokens: mesh axes that the tokens are split over.
        """
        codes, scale = quantise_tokens(x, over)
        sums = self._kernel_matmul(codes.astype(x.dtype), values, scales) if self.grid.bits == 4 else None
        return scaled_sums(self._sums(codes, values, scales, scale.dtype) if sums is None else sums, scale)

    def _kernel_matmul(self, x: Float[Array, "... I"], values: Array, scales: Array) -> Float[Array, "..."] | None:
        """Matmul by the kernel of TPUs and GPUs, which reads packed bytes, in float32; None where it does not take it,
        or where there are so many rows that the bytes of weights are no longer what it waits for.

        Weights are not rounded, so that integers in ``x`` have their exact sums to float32's rounding (on TPUs, with
        groups, to 2^-16).
        """
        few = math.prod(x.shape[:-1]) <= KERNEL_ROWS
        if target_device().platform == "cpu" or not few or (found := self.kernel_terms(x, values, scales)) is None:
            return None
        packed, by_group, form, _ = found
        y = packed_matmul(x.reshape(-1, x.shape[-1]), packed, by_group, form._replace(wide=True))
        outs = self.flatten(values).shape[self.axis % self.flatten(values).ndim + 1 :]
        return y.reshape(*x.shape[:-1], *outs)

    def _sums(self, codes: Int8[Array, "... I"], values: Array, scales: Array, dtype: jnp.dtype) -> Array:
        """Sums over inputs of codes of activations and values of weights, [..., *out].

        Dimensions of inputs that precede those of the format (heads) have groups of their own.
        """
        flat = self.flatten(values)
        axis = self.axis % flat.ndim
        outs, parts = flat.shape[axis + 1 :], math.prod(flat.shape[:axis])
        params = self.params(scales, dtype)
        count, bits = WORDS[self.grid.bits][0], self.grid.bits
        inputs = codes.shape[-1] // parts
        size, groups = self.stored_sizes(inputs, params.scale.shape[axis])
        if size % count:
            raise ValueError(f"groups of {size} inputs cut bytes of {count} codes; choose a multiple of {count}.")
        short = size * groups - inputs
        rows = codes.reshape(-1, parts, inputs)
        rows = jnp.pad(rows, [(0, 0), (0, 0), (0, short)]).reshape(-1, parts * groups, size // count, count)
        total: Array | int = 0
        for k in range(count):
            lane = (self.lane_codes(flat, k).astype(jnp.int16) - 2 ** (bits - 1)).astype(jnp.int8)
            lane = lane.reshape(parts, inputs // count, -1)
            lane = jnp.pad(lane, [(0, 0), (0, short // count), (0, 0)]).reshape(parts * groups, size // count, -1)
            total = total + jnp.einsum("tgi,gio->gto", rows[..., k], lane, preferred_element_type=jnp.int32)
        summed = jnp.einsum("gto,go->to", total.astype(dtype), params.scale.reshape(parts * groups, -1))  # type: ignore[union-attr]
        return summed.reshape(*codes.shape[:-1], *outs)


def scaled_sums(sums: Float[Array, "..."], scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sums of tokens' codes, times the tokens' scales."""
    return sums * scale.reshape(*scale.shape[:-1], *(1,) * (sums.ndim - scale.ndim + 1))


def quantise_tokens(x: Float[Array, "... I"], over: tuple[str, ...]) -> tuple[Int8[Array, "... I"], Array]:
    """Codes of tokens, and their scales [..., 1]; a token of zeros has the scale 1 / 127.

    Args:
        over: mesh axes that the inputs are split over, within ``shard_map``.
    """
    wide = x.astype(at_least_f32(x.dtype))
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    if over:
        largest = jax.lax.pmax(largest, over)
    scale = jnp.where(largest > 0, largest, 1) / MOST
    return jnp.round(wide / scale).astype(jnp.int8), scale
