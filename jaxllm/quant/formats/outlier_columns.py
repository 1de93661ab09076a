"""LLM.int8(): outlier inputs are multiplied in the compute dtype, all others in int8 (arXiv:2208.07339).

Input i is an outlier if any token of the call has a magnitude of at least the threshold there. The matmul is the sum of
the outliers' rows, dequantised, in compute dtype, and of the others in int8 with scales by token and by output
("mixed-precision decomposition", equation 8). Weights are stored in int8 alone.

Legend: T tokens, I inputs, O outputs, K outliers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

from jaxllm.models.params import at_least_f32
from jaxllm.quant.formats.int8_activations import Int8Activations, quantise_tokens, scaled_sums

THRESHOLD = 6.0
"""Magnitude from which on an activation is an outlier (section 3.2)."""
MOST_GATHERED = 32
"""Outliers whose rows are gathered; where there are more, the whole weight is dequantised."""


@dataclass(frozen=True)
class OutlierColumns(Int8Activations):
    """Int8 weights with a scale for every output, whose outlier inputs are multiplied in compute dtype.

    Attributes:
        threshold: magnitude from which on an activation is an outlier.
    """

    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid.bits != 8 or self.group is not None:
            raise ValueError("outlier columns are those of int8 with one scale for each output.")

    def __str__(self) -> str:
        return f"llm_int8, outliers from {self.threshold:g} on"

    @property
    def depends_on_batch(self) -> bool:
        """An input is an outlier by any token of the call."""
        return True

    def round_activations(self, x: Float[Array, "... I"]) -> Float[Array, "... I"]:
        """The values that activations have when they are multiplied: outliers stay."""
        outliers = self.outliers(x, ())
        return jnp.where(outliers, x, super().round_activations(jnp.where(outliers, 0, x)))

    def outliers(self, x: Float[Array, "... I"], tokens: tuple[str, ...]) -> Bool[Array, " I"]:
        """Mask of the inputs that are outliers, by all tokens."""
        largest = jnp.max(jnp.abs(x), axis=tuple(range(x.ndim - 1)))
        if tokens:
            largest = jax.lax.pmax(largest, tokens)
        return largest >= self.threshold

    def multiply(
        self, x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: Array, over: tuple[str, ...],
        tokens: tuple[str, ...],
    ) -> Float[Array, "..."]:  # fmt: skip
        """Matmul of a device's inputs, see ``Int8Activations.multiply``."""
        outliers = self.outliers(x, tokens)
        # Both parts read the same bytes, in one call of the kernel where there is one.
        codes, scale = quantise_tokens(jnp.where(outliers, 0, x), over)
        both = jnp.stack([codes.astype(x.dtype), jnp.where(outliers, x, 0)])
        if (y := self._kernel_matmul(both, values, scales)) is not None:
            return scaled_sums(y[0], scale) + y[1]
        plain = scaled_sums(self._sums(codes, values, scales, scale.dtype), scale)
        flat, outs = self.flatten(values), plain.shape[x.ndim - 1 :]
        rows = flat.reshape(x.shape[-1], *outs)
        by_part = self.params(scales, x.dtype).scale.reshape(-1, *outs)
        size = x.shape[-1] // by_part.shape[0]
        few = min(MOST_GATHERED, x.shape[-1])
        wide = at_least_f32(x.dtype)

        def matmul(x: Array, codes: Array, places: Array) -> Array:
            weight = self.grid.decode(codes, self.grid.params([by_part[places // size]])).astype(x.dtype)
            return jnp.tensordot(x, weight, 1, preferred_element_type=wide)

        def gathered(x: Array, rows: Array) -> Array:
            _, places = jax.lax.top_k(outliers.astype(jnp.int32), few)
            return matmul(x[..., places] * outliers[places].astype(x.dtype), rows[places], places)

        def whole(x: Array, rows: Array) -> Array:
            return matmul(jnp.where(outliers, x, 0), rows, jnp.arange(x.shape[-1]))

        return plain + jax.lax.cond(jnp.sum(outliers) <= few, gathered, whole, x, rows)
