"""Packed matmul in plain JAX, for any backend: a sum over lanes, whose matrices XLA unpacks within the matmul.

Legend: M rows, K inputs, B bytes of an output, N outputs, G groups of inputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.packed_matmul.codes import (
    PackedBytes,
    PackedCodes,
    by_column,
    lane_values,
    precision,
    result_dtype,
    split_lanes,
    tuples,
)
from pallas_kernels.packed_matmul.scales import Scales, scale_values


def packed_matmul_xla(
    x: Float[Array, "M K"], packed: PackedBytes, scales: Scales, form: PackedCodes
) -> Float[Array, "M _"]:
    """Packed matmul in plain JAX; see ``packed_matmul``."""
    packed, scales = by_column(packed, scales, form)
    groups, columns = scales.shape
    dtype = result_dtype(x.dtype, form)
    out = jnp.zeros((x.shape[0], columns), jnp.promote_types(x.dtype, jnp.float32))
    whole = tuples(packed, form)
    for lane, part in enumerate(split_lanes(x.astype(dtype), form.lanes)):
        values = lane_values(whole, lane, form).reshape(groups, -1, columns)
        matrix = (values * scale_values(scales)[:, None].astype(out.dtype)).reshape(-1, columns).astype(dtype)
        out += jnp.matmul(part, matrix, precision=precision(form), preferred_element_type=out.dtype)
    return out.astype(dtype)
