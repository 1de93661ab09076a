"""Rounding table: ways to choose the codes of a matrix, one row each."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.grids import Grid, GridParams, TernaryGrid
from jaxllm.quant.methods.clipped_ranges import clipped_ranges
from jaxllm.quant.methods.gptq import DAMPING, SHRINKAGE, fit_groups, gptq_damped
from jaxllm.quant.methods.learned_scales import learned_scales, refitted_scales
from jaxllm.quant.methods.nearest import half_quadratic, round_to_nearest

ROUNDS = 3
"""Turns of ``gptq_learned_scales``."""


@runtime_checkable
class RoundMatrix(Protocol):
    """Chooses the codes of a matrix."""

    def __call__(
        self, weight: Float[Array, "I O"], gram: Float[Array, "I I"] | None, grid: Grid, group: int | None
    ) -> tuple[UInt8[Array, "I O"], GridParams, str]:
        """Codes, parameters of groups, and a remark for the report; "" for none.

        Args:
            gram: sum of the outer products of the inputs; None for methods without calibration.
            group: inputs that share parameters; None: all.
        """
        ...


class Method(NamedTuple):
    """Quantisation method.

    Attributes:
        round: chooses codes.
        calibrates: whether text goes through the model.
        smooths: how factors are moved from activations into weights first; "" for not at all.
        symmetric: whether codes are symmetric by default.
        source: paper.
    """

    round: RoundMatrix
    calibrates: bool
    smooths: str
    symmetric: bool
    source: str


def _nearest(weight, gram, grid, group):
    return *round_to_nearest(weight, grid, group), ""


def _half_quadratic(weight, gram, grid, group):
    return *half_quadratic(weight, grid, group), ""


def _gptq(weight, gram, grid, group, act_order=False, static=None):
    """Ranges are clipped first, and correlations are shrunk: both for text that the calibration has not seen.

    Not those of ternary codes, whose zeros are most of the weights because the range is whole.
    """
    if static is None:
        ternary = isinstance(grid, TernaryGrid)
        static = (
            fit_groups(grid, weight, group or len(weight))
            if ternary
            else clipped_ranges(weight, jnp.diag(gram), grid, group)
        )
    options = {"act_order": act_order, "static": static, "shrinkage": SHRINKAGE}
    codes, params, damping = gptq_damped(weight, gram, grid, group, **options)
    dead = int(jnp.sum(jnp.diag(gram) == 0))
    remarks = [f"{dead} inputs are always 0, their weights too"] * (dead > 0)
    return codes, params, "; ".join(remarks + [f"singular inputs, damping {damping:g}"] * (damping > DAMPING))


def _gptq_act_order(weight, gram, grid, group):
    return _gptq(weight, gram, grid, group, act_order=True)


def _learned_scales(weight, gram, grid, group):
    return *learned_scales(weight, gram, grid, group), ""


def _gptq_learned_scales(weight, gram, grid, group):
    """Codes for the scales, and scales for the codes, by turns."""
    shrunk = gram + SHRINKAGE * jnp.diag(jnp.diag(gram))
    size = group or len(weight)
    codes, params, remark = _gptq(weight, gram, grid, group, act_order=True)
    for _ in range(ROUNDS - 1):
        static = refitted_scales(weight, shrunk, grid, size, codes, params)
        codes, params, remark = _gptq(weight, gram, grid, group, act_order=True, static=static)
    return codes, refitted_scales(weight, shrunk, grid, size, codes, params), remark


METHODS: dict[str, Method] = {
    "rtn": Method(_nearest, False, "", True, "rounding to the nearest"),
    "hqq": Method(_half_quadratic, False, "", False, "Badri and Shaji 2023"),
    "gptq": Method(_gptq, True, "", True, "arXiv:2210.17323"),
    "gptq_act_order": Method(_gptq_act_order, True, "", True, "arXiv:2210.17323; static groups"),
    "gptq_learned_scales": Method(_gptq_learned_scales, True, "", True, "arXiv:2210.17323 and 2407.10960"),
    "learned_scales": Method(_learned_scales, True, "", True, "arXiv:2407.10960"),
    "awq": Method(_nearest, True, "awq", False, "arXiv:2306.00978"),
    "smoothquant": Method(_nearest, True, "smoothquant", True, "arXiv:2211.10438"),
    "smoothquant_bias": Method(_nearest, True, "smoothquant_bias", True, "arXiv:2401.14895"),
}
"""Methods by name."""
