"""DoRA: weight-decomposed low-rank adaptation (arXiv:2402.09353).

The weight of each output is a learned magnitude times a direction, ``m (W + s A B) / ||W + s A B||``, where the norm
runs over the inputs of the output. As in the paper (section 4.3), the norm is a constant for gradients.

Legend: B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.functional import DeclaredParam, LinearShape
from jaxllm.models.linear import gather, project
from jaxllm.models.operand_specs import without_reduced
from jaxllm.models.params import at_least_f32, constant, gathered
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod, declare_factors, lora_scale, stacked
from jaxllm.peft.low_rank_factors import LoraWeight, LowRank
from sharding import LogicalAxes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DoraWeight:
    """Weight of a ``Linear`` with a DoRA adapter; a ``jaxllm.models.linear.Weight``.

    Attributes:
        base: the weight that is adapted: an array, or a ``Weight`` of any kind.
        low_rank: factors that add to it.
        magnitude: ``[*lead, *out]``, norm of each output's merged weight.
    """

    base: Any
    low_rank: LowRank
    magnitude: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.base.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> DoraWeight:
        """The base, the factors and the magnitudes for use; gradients of magnitudes are summed over devices at once."""
        base = gather(self.base, dtype, axes, unreduced_grad)
        magnitude = gathered(self.magnitude, dtype, axes[self.low_rank.a.ndim - 1 :], False)
        return DoraWeight(base, self.low_rank.gather(dtype, axes, unreduced_grad), magnitude)

    def dense(self, dtype: jnp.dtype) -> Float[Array, "*in *out"]:
        """Merged weight."""
        merged = LoraWeight(self.base, self.low_rank).dense(dtype)
        return without_reduced(merged) * self._ratio().astype(dtype)

    def project(self, x: Float[Array, "B S *in"], out: LogicalAxes, contract: int) -> Float[Array, "B S *out"]:
        """Matmul with the base and the factors, scaled by magnitude over norm."""
        y = project(x, self.base, out, contract) + self.low_rank.project(x, out)
        return y * self._ratio().astype(y.dtype)

    def grouped_matmul(self, rows: Float[Array, "M D"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
        """Refuses: the matrices of experts are not adapted by DoRA."""
        raise NotImplementedError("dora adapts no matrices of experts; leave experts out of the targets.")

    def _ratio(self) -> Float[Array, "*out"]:
        """Magnitude over norm of each output."""
        constants = jax.tree.map(lambda x: jax.lax.stop_gradient(without_reduced(x)), (self.base, self.low_rank))
        merged = LoraWeight(*constants).dense(at_least_f32(self.magnitude.dtype))
        norms = output_norms(merged, self.low_rank.a.ndim - 1)
        return self.magnitude / norms.astype(self.magnitude.dtype)


def output_norms(weight: Float[Array, "*in *out"], contract: int) -> Float[Array, "*out"]:
    """Norm of each output's weights over its ``contract`` leading input dimensions."""
    return jnp.sqrt(jnp.sum(jnp.square(weight), axis=tuple(range(contract))))


def _declare(config: AdapterConfig, base: DeclaredParam, linear: LinearShape) -> DoraWeight:
    outputs = linear.contract
    magnitude = constant(0.0, linear.shape[outputs:], linear.axes[outputs:], linear.dtype, role="gain")
    factors = declare_factors(config, linear, lora_scale(config))
    return DoraWeight(base, factors, DeclaredParam(magnitude, linear.stack))


def _start(config: AdapterConfig, weight: DoraWeight, linear: LinearShape, gradient: Any) -> DoraWeight:
    """The weight with the norms of its base as magnitudes: it equals the base."""

    def norms(base: Array, magnitude: Array) -> Array:
        found = output_norms(base.astype(at_least_f32(base.dtype)), linear.contract)
        return found.astype(magnitude.dtype)

    there = weight.magnitude.sharding
    return replace(
        weight, magnitude=jax.jit(stacked(norms, linear), out_shardings=there)(weight.base, weight.magnitude)
    )


DORA = AdapterMethod(_declare, _start, trained=("adapter", "magnitude"))
