"""Reference packed matmul: dequantises the matrix; defines the operation.

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
    tuples,
)
from pallas_kernels.packed_matmul.scales import Scales, scale_values


def dequantised(packed: PackedBytes, scales: Scales, form: PackedCodes) -> Float[Array, "K N"]:
    """The matrix: values times scales, in at least float32."""
    packed, scales = by_column(packed, scales, form)
    whole = tuples(packed, form)
    lanes = jnp.stack([lane_values(whole, lane, form) for lane in range(form.lanes)], axis=1)
    wide = scale_values(scales)
    values = lanes.reshape(-1, packed.shape[1]).astype(wide.dtype)
    return values * jnp.repeat(wide, values.shape[0] // wide.shape[0], axis=0)


def packed_matmul_reference(
    x: Float[Array, "M K"], packed: PackedBytes, scales: Scales, form: PackedCodes
) -> Float[Array, "M _"]:
    """Reference packed matmul; see ``packed_matmul``."""
    dtype = result_dtype(x.dtype, form)
    matrix = dequantised(packed, scales, form).astype(dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x.astype(dtype), matrix, precision=precision(form), preferred_element_type=wide).astype(dtype)
