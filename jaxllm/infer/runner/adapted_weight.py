"""Adapted weight: a weight whose rows may each use another adapter, for serving many LoRA adapters over one base.

It takes the place of the weight of a ``Linear``: the base, the pages of low-rank factors of all adapters on the device,
and which row uses which. Layers do not know of it.

On a mesh the factors are split as the base is: the left ones along its inputs, the right ones along its outputs. Where
the inputs are split (row-parallel matmuls), partial sums of base and adapters are added before the one all-reduce that
the base needs, so adapters add no collective; S-LoRA (arXiv:2311.03285, section 6) all-reduces the products with the
left factors instead.

Legend: B replicas, T rows of a replica's flat batch, P pages, R ranks of a page, L layers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.linear import dense, gather, multiply_heads
from pallas_kernels.grouped_lora import AdapterTiles, grouped_lora, schedule_tiles
from sharding import LogicalAxes


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b", "rows"], meta_fields=[])
@dataclass(frozen=True)
class AdaptedWeight:
    """Weight with the adapters of a batch's rows; a ``jaxllm.models.linear.Weight``.

    Attributes:
        base: weight of any kind, in which all adapters' bases agree.
        a: left factors, ``[*layers, P, R, *in]``.
        b: right factors, ``[*layers, P, R, *out]``.
        rows: adapter of each row, arrays ``[*layers, B, ...]``; None: no row has one.
    """

    base: Any
    a: Any
    b: Any
    rows: AdapterTiles | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the base."""
        return self.base.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> AdaptedWeight:
        """The base for use; the factors are as they are used."""
        return replace(self, base=gather(self.base, dtype, axes, unreduced_grad))

    def dense(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        """There is no one dense weight for all rows.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("rows of several adapters have no weight in common; project them.")

    def project(self, x: Float[Array, "B T *in"], out: LogicalAxes, contract: int) -> Float[Array, "B T *out"]:
        """Matmul with the base, plus each row through the factors of its adapter."""
        multiply = None if self.rows is None else self._multiply
        return sharding.project(x, dense(self.base, x.dtype), out, contract=contract, multiply=multiply)

    def multiply_heads(
        self, x: Float[Array, "B T N K"], columns: slice, out: LogicalAxes, *, transposed: bool
    ) -> Float[Array, "B T N M"]:
        """Matmul of each head's activations with its part of the base ``[C, N, H]``, plus those of the factors.

        See ``jaxllm.models.linear.multiply_heads``; transposed, the right factors come first.
        """
        y = multiply_heads(x, dense(self.base, x.dtype), columns, out, transposed=transposed)
        if self.rows is None:
            return y

        def local(x: Array, a: Array, b: Array, *rows: Array) -> Array:
            tiles = AdapterTiles(*(array[0] for array in rows))

            def one(x: Array, b: Array) -> Array:
                return grouped_lora(x, *((b, a) if transposed else (a, b)), tiles)

            heads = x.reshape(-1, *x.shape[2:]), b[..., columns]
            more = jax.vmap(one, (1, 2), 1)(*heads)
            return more.reshape(*x.shape[:-1], more.shape[-1])

        there = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(y).sharding.spec
        return y + sharding.by_shard(local, x, self.a, self.b, *self.rows, out=there)

    def grouped_matmul(self, rows: Float[Array, "M D"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
        """Experts have no adapters while serving.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the matrices of experts have no adapters while serving.")

    def _multiply(self, x: Array, w: Array, contract: int, there: PartitionSpec | None) -> Array:
        """Matmul with a dense base, a ``sharding.MatmulFn``."""
        assert self.rows is not None
        if there is None:
            return x @ w + _through_factors(x, self.a, self.b, *(array[0] for array in self.rows))
        summed = sharding.summed_axes(w, contract)
        # Partial sums, if the inputs are split: reduced once, with the adapters' added.
        parts = jax.P(*there, unreduced=summed | there.unreduced)
        dims = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
        y = jax.lax.dot_general(x, w, (dims, ((), ())), out_sharding=parts)

        def local(x: Array, a: Array, b: Array, *rows: Array) -> Array:
            flat = x.reshape(math.prod(x.shape[: x.ndim - contract]), -1)
            more = _through_factors(flat, a, b, *(array[0] for array in rows))
            return more.reshape(*x.shape[: x.ndim - contract], *b.shape[2:])

        y = y + sharding.by_shard(local, x, self.a, self.b, *self.rows, out=parts)
        return jax.sharding.reshard(y, there)


def _through_factors(x: Float[Array, "M K"], a: Array, b: Array, *rows: Array) -> Float[Array, "M N"]:
    left, right = (factor.reshape(*factor.shape[:2], -1) for factor in (a, b))
    return grouped_lora(x, left, right, AdapterTiles(*rows))


def with_rows(params: Any, slots: Int[Array, "B T"], tables: Int[Array, "B S J"], scales: Float[Array, "B S"]) -> Any:
    """Parameters whose adapted weights know the adapter of each row of a step.

    Args:
        params: tree with ``AdaptedWeight``s; layers stacked, or apart.
        slots: slot of each row's adapter; -1 for none.
        tables, scales: see ``pallas_kernels.grouped_lora.schedule_tiles``; equal in all replicas.
    """

    def local(slots: Array, tables: Array, scales: Array) -> tuple[Array, ...]:
        return tuple(array[None] for array in schedule_tiles(slots[0], tables[0], scales[0]))

    tokens = ("batch", "seq")
    given, made = (tokens, ("batch", None, None), ("batch", None)), (
        tokens, ("batch", None, None), ("batch", None), tokens, tokens,
    )  # fmt: skip
    # check=False: the slots of one replica's shards vary, and its tables do not.
    rows = AdapterTiles(*sharding.shard_map(local, given, made, check=False)(slots, tables, scales))

    def fill(weight: Any) -> Any:
        if not isinstance(weight, AdaptedWeight):
            return weight
        layers = weight.a.shape[: weight.a.ndim + weight.b.ndim - len(weight.shape) - 4]
        return replace(weight, rows=AdapterTiles(*(_repeated(array, layers) for array in rows)))

    return jax.tree.map(fill, params, is_leaf=lambda x: isinstance(x, AdaptedWeight))


def _repeated(x: Array, layers: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(x, (*layers, *x.shape)) if layers else x
