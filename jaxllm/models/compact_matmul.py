"""Compressed-activation matmul: the backward pass keeps a random projection of the input (CompAct, arXiv:2410.15352).

The backward pass of ``y = x w`` needs x for the gradient of w alone. Instead of x, ``z = x P`` is saved: r elements
instead of C, with P of independent normal values of variance 1 / r. ``P P^T`` is the identity in expectation, so the
gradient from ``z P^T`` is an unbiased estimate of that from x. P is regenerated from its seed, which changes
with every batch. The gradient of x is exact.

``CompactWeight`` (``remat = "compact:SHARE"``) is for any optimizer: its gradient has the weight's shape. In the paper
the gradient stays projected, ``z^T dy = P^T dw``, into the optimizer, whose state has r rows instead of C, and P is
redrawn every few steps: ``ProjectedWeight``, with ``optim.kind = "compact"`` (``jaxllm.optim.compact``).

Legend: T token dimensions, C contracted dimensions, O output dimensions, r elements kept per token.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

import sharding
from jaxllm.models.operand_specs import gradient_spec, spec_of, without_reduced
from jaxllm.models.params import at_least_f32, gathered
from sharding import LogicalAxes


def projection_width(share: float, inner: int) -> int:
    """Elements kept per token (r) of ``inner`` elements of the input."""
    return max(1, round(share * inner))


@dataclass(frozen=True)
class CompactWeight:
    """Weight whose matmuls save a random projection of their input; a ``jaxllm.models.linear.Weight``.

    Inputs of the same width share a projection.

    Attributes:
        weight: the dense weight.
        share: fraction of the input's elements that are kept.
        key: RNG key of the block in this batch.
    """

    weight: Array
    share: float
    key: PRNGKeyArray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.weight.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> CompactWeight:
        """The weight in compute dtype, all-gathered over its storage axes."""
        return replace(self, weight=gathered(self.weight, dtype, axes, unreduced_grad))

    def dense(self, dtype: jnp.dtype) -> Array:
        """The weight itself."""
        return self.weight

    def project(self, x: Array, out: LogicalAxes, contract: int) -> Array:
        """Matmul whose gradient of the weight is an estimate, see ``compact_matmul``."""

        def multiply(x: Array, w: Array, contract: int, there: PartitionSpec | None) -> Array:
            key = jax.random.key_data(jax.random.fold_in(self.key, math.prod(w.shape[:contract])))
            return compact_matmul(self.share, contract, spec_of(x), there, x, w, key)

        return sharding.project(x, self.weight, out, contract=contract, multiply=multiply)

    def grouped_matmul(self, rows: Array, sizes: Array) -> Array:
        """Refuses: grouped matmuls of experts have no compact form."""
        raise NotImplementedError(f'remat = "compact:{self.share}" has no matmul of experts; choose "none".')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def compact_matmul(
    share: float,
    contract: int,
    here: PartitionSpec | None,
    there: PartitionSpec | None,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    key: UInt32[Array, " K"],
) -> Float[Array, "..."]:
    """Matmul ``x[*T, *C] @ w[*C, *O]``; the result and the gradient of x are exact, that of w is an unbiased estimate.

    Args:
        share: fraction of x's elements that are kept.
        contract: number of trailing dimensions of x that are contracted with as many leading ones of w.
        here: partition spec of x; None outside a mesh.
        there: ``out_sharding`` of the result, as ``jax.lax.dot_general`` takes it.
        key: data of the projection's RNG key.
    """
    return _forward(share, contract, here, there, x, w, key)[0]


Spec = PartitionSpec | None


def _forward(share: float, contract: int, here: Spec, there: Spec, x: Array, w: Array, key: Array) -> tuple[Array, Any]:
    tokens = x.ndim - contract
    sums = tuple(range(tokens, x.ndim)), tuple(range(contract))
    y = jax.lax.dot_general(x, w, (sums, ((), ())), out_sharding=there)
    p = _projection(share, x.shape[tokens:], None if here is None else here.partitions[tokens:], key, x.dtype)
    of_z = None if here is None else jax.P(*here.partitions[:tokens], None)
    return y, (jax.lax.dot_general(without_reduced(x), p, (sums, ((), ())), out_sharding=of_z), w, key)


def _backward(share: float, contract: int, here: Spec, there: Spec, kept: Any, dy: Array) -> tuple[Any, ...]:
    z, w, key = kept
    last = z.ndim - 1
    tokens, outs = tuple(range(last)), tuple(range(last, dy.ndim))
    p = _projection(share, w.shape[:contract], None if here is None else here.partitions[last:], key, z.dtype)
    whole = None if here is None else jax.P(*here.partitions)
    x = jax.lax.dot_general(z, p, (((last,), (contract,)), ((), ())), out_sharding=whole)
    of_w, w_outs = spec_of(w), tuple(range(contract, w.ndim))
    dx = jax.lax.dot_general(dy, without_reduced(w), ((outs, w_outs), ((), ())), out_sharding=gradient_spec(here))
    dw = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), out_sharding=gradient_spec(of_w))
    return dx.astype(z.dtype), dw.astype(w.dtype), None


def _projection(
    share: float, inner: tuple[int, ...], within: Any, key: Array, dtype: jnp.dtype
) -> Float[Array, "*C r"]:
    """Projection matrix P; its values do not depend on its sharding."""
    kept = projection_width(share, math.prod(inner))
    place = {} if within is None else {"out_sharding": jax.P(*within, None)}
    drawn = jax.random.normal(jax.random.wrap_key_data(key), (*inner, kept), dtype, **place)
    return drawn / math.sqrt(kept)


compact_matmul.defvjp(_forward, _backward)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "projected", "key"], meta_fields=["contract"]
)
@dataclass(frozen=True)
class ProjectedWeight:
    """Weight whose gradient is that of ``projected``: ``P^T dw`` of r rows; a ``jaxllm.models.linear.Weight``.

    Attributes:
        weight: the dense weight ``[*C, *O]``, which has no gradient.
        projected: zeros of the projected gradient's shape, ``[r, 1, .., *O]`` with as many dimensions as the weight.
        key: data of the projection's RNG key, see ``projection_keys``.
        contract: number of dimensions in ``*C``.
    """

    weight: Any
    projected: Any
    key: Any
    contract: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.weight.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> ProjectedWeight:
        """The weight in compute dtype, all-gathered over its storage axes."""
        outs = (*(None,) * self.contract, *axes[self.contract :])
        projected = gathered(self.projected, dtype, outs, unreduced_grad)
        return replace(self, weight=gathered(self.weight, dtype, axes, unreduced_grad), projected=projected)

    def dense(self, dtype: jnp.dtype) -> Array:
        """Refuses: parts of the weight would have no gradient."""
        raise NotImplementedError('optim.kind = "compact" projects matmuls with whole weights only; choose "adamw".')

    def project(self, x: Array, out: LogicalAxes, contract: int) -> Array:
        """Matmul whose gradient of ``projected`` is that of the weight, projected; see ``projected_matmul``."""
        squeezed = jnp.squeeze(self.projected, tuple(range(1, contract)))

        def multiply(x: Array, w: Array, contract: int, there: PartitionSpec | None) -> Array:
            b = squeezed.reshape(-1, *w.shape[contract:]) if w.ndim != self.weight.ndim else squeezed
            return projected_matmul(contract, spec_of(x), there, x, w, b, self.key)

        return sharding.project(x, self.weight, out, contract=contract, multiply=multiply)

    def grouped_matmul(self, rows: Array, sizes: Array) -> Array:
        """Refuses: the matrices of experts are not projected."""
        raise NotImplementedError('optim.kind = "compact" has no grouped matmul of experts; choose "adamw".')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def projected_matmul(
    contract: int,
    here: PartitionSpec | None,
    there: PartitionSpec | None,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    b: Float[Array, "r *O"],
    key: UInt32[Array, " K"],
) -> Float[Array, "..."]:
    """Matmul ``x[*T, *C] @ w[*C, *O]``; the gradient of x is exact, that of b is ``(x P)^T dy``, that of w is none.

    Args:
        contract, here, there: as for ``compact_matmul``.
        b: of the projected gradient's shape; its values do not matter.
        key: data of the projection's RNG key.
    """
    return _projected_forward(contract, here, there, x, w, b, key)[0]


def _projected_forward(
    contract: int, here: Spec, there: Spec, x: Array, w: Array, b: Array, key: Array
) -> tuple[Array, Any]:
    tokens = x.ndim - contract
    sums = tuple(range(tokens, x.ndim)), tuple(range(contract))
    y = jax.lax.dot_general(x, w, (sums, ((), ())), out_sharding=there)
    within = None if here is None else here.partitions[tokens:]
    p = projection_matrix(x.shape[tokens:], b.shape[0], key, x.dtype, within)
    of_z = None if here is None else jax.P(*here.partitions[:tokens], None)
    return y, (jax.lax.dot_general(without_reduced(x), p, (sums, ((), ())), out_sharding=of_z), w, b)


def _projected_backward(contract: int, here: Spec, there: Spec, kept: Any, dy: Array) -> tuple[Any, ...]:
    z, w, b = kept
    last = z.ndim - 1
    tokens, outs = tuple(range(last)), tuple(range(last, dy.ndim))
    w_outs = tuple(range(contract, w.ndim))
    dx = jax.lax.dot_general(dy, without_reduced(w), ((outs, w_outs), ((), ())), out_sharding=gradient_spec(here))
    db = jax.lax.dot_general(z, dy, ((tokens, tokens), ((), ())), out_sharding=gradient_spec(spec_of(b)))
    return dx.astype(z.dtype), None, db.astype(b.dtype), None


projected_matmul.defvjp(_projected_forward, _projected_backward)


def projection_keys(number: Int[Array, ""], inner: int, layers: int) -> UInt32[Array, "L K"]:
    """Data of the RNG keys of projections, one for each layer of a stack.

    Args:
        number: of the projection; another one has other keys.
        inner: width of the inputs; inputs of the same width share a projection.
        layers: number of layers.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), inner), number)
    return jax.vmap(lambda layer: jax.random.key_data(jax.random.fold_in(key, layer)))(jnp.arange(layers))


def projection_matrix(
    inner: tuple[int, ...], kept: int, key: UInt32[Array, " K"], dtype: jnp.dtype, within: Any = None
) -> Float[Array, "*C r"]:
    """Projection matrix P of independent normal values of variance 1 / r, drawn in float32 whatever its dtype.

    The values do not depend on its sharding.

    Args:
        inner: sizes of the inputs' dimensions.
        kept: r.
        key: data of its RNG key.
        dtype: of the result.
        within: mesh axes of the inputs' dimensions; None outside a mesh.
    """
    place = {} if within is None else {"out_sharding": jax.P(*within, None)}
    drawn = jax.random.normal(jax.random.wrap_key_data(key), (*inner, kept), jnp.float32, **place)
    return (drawn.astype(at_least_f32(dtype)) / math.sqrt(kept)).astype(dtype)
