"""Hash of a base: by which an adapter knows the parameters that it was trained on, whatever their sharding."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt


def base_hash(params: Any) -> str:
    """Hash of the parameters of a base, with the dtype they are in: "float32:1f...". Others in that dtype differ."""
    return f"{jax.tree.leaves(params)[0].dtype}:{params_checksum(params)}"


def is_other_base(one: str, other: str) -> bool:
    """Whether two hashes are of different bases; unknown ("", or of two dtypes) is not different."""
    return bool(one and other) and one.partition(":")[0] == other.partition(":")[0] and one != other


def params_checksum(params: Any) -> str:
    """Checksum of a tree of parameters, which does not depend on their sharding: 16 hex digits."""

    @jax.jit
    def sums(params: Any) -> Any:
        return jax.tree.map(_bit_sum, params)

    with jax.set_mesh(jax.tree.leaves(params)[0].sharding.mesh):
        found = jax.tree_util.tree_leaves_with_path(jax.device_get(sums(params)))
    named = "".join(f"{jax.tree_util.keystr(path)}={int(value)};" for path, value in found)
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def _bit_sum(x: Array) -> UInt[Array, ""]:
    """Sum of an array's bits as unsigned integers, modulo 2**32."""
    width = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    return bits.sum(dtype=jnp.uint32)
