"""Declaring weights: shape, dtype, logical axes and initialisation, once, on one line."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray

import sharding
from sharding import LogicalAxes


def normal(
    shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype, *, fan_in: int, scale: float = 1.0
) -> nnx.Param:
    """A weight drawn from a normal distribution of standard deviation ``scale / sqrt(fan_in)``."""
    return _declare(shape, axes, dtype, mean=0.0, std=scale / math.sqrt(fan_in))


def constant(value: float, shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype) -> nnx.Param:
    """A weight that starts at one value (a gain at 1, a bias at 0)."""
    return _declare(shape, axes, dtype, mean=value, std=0.0)


def _declare(shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype, *, mean: float, std: float) -> nnx.Param:
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), logical_axes=axes, mean=mean, std=std)


def draw(
    param: nnx.Variable, key: PRNGKeyArray, stack: tuple[int, ...], out: NamedSharding | None
) -> Float[Array, "..."]:
    """The initial value of a declared weight, with ``stack`` leading dimensions, born in the sharding ``out``."""
    meta, abstract = param.get_metadata(), param.get_value()
    here = None if out is None else NamedSharding(out.mesh, out.spec)
    value = _draw(key, (*stack, *abstract.shape), abstract.dtype, meta["mean"], meta["std"], here)
    return value if out is None or out.memory_kind == value.sharding.memory_kind else jax.device_put(value, out)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _draw(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, mean: float, std: float, out: NamedSharding | None
) -> Float[Array, "..."]:
    # One small program per shape, shared by all weights of that shape: compiling all draws as one program takes far
    # longer than drawing. The values do not depend on the sharding (jax's default generator is partitionable).
    if std == 0.0:
        value = jnp.full(shape, mean, dtype)
        return value if out is None else jax.sharding.reshard(value, out)
    # Behind the barrier, the scale cannot be folded into the draw's own constants, which XLA does or not, by sharding.
    unit = jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype, out_sharding=out))
    return mean + std * unit


def allows_unreduced_grad(param: nnx.Variable) -> bool:
    """Whether a weight is used by products and lookups alone, whose gradients can be left unsummed over devices."""
    return param.get_metadata()["std"] > 0


def use(param: nnx.Param, dtype: jnp.dtype) -> Array:
    """The weight as the forward pass uses it: in compute dtype, whole over the axes it is only stored split over.

    The one visible cast. Casting first means that the gather moves compute-dtype bytes.
    """
    axes = param.get_metadata()["logical_axes"]
    return sharding.gather_weight(param[...].astype(dtype), *axes, unreduced_grad=allows_unreduced_grad(param))


def at_least_f32(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of a numerically delicate region: float32, or float64 where the model runs in float64."""
    return jnp.promote_types(dtype, jnp.float32)


def on_host(x: Array) -> bool:
    """Whether an array is in the host's memory (``pinned_host``)."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def on_device(x: Array) -> Array:
    """``x``, brought to the device from the host's memory if it is there."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x
