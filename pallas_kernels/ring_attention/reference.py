"""Reference ring attention: all-gathers keys and values, then calls the reference attention.

Legend: B batch, S tokens of a shard, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.reference import attention_reference
from pallas_kernels.ring_attention.layout import places
from pallas_kernels.ring_attention.xla import RingConfig


def ring_attention_reference(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    segment_ids: Int[Array, "B S"] | None,
    positions: Int[Array, "B S"] | None,
    sinks: Float[Array, " N"] | None,
    *,
    rings: tuple[RingConfig, ...],
    which: Int[Array, ""] | None,
) -> Float[Array, "B S N V"]:
    """Reference ring attention; see ``ring_attention``.

    Raises:
        NotImplementedError: rings of a part of the axis, or positions that no layout says.
    """
    (axis, shards, devices, layout, scale, window, softcap), *others = rings
    if layout is None or others or shards != devices or which is not None or positions is not None:
        raise NotImplementedError("ring_attention: the reference has one ring of the whole axis, by a layout.")
    b, s = q.shape[:2]

    def whole(x: Array) -> Array:
        return jax.lax.all_gather(x, axis, axis=1, tiled=True)

    here = places(layout, jax.lax.axis_index(axis), shards, s)
    everywhere = jnp.concatenate([places(layout, r, shards, s) for r in range(shards)])
    out, _ = attention_reference(
        q,
        whole(k),
        whole(v),
        sinks,
        q_positions=jnp.broadcast_to(here, (b, s)),
        kv_positions=jnp.broadcast_to(everywhere, (b, s * shards)),
        q_segment_ids=segment_ids,
        kv_segment_ids=None if segment_ids is None else whole(segment_ids),
        scale=scale,
        window=window,
        softcap=softcap,
    )
    return out
