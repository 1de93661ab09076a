"""Causal attention of a sequence split over all devices: ours, and keys gathered first. Costs are of one device.

Legend: B batch, S sequence, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.kernels import flash
from benchmarks.kernels.flash import Shape
from benchmarks.kernels.measure import Cost, Work, ours
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.ring_attention import places, ring_attention

SHAPES = {
    "Llama-3.1-8B, 64k": Shape(1, 65536, 32, 8, 128),
    "Llama-3.1-8B, 256k": Shape(1, 262144, 32, 8, 128),
}
TINY = {"tiny": Shape(1, 64, 4, 2, 16, dtype="float32")}


def work(shape: Shape) -> Work:
    """Work of a shape, with tokens in zigzag order: FLOPs, bytes, and the contenders to time."""
    n = len(jax.devices())
    mesh = jax.make_mesh((n,), ("context",), axis_types=(AxisType.Explicit,))
    rows = P(None, "context")

    def spread(function: Any) -> Any:
        return jax.shard_map(function, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)

    def gathered(q: jax.Array, k: jax.Array, v: jax.Array, *, name: str | None = None) -> jax.Array:
        size = q.shape[1]
        k, v = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
        where = [places("zigzag", r, n, size) for r in range(n)]
        mine = places("zigzag", jax.lax.axis_index("context"), n, size)
        q_at, kv_at = (
            jnp.broadcast_to(x, (q.shape[0], x.shape[0])) for x in (jnp.asarray(mine), jnp.concatenate(where))
        )
        return flash_attention(q, k, v, q_positions=q_at, kv_positions=kv_at, implementation=name)

    local = flash.work(shape)
    place = NamedSharding(mesh, rows)
    *inputs, d_out = (jax.device_put(x, place) for x in (*local.inputs, local.d_out))
    names = [name for name in ours() if name != "pallas_gpu"]
    ring = {name: spread(functools.partial(ring_attention, axis="context", implementation=name)) for name in names}
    return Work(
        dataclasses.asdict(shape) | {"devices": n},
        tuple(inputs),
        spread(functools.partial(gathered, name="xla")),
        {**ring, "keys gathered": spread(gathered)},
        tuple(Cost(cost.flops // n, cost.bytes // n) for cost in local.costs),
        differentiated=3,
        d_out=d_out,
    )
