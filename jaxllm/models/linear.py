"""Linear: a weight that activations are multiplied with. Every matmul with a weight goes through it.

A ``Linear`` is declared once, with a role, a name, logical axes and an initialisation. Its value is an array (a dense
weight), or any other ``Weight``: multiplied in low precision, packed in few bits, with an adapter. Layers do not know
which: they call the ``Linear`` with activations and the logical axes of the result.

Legend: B batch, S sequence, D embed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.params import Role, allows_unreduced_grad, declare, gathered, use
from pallas_kernels.grouped_matmul import grouped_matmul
from sharding import LogicalAxes


@runtime_checkable
class Weight(Protocol):
    """Value of a ``Linear`` that is not a plain array.

    One that is stored in a parameter tree is a pytree of arrays, with the same leading dimensions (layers, experts) as
    the array that it takes the place of, so that a scan over layers slices it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        ...

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> Weight:
        """The weight for use: in compute dtype where it is not packed, all-gathered over its storage axes (FSDP)."""
        ...

    def dense(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        """The dense weight that it stands for."""
        ...

    def project(self, x: Float[Array, "B S *in"], out: LogicalAxes, contract: int) -> Float[Array, "B S *out"]:
        """Matmul of activations and the weight, see ``sharding.project``."""
        ...

    def grouped_matmul(self, rows: Float[Array, "M D"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
        """Grouped matmul with the matrices of experts, see ``pallas_kernels.grouped_matmul``."""
        ...


@runtime_checkable
class VocabularyWeight(Protocol):
    """Value of a token embedding or an output matrix [V, D] that is not a plain array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense matrix."""
        ...

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> VocabularyWeight:
        """The matrix for use: all-gathered over its storage axes (FSDP)."""
        ...

    def dense(self, dtype: jnp.dtype) -> Float[Array, "V D"]:
        """The dense matrix that it stands for."""
        ...

    def lookup(self, ids: Int[Array, "B S"], dtype: jnp.dtype, out: LogicalAxes) -> Float[Array, "B S D"]:
        """Rows of tokens in compute dtype, with these logical axes."""
        ...

    def logits(self, x: Float[Array, "B S D"], out: LogicalAxes) -> Float[Array, "B S V"]:
        """Matmul of hidden states and every row."""
        ...


@runtime_checkable
class HeadwiseWeight(Protocol):
    """Weight without a dense array, whose heads can be multiplied by themselves."""

    def multiply_heads(
        self, x: Float[Array, "B S N K"], columns: slice, out: LogicalAxes, *, transposed: bool
    ) -> Float[Array, "B S N M"]:
        """Matmul of each head's activations, see ``multiply_heads``."""
        ...


Wrap = Callable[["Array | Weight"], Weight]
"""Replaces the weights of a group of blocks while it is traced, such as by ones that save less for backward."""


class Linear(nnx.Param):
    """Weight of a matmul. Its call multiplies activations ``x[B, S, *in]`` with it to ``[B, S, *out]``."""

    def __call__(
        self, x: Float[Array, "B S *in"], out: LogicalAxes, bias: nnx.Param | None = None
    ) -> Float[Array, "B S *out"]:
        """Matmul of activations and the weight in the dtype of the activations.

        Args:
            out: logical axes of the result.
            bias: added to the result.
        """
        meta = self.get_metadata()
        with jax.named_scope(meta["name"]):
            y = project(x, self.gathered(x.dtype), out, meta["contract"])
            return y if bias is None else y + use(bias, x.dtype)

    def gathered(self, dtype: jnp.dtype) -> Array | Weight:
        """The weight for use: in compute dtype and all-gathered over its storage axes (FSDP)."""
        return used(self, dtype)

    def dense(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        """The dense weight in compute dtype, all-gathered: for layers that multiply with parts of it."""
        return dense(self.gathered(dtype), dtype)


def linear(
    name: str,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: jnp.dtype,
    *,
    contract: int = 1,
    scale: float = 1.0,
    role: Role = "matrix",
    fan_in: int | None = None,
) -> Linear:
    """Declares a ``Linear``, initialised from a normal distribution of standard deviation ``scale / sqrt(fan in)``.

    Args:
        name: of its matmul in profiles (``jax.named_scope``).
        shape: ``[*in, *out]``; that of experts has their number first, that of an output matrix is ``[*out, *in]``.
        axes: logical axes of the dimensions.
        dtype: of the stored parameter.
        contract: number of dimensions in ``*in``.
        scale: factor on the standard deviation.
        role: role of the parameter.
        fan_in: number of inputs; None for the size of the first ``contract`` dimensions.
    """
    std = scale / math.sqrt(fan_in or math.prod(shape[:contract]))
    return declare(Linear, shape, axes, dtype, role, std=std, name=name, contract=contract)


def used(param: nnx.Param, dtype: jnp.dtype) -> Any:
    """Parameter of any kind as the forward pass uses it, see ``gather``."""
    return gather(param.get_value(), dtype, param.get_metadata()["logical_axes"], allows_unreduced_grad(param))


def lookup(table: nnx.Param, ids: Int[Array, "B S"], dtype: jnp.dtype, out: LogicalAxes) -> Float[Array, "B S D"]:
    """Embeddings of tokens in compute dtype, with these logical axes; the table may be of any kind."""
    weight = used(table, dtype)
    return sharding.take(weight, ids, out=out) if isinstance(weight, jax.Array) else weight.lookup(ids, dtype, out)


def vocabulary_logits(
    x: Float[Array, "B S D"], weight: Array | VocabularyWeight, out: LogicalAxes
) -> Float[Array, "B S V"]:
    """Matmul of hidden states and every row of a gathered output matrix of any kind."""
    if isinstance(weight, jax.Array):
        if sharding.axis_size("act_embed") > 1:
            x = sharding.whole_rows(x, over="act_vocab")
            weight = sharding.constrain(weight, "act_vocab", None)
        return sharding.multiply_rows(lambda x: sharding.einsum("bsd,vd->bsv", x, weight, out=out), x, 2)
    return weight.logits(x, out)


def gather(weight: Array | Weight | VocabularyWeight, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> Any:
    """Weight of any kind for use: cast to compute dtype and all-gathered over its storage axes (FSDP)."""
    if isinstance(weight, jax.Array):
        return gathered(weight, dtype, axes, unreduced_grad)
    return weight.gather(dtype, axes, unreduced_grad)


def project(x: Float[Array, "B S *in"], weight: Array | Weight, out: LogicalAxes, contract: int = 1) -> Array:
    """Matmul of activations and a gathered weight of any kind, see ``sharding.project``."""
    if isinstance(weight, jax.Array):
        return sharding.project(x, weight, out, contract=contract)
    return weight.project(x, out, contract)


def project_many(
    x: Float[Array, "B S D"], linears: Sequence[Linear], outs: Sequence[LogicalAxes], *, over: str
) -> list[Array]:
    """Matmuls of the residual stream with several column-parallel weights, see ``sharding.project_many``.

    Args:
        outs: logical axes of each result.
        over: logical axis of the results that is split over devices (tensor parallelism).
    """
    names = [one.get_metadata()["name"] for one in linears]
    weights = [one.gathered(x.dtype) for one in linears]
    arrays = [weight for weight in weights if isinstance(weight, jax.Array)]
    if len(arrays) == len(weights):
        return sharding.project_many(x, arrays, outs, over=over, scopes=names)
    if sharding.ring_axis(over) is not None:
        raise sharding.ShardingError(
            f"{', '.join(names)}: collective matmuls multiply dense weights only, not {type(weights[0]).__name__}; "
            "leave the rings out of the sharding rules (parallel.collective_matmul)."
        )
    x = sharding.fan_out(x, "batch", "seq", "act_embed", over=over)
    found = []
    for name, weight, out in zip(names, weights, outs, strict=True):
        with jax.named_scope(name):
            found.append(project(x, weight, out))
    return found


def linear_paths(module: nnx.Module, *, experts: bool = False) -> tuple[tuple[str, ...], ...]:
    """Paths of the ``Linear``s of a module that multiply activations by themselves, in the order of declaration.

    Args:
        experts: with the matrices of experts, which are multiplied in groups.
    """
    found: list[tuple[str, ...]] = []
    for name, value in vars(module).items():
        if isinstance(value, Linear) and (experts or "experts" not in value.get_metadata()["logical_axes"]):
            found.append((name,))
        elif isinstance(value, nnx.Module):
            found += [(name, *path) for path in linear_paths(value, experts=experts)]
    return tuple(found)


def map_weights(params: dict[str, Any], paths: Sequence[tuple[str, ...]], fn: Callable[..., Any]) -> dict[str, Any]:
    """Parameter tree with ``fn(weight, index)`` in place of the weights at these paths."""
    out = dict(params)
    for i, path in enumerate(paths):
        node = out
        for key in path[:-1]:
            node[key] = dict(node[key])
            node = node[key]
        node[path[-1]] = fn(node[path[-1]], i)
    return out


def dense(weight: Array | Weight, dtype: jnp.dtype) -> Float[Array, "..."]:
    """Dense array of a gathered weight of any kind."""
    return weight if isinstance(weight, jax.Array) else weight.dense(dtype)


def multiply_heads(
    x: Float[Array, "B S N K"], weight: Array | Weight, columns: slice, out: LogicalAxes, *, transposed: bool = False
) -> Float[Array, "B S N M"]:
    """Matmul of each head's activations with that head's part of a gathered weight of any kind.

    Args:
        x: activations, of which each head has its own.
        weight: ``[C, N, H]``.
        columns: which of H are used.
        out: logical axes of the result.
        transposed: from H to C instead of from C to H.
    """
    if isinstance(weight, HeadwiseWeight):
        return weight.multiply_heads(x, columns, out, transposed=transposed)
    part = dense(weight, x.dtype)[..., columns]
    return sharding.einsum("bsnh,cnh->bsnc" if transposed else "bsnc,cnh->bsnh", x, part, out=out)


def matmul_by_expert(rows: Float[Array, "M D"], weight: Array | Weight, sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
    """Grouped matmul of rows that are sorted by expert with a gathered weight of any kind."""
    return grouped_matmul(rows, weight, sizes) if isinstance(weight, jax.Array) else weight.grouped_matmul(rows, sizes)
