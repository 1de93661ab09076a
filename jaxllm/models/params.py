"""Parameter declarations: shape, dtype, logical axes and initialisation of a weight, once, on one line."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray

import sharding
from sharding import LogicalAxes

P = TypeVar("P", bound=nnx.Param)


Role = Literal["matrix", "embedding", "router", "gain", "bias", "adapter", "packed", "recurrent"]
"""Role of a parameter in its layer. A matrix multiplies activations; an embedding is looked up, and may be the output
matrix; a router scores experts; a gain scales and a bias shifts a layer's values; an adapter adds to a matrix; a
packed parameter holds values or scales of a matrix in few bits; a recurrent matrix
multiplies states, token by token."""
MATMUL_ROLES: tuple[Role, ...] = ("matrix", "embedding", "router", "adapter")
"""Roles of parameters that are used in matmuls and lookups alone."""


def normal(
    shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype, *, role: Role, fan_in: int, scale: float = 1.0
) -> nnx.Param:
    """Parameter initialised from a normal distribution of standard deviation ``scale / sqrt(fan_in)``."""
    return declare(nnx.Param, shape, axes, dtype, role, std=scale / math.sqrt(fan_in))


def constant(value: float, shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype, *, role: Role) -> nnx.Param:
    """Parameter initialised to a constant (a gain to 1, a bias to 0)."""
    return declare(nnx.Param, shape, axes, dtype, role, mean=value)


def declare(
    kind: type[P],
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: jnp.dtype,
    role: Role,
    *,
    mean: float = 0.0,
    std: float = 0.0,
    **metadata: Any,
) -> P:
    """Parameter of a kind of ``nnx.Param`` with this shape, logical axes, role and initial distribution."""
    abstract = jax.ShapeDtypeStruct(shape, dtype)
    return kind(abstract, logical_axes=axes, role=role, mean=mean, std=std, **metadata)


def draw(
    param: nnx.Variable, key: PRNGKeyArray, stack: tuple[int, ...], out: NamedSharding | None
) -> Float[Array, "..."]:
    """Initial value of a declared weight, with ``stack`` leading dimensions, created with the sharding ``out``."""
    meta, abstract = param.get_metadata(), param.get_value()
    here = None if out is None else NamedSharding(out.mesh, out.spec)
    value = _draw(key, (*stack, *abstract.shape), abstract.dtype, meta["mean"], meta["std"], here)
    return value if out is None or out.memory_kind == value.sharding.memory_kind else jax.device_put(value, out)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _draw(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, mean: float, std: float, out: NamedSharding | None
) -> Float[Array, "..."]:
    # One small program per shape, shared by all weights of that shape: compiling the initialisation as one program
    # takes far longer than running it. Values do not depend on the sharding (JAX's default RNG is partitionable).
    if std == 0.0:
        value = jnp.full(shape, mean, dtype)
        return value if out is None else jax.sharding.reshard(value, out)
    # Without the barrier XLA would, depending on the sharding, fold the scale into constants of the RNG.
    unit = jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype, out_sharding=out))
    return mean + std * unit


def allows_unreduced_grad(param: nnx.Variable) -> bool:
    """Whether a parameter is used in matmuls and lookups alone: its gradient can stay partial sums over devices."""
    return role_of(param) in MATMUL_ROLES


def role_of(param: nnx.Variable) -> Role:
    """Role that a parameter was declared with."""
    return param.get_metadata()["role"]


def use(param: nnx.Param, dtype: jnp.dtype) -> Array:
    """Parameter as the forward pass uses it: cast to compute dtype and all-gathered over its storage axes (FSDP)."""
    return gathered(param[...], dtype, param.get_metadata()["logical_axes"], allows_unreduced_grad(param))


def gathered(value: Array, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> Array:
    """Array cast to compute dtype and all-gathered over its storage axes, see ``sharding.gather_weight``.

    The one visible cast. Casting first makes the all-gather move compute-dtype bytes.
    """
    return sharding.gather_weight(value.astype(dtype), *axes, unreduced_grad=unreduced_grad)


def at_least_f32(dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of numerically delicate operations: float32, or float64 where the model runs in float64."""
    return jnp.promote_types(dtype, jnp.float32)


def on_host(x: Array) -> bool:
    """Whether an array is in host memory (``pinned_host``)."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def on_device(x: Array) -> Array:
    """``x`` on the device; copied there if it is in host memory."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x
