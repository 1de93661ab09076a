"""Packed buffer: many small arrays in one, so that a step needs one transfer to the device and one back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


@dataclass(frozen=True)
class PackedBuffer:
    """Layout of named arrays of 32-bit elements, one after the other in one int32 array.

    Attributes:
        fields: (name, shape, dtype); dtype is int32, uint32, float32, or float64, which takes two elements.
    """

    fields: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def size(self) -> int:
        """Number of int32 elements of the buffer."""
        return sum(self._elements(shape, dtype) for _, shape, dtype in self.fields)

    @staticmethod
    def _elements(shape: tuple[int, ...], dtype: str) -> int:
        return math.prod(shape) * np.dtype(dtype).itemsize // 4

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Views of the named arrays in a buffer on the host."""
        out, at = {}, 0
        for name, shape, dtype in self.fields:
            end = at + self._elements(shape, dtype)
            out[name] = packed[at:end].view(dtype).reshape(shape)
            at = end
        return out

    def unpack(self, packed: Int[Array, " elements"]) -> dict[str, Array]:
        """Named arrays of a buffer on the device."""
        out, at = {}, 0
        for name, shape, dtype in self.fields:
            end = at + self._elements(shape, dtype)
            part = packed[at:end].reshape(*shape, *((2,) if dtype == "float64" else ()))
            out[name] = part if dtype == "int32" else jax.lax.bitcast_convert_type(part, dtype)
            at = end
        return out

    def pack(self, arrays: dict[str, Array]) -> Int[Array, " elements"]:
        """Buffer of named arrays, on the device."""
        parts = []
        for name, shape, dtype in self.fields:
            array = arrays[name].astype(dtype).reshape(shape)
            parts.append(jax.lax.bitcast_convert_type(array, jnp.int32).reshape(-1))
        return jnp.concatenate(parts)
