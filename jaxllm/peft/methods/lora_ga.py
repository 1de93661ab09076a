"""LoRA-GA: factors from the singular vectors of the first gradient (arXiv:2407.05000).

The gradient is that of the first batch, or the sum over several (``gradient_batches``), where a batch has few rows.
With the gradient ``G = U S V^T`` of a weight ``[in, out]``, ``a`` starts as the first r columns of U and ``b`` as the
rows r to 2r of ``V^T``, both times ``out^(1/4) / sqrt(gamma)``; the scale is alpha / sqrt(r). The first update of the
product then is along the gradient's best approximation of rank 2r. The initial product is subtracted from the frozen
weight, here as a second pair of factors that is not trained: the base stays as it was, and may be shared.

Legend: B batch, S sequence, L layers, D inputs and F outputs of a matmul.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import ConfigError
from jaxllm.models.functional import DeclaredParam, LinearShape
from jaxllm.models.linear import gather
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod, declare_factors
from jaxllm.peft.low_rank_factors import LoraWeight, LowRank
from sharding import LogicalAxes

GAMMA = 16
"""Stability of the initial factors (section 3.3 of the paper); larger ones are smaller."""
ITERATIONS = 4
"""Iterations for the leading singular vectors, as in the paper's code."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoraGaWeight:
    """Weight of a ``Linear`` with a LoRA-GA adapter; a ``jaxllm.models.linear.Weight``.

    Attributes:
        base: the weight that is adapted: an array, or a ``Weight`` of any kind.
        low_rank: factors that add to it.
        initial: their values before training, whose product is subtracted.
    """

    base: Any
    low_rank: LowRank
    initial: LowRank

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.base.shape

    @property
    def factors(self) -> LowRank:
        """Factors of twice the rank whose product is that of the trained ones less that of the initial ones."""
        one, other = self.low_rank, self.initial
        outputs = len(self.shape) - (one.a.ndim - 1)
        rank = one.b.ndim - 1 - outputs
        return LowRank(
            jnp.concatenate([one.a, other.a], axis=-1), jnp.concatenate([one.b, -other.b], axis=rank), one.scale
        )

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> LoraGaWeight:
        """The base and the factors for use, see ``jaxllm.models.linear.gather``."""
        parts = (one.gather(dtype, axes, unreduced_grad) for one in (self.low_rank, self.initial))
        return LoraGaWeight(gather(self.base, dtype, axes, unreduced_grad), *parts)

    def dense(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        """Merged weight."""
        return LoraWeight(self.base, self.factors).dense(dtype)

    def project(self, x: Float[Array, "B S *in"], out: LogicalAxes, contract: int) -> Float[Array, "B S *out"]:
        """Matmul with the base, plus the activations through the factors."""
        # Not through the joined factors: JAX does not batch a concatenation of arrays whose gradients are partial sums.
        return LoraWeight(self.base, self.low_rank).project(x, out, contract) - self.initial.project(x, out)

    def grouped_matmul(self, rows: Float[Array, "M D"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
        """Refuses: experts have no single gradient."""
        raise NotImplementedError("lora_ga adapts no matrices of experts; leave experts out of the targets.")


def leading_factors(
    gradient: Float[Array, "L *dims"], contract: int, rank: int
) -> tuple[Float[Array, "L *in r"], Float[Array, "L r *out"]]:
    """Initial factors of a stack of weights from their gradients.

    Args:
        contract: number of input dimensions.
        rank: r; the gradient must have 2 r singular vectors.
    """
    layers, inputs, outputs = gradient.shape[0], gradient.shape[1 : 1 + contract], gradient.shape[1 + contract :]
    matrices = gradient.reshape(layers, math.prod(inputs), math.prod(outputs)).astype(
        jnp.promote_types(gradient.dtype, jnp.float32)
    )
    u, vt = leading_singular_vectors(matrices, 4 * rank)
    # Singular vectors have no sign of their own; the largest element decides, so that all meshes agree.
    largest = jnp.take_along_axis(u, jnp.argmax(jnp.abs(u), axis=1)[:, None], axis=1)
    sign = jnp.where(largest < 0, -1.0, 1.0).astype(u.dtype)
    u, vt = u * sign, vt * sign.mT
    size = math.prod(outputs) ** 0.25 / math.sqrt(GAMMA)
    a, b = u[..., :rank] * size, vt[:, rank : 2 * rank] * size
    dtype = gradient.dtype
    return a.reshape(layers, *inputs, rank).astype(dtype), b.reshape(layers, rank, *outputs).astype(dtype)


def leading_singular_vectors(
    matrices: Float[Array, "L m n"], count: int
) -> tuple[Float[Array, "L m q"], Float[Array, "L q n"]]:
    """Leading singular vectors of matrices, q = min(count, m, n), by subspace iteration from a random start.

    The error of a vector is about (s_q / s_k)^(2 x ITERATIONS + 1), with its singular value s_k and the smallest one
    asked for: half of those asked for are good (Halko, Martinsson and Tropp, arXiv:0909.4061, algorithm 4.4). The whole
    decomposition of a model's matrices would take longer than the training.
    """
    size = min(count, *matrices.shape[1:])
    if size == min(matrices.shape[1:]):
        u, _, vt = jnp.linalg.svd(matrices, full_matrices=False)
        return u, vt
    basis = jax.random.normal(jax.random.key(0), (matrices.shape[2], size), matrices.dtype)
    basis, _ = jnp.linalg.qr(matrices @ basis)
    for _ in range(ITERATIONS):
        other, _ = jnp.linalg.qr(matrices.mT @ basis)
        basis, _ = jnp.linalg.qr(matrices @ other)
    u, _, vt = jnp.linalg.svd(basis.mT @ matrices, full_matrices=False)
    return basis @ u, vt


def _declare(config: AdapterConfig, base: DeclaredParam, linear: LinearShape) -> LoraGaWeight:
    sides = math.prod(linear.shape[: linear.contract]), math.prod(linear.shape[linear.contract :])
    if 2 * config.rank > min(sides):
        name = base.param.get_metadata()["name"]
        raise ConfigError(
            f"adapter.rank = {config.rank}: lora_ga takes 2 x {config.rank} singular vectors, but {name} is "
            f"{sides[0]} x {sides[1]}; give a rank up to {min(sides) // 2}."
        )
    factors = declare_factors(config, linear, config.alpha / math.sqrt(config.rank))

    def frozen(leaf: DeclaredParam) -> DeclaredParam:
        return replace(leaf, param=leaf.param.replace(role="matrix"))

    return LoraGaWeight(base, factors, replace(factors, a=frozen(factors.a), b=frozen(factors.b)))


def _start(config: AdapterConfig, weight: LoraGaWeight, linear: LinearShape, gradient: Any) -> LoraGaWeight:
    if gradient is None:  # a checkpoint has the factors
        return weight
    there = jax.tree.map(lambda x: x.sharding, (weight.low_rank.a, weight.low_rank.b))

    def factors(gradient: Array) -> tuple[Array, Array]:
        return leading_factors(gradient, linear.contract, config.rank)

    a, b = jax.jit(jax.sharding.auto_axes(factors, out_sharding=jax.tree.map(lambda x: x.spec, there)))(gradient)
    low_rank = replace(weight.low_rank, a=a, b=b)
    initial = jax.tree.map(jnp.copy, low_rank)  # not the same arrays: a step donates both
    return LoraGaWeight(weight.base, low_rank, initial)


LORA_GA = AdapterMethod(
    _declare,
    _start,
    kept=("initial",),
    needs_gradients=True,
    fields=("rank", "alpha", "targets", "gradient_batches"),
)
