"""Many small arrays as one, so that the host sends and gets one a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


@dataclass(frozen=True)
class Layout:
    """Named arrays of 32-bit numbers, one behind the other in one.

    Attributes:
        fields: (name, shape, dtype: int32, uint32, float32 or float64, which takes two numbers).
    """

    fields: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(self._numbers(shape, dtype) for _, shape, dtype in self.fields)

    @staticmethod
    def _numbers(shape: tuple[int, ...], dtype: str) -> int:
        return math.prod(shape) * np.dtype(dtype).itemsize // 4

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays, on the host, as views."""
        out, at = {}, 0
        for name, shape, dtype in self.fields:
            end = at + self._numbers(shape, dtype)
            out[name] = packed[at:end].view(dtype).reshape(shape)
            at = end
        return out

    def unpack(self, packed: Int[Array, " numbers"]) -> dict[str, Array]:
        """The arrays, on the device."""
        out, at = {}, 0
        for name, shape, dtype in self.fields:
            end = at + self._numbers(shape, dtype)
            part = packed[at:end].reshape(*shape, *((2,) if dtype == "float64" else ()))
            out[name] = part if dtype == "int32" else jax.lax.bitcast_convert_type(part, dtype)
            at = end
        return out

    def pack(self, arrays: dict[str, Array]) -> Int[Array, " numbers"]:
        """One array of them, on the device."""
        parts = []
        for name, shape, dtype in self.fields:
            array = arrays[name].astype(dtype).reshape(shape)
            parts.append(jax.lax.bitcast_convert_type(array, jnp.int32).reshape(-1))
        return jnp.concatenate(parts)
