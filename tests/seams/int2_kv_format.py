"""A 2-bit KV cache format: four levels around zero, four values in a byte, one scale per key and one per value."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.kv_formats import KV_FORMATS, SCALE, KVFormat, scaled

LEVELS, HALF = 4, 1.5


class Int2Format(KVFormat):
    """Levels -1.5, -0.5, 0.5 and 1.5 times the scale."""

    scales, values_per_element, quantised = 1, 4, True

    def stored(self, dtype: Any) -> np.dtype:
        return jnp.dtype(jnp.uint8)

    def encode(self, rows: Any, parts: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        found = [self._quantise(part) for part in jnp.split(rows, np.cumsum(parts)[:-1], axis=-1)]
        levels = jnp.concatenate([part for part, _ in found], axis=-1)
        levels = levels.reshape(*levels.shape[:-1], -1, self.values_per_element)
        packed = jnp.sum(levels << (2 * jnp.arange(4, dtype=jnp.uint8)), axis=-1, dtype=jnp.uint8)
        return packed, jnp.stack([scale for _, scale in found], axis=-1)

    def _quantise(self, x: Any) -> tuple[Any, Any]:
        scale = (jnp.max(jnp.abs(x), axis=-1) / HALF).astype(SCALE)
        safe = jnp.where(scale == 0, 1, scale)[..., None].astype(x.dtype)
        return jnp.clip(jnp.floor(x / safe) + 2, 0, LEVELS - 1).astype(jnp.uint8), scale

    def decode(self, tile: Any, scales: Any, first: Any, dtype: Any) -> Any:
        levels = (tile[..., None] >> (2 * jnp.arange(4, dtype=jnp.uint8))) & 3
        values = levels.reshape(*tile.shape[:-1], -1).astype(dtype) - HALF
        return scaled(values, scales, first)


KV_FORMATS["int2"] = Int2Format()
