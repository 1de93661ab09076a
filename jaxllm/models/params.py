"""Parameter declarations: shape, dtype, logical axes and initialisation of a weight, once, on one line."""

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
    """Parameter initialised from a normal distribution of standard deviation ``scale / sqrt(fan_in)``."""
    return _declare(shape, axes, dtype, mean=0.0, std=scale / math.sqrt(fan_in))


def constant(value: float, shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype) -> nnx.Param:
    """Parameter initialised to a constant (a gain to 1, a bias to 0)."""
    return _declare(shape, axes, dtype, mean=value, std=0.0)


def _declare(shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype, *, mean: float, std: float) -> nnx.Param:
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), logical_axes=axes, mean=mean, std=std)


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
    return param.get_metadata()["std"] > 0


def use(param: nnx.Param, dtype: jnp.dtype) -> Array:
    """Weight as the forward pass uses it: cast to compute dtype and all-gathered over its storage axes (FSDP).

    The one visible cast. Casting first makes the all-gather move compute-dtype bytes.
    """
    axes = param.get_metadata()["logical_axes"]
    return sharding.gather_weight(param[...].astype(dtype), *axes, unreduced_grad=allows_unreduced_grad(param))


def at_least_f32(dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of numerically delicate operations: float32, or float64 where the model runs in float64."""
    return jnp.promote_types(dtype, jnp.float32)


def on_host(x: Array) -> bool:
    """Whether an array is in host memory (``pinned_host``)."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def on_device(x: Array) -> Array:
    """``x`` on the device; copied there if it is in host memory."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x
