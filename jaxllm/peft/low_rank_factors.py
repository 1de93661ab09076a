"""LoRA: a weight plus a scaled product of two low-rank factors, ``W + s A B`` (arXiv:2106.09685).

``LowRank`` holds the factors of one ``Linear``, and ``LoraWeight`` is the weight of a ``Linear`` that adds them to a
base of any kind. Activations go through the base and through the factors; the product ``A B`` is not formed.

Legend: B batch, S sequence, r rank, E experts, M token rows, D inputs and F outputs of an expert's matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.linear import dense, gather, matmul_by_expert, project
from jaxllm.models.operand_specs import without_reduced
from jaxllm.models.packed_weight import axes_of_arrays, is_packed
from jaxllm.models.params import gathered
from pallas_kernels.grouped_matmul import grouped_matmul
from sharding import LogicalAxes


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class LowRank:
    """Low-rank factors of one ``Linear``, whose product ``scale * a @ b`` adds to its weight.

    Attributes:
        a: ``[*lead, *in, r]``, with the leading dimensions (layers) and the inputs of the weight that they adapt.
        b: ``[*lead, r, *out]``.
        scale: factor on the product: a number, or an array ``[*lead]`` with one for each layer. A stack of layers with
            several ranks has the largest one, and zeros in the further columns of the others.
    """

    a: Any
    b: Any
    scale: Any

    @property
    def rank(self) -> int:
        """Rank of the factors; the largest one of a stack of layers."""
        return self.a.shape[-1]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], float | None]:
        """Children by name: the factors, and the scale if it is an array."""
        key = jax.tree_util.GetAttrKey
        factors = [(key("a"), self.a), (key("b"), self.b)]
        if isinstance(self.scale, (int, float)):
            return factors, float(self.scale)
        return [*factors, (key("scale"), self.scale)], None

    @classmethod
    def tree_unflatten(cls, scale: float | None, children: Any) -> LowRank:
        """Inverse of ``tree_flatten_with_keys``."""
        a, b, *own = children
        return cls(a, b, own[0] if own else scale)

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> LowRank:
        """The factors for use: in compute dtype and all-gathered over their storage axes.

        Args:
            axes: logical axes of the weight that they adapt, without layers.
        """
        lead = self.a.ndim + self.b.ndim - 2 - len(axes)
        of_a, of_b = factor_axes(axes, self.a.ndim - 1, lead)
        a, b = (gathered(x, dtype, own, unreduced_grad) for x, own in ((self.a, of_a), (self.b, of_b)))
        return replace(self, a=a, b=b)

    def project(self, x: Float[Array, "B S *in"], out: LogicalAxes) -> Float[Array, "B S *out"]:
        """Activations through both factors, scaled."""
        # The gradient of x is that of one device here, not partial sums over the devices that split the outputs.
        inner = sharding.project(without_reduced(x), self.a, (*out[:2], None), contract=self.a.ndim - 1)
        return sharding.project(inner * jnp.asarray(self.scale, x.dtype), self.b, out)

    def dense(self, dtype: jnp.dtype, lead: int = 0) -> Float[Array, "*lead *in *out"]:
        """Scaled product of the factors: what they add to the weight.

        Args:
            lead: number of leading dimensions of the factors.
        """

        def product(a: Array, b: Array, scale: Array) -> Array:
            return jnp.tensordot(a, b, 1) * scale

        for _ in range(lead):
            product = jax.vmap(product)
        a, b = jnp.asarray(self.a, dtype), jnp.asarray(self.b, dtype)
        return product(a, b, jnp.broadcast_to(jnp.asarray(self.scale, dtype), a.shape[:lead]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoraWeight:
    """Weight of a ``Linear`` with a LoRA adapter; a ``jaxllm.models.linear.Weight``.

    Attributes:
        base: the weight that is adapted: an array, or a ``Weight`` of any kind.
        low_rank: factors that add to it.
    """

    base: Any
    low_rank: LowRank

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.base.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> LoraWeight:
        """The base and the factors for use, see ``jaxllm.models.linear.gather``."""
        base = gather(self.base, dtype, axes, unreduced_grad)
        return LoraWeight(base, self.low_rank.gather(dtype, axes, unreduced_grad))

    def array_axes(self, axes: LogicalAxes) -> list[LogicalAxes]:
        """Logical axes of the arrays of base and factors; ``axes`` are those of the dense weight of experts."""
        lead = self.low_rank.a.ndim + self.low_rank.b.ndim - 2 - len(axes)
        of_a, of_b = factor_axes(axes, self.low_rank.a.ndim - 1, lead)
        return [*axes_of_arrays(self.base, axes), of_a, of_b]

    def dense(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        """Merged weight: the base plus the scaled product of the factors."""
        lead = self.low_rank.a.ndim + self.low_rank.b.ndim - 2 - len(self.shape)
        return dense(self.base, dtype).astype(dtype) + self.low_rank.dense(dtype, lead)

    def project(self, x: Float[Array, "B S *in"], out: LogicalAxes, contract: int) -> Float[Array, "B S *out"]:
        """Matmul with the base, plus the activations through the factors."""

        def through(x: Array, base: Any) -> Array:
            return project(x, base, out, contract)

        # A packed base is dequantised again for the backward pass instead of saving the dense one of every layer.
        base = jax.checkpoint(through) if is_packed(self.base) else through
        return base(x, self.base) + self.low_rank.project(x, out)

    def grouped_matmul(self, rows: Float[Array, "M D"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
        """Grouped matmul with the base, plus the rows through the factors of their experts."""
        inner = grouped_matmul(rows, self.low_rank.a, sizes) * jnp.asarray(self.low_rank.scale, rows.dtype)
        return matmul_by_expert(rows, self.base, sizes) + grouped_matmul(inner, self.low_rank.b, sizes)


def factor_axes(axes: LogicalAxes, inputs: int, lead: int = 0) -> tuple[LogicalAxes, LogicalAxes]:
    """Logical axes of the factors ``a`` and ``b`` of a weight with these axes; the rank is not split.

    Args:
        inputs: number of dimensions of ``a`` before its rank, leading ones included.
        lead: number of leading dimensions in ``axes`` (layers, experts).
    """
    return (*axes[:inputs], None), (*axes[:lead], None, *axes[inputs:])


def is_lora(x: Any) -> bool:
    """Whether a node of a parameter tree is a weight with an adapter: for ``is_leaf`` of ``jax.tree`` functions."""
    return isinstance(x, LoraWeight)
