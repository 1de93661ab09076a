"""Fused mixture of experts for few tokens, and its implementations.

Legend: T tokens, A experts per token, E experts, D embed, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.fused_moe.reference import fused_moe_reference


def _pallas_tpu(*args: Any) -> Array:
    from pallas_kernels.fused_moe.pallas_tpu import fused_moe_pallas_tpu

    return fused_moe_pallas_tpu(*args)


IMPLEMENTATIONS = {"pallas_tpu": _pallas_tpu, "reference": fused_moe_reference}


def fused_moe(
    x: Float[Array, "T D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    activation: Callable[[Array], Array],
    *,
    implementation: Implementation = None,
) -> Float[Array, "T D"]:
    """Mixture of experts of few tokens: ``sum over a of weights[t, a] * expert[experts[t, a]](x[t])``.

    Expert e is ``(activation(x @ gate[e]) * (x @ up[e])) @ down[e]``. For a decode step, whose time is that of reading
    weights: all tokens are multiplied with each expert that any of them chose, so that nothing is sorted and no row
    moves, and a matrix is read once. The work is T times the experts chosen, not T times A.

    Args:
        x: tokens.
        gate, up, down: matrices of the experts.
        experts: chosen experts of each token, which differ; an index of E or more is none, and contributes nothing.
        weights: combine weights.
        activation: elementwise function.
        implementation: "pallas_tpu" or "reference"; see ``pallas_kernels._dispatch``.

    Returns:
        The sums in ``x.dtype``, accumulated in at least float32. Differentiable in x, the matrices and the weights; the
        backward pass is the reference's.

    Raises:
        ValueError: the shapes do not match.
        NotImplementedError: the implementation does not support these arguments.
    """
    (t, d), (e, _, f), a = x.shape, gate.shape, experts.shape[1]
    found = gate.shape, up.shape, down.shape, experts.shape, weights.shape
    if found != ((e, d, f), (e, d, f), (e, f, d), (t, a), (t, a)):
        raise ValueError(
            f"fused_moe: tokens {list(x.shape)}, matrices {list(gate.shape)}, {list(up.shape)} and {list(down.shape)}, "
            f"experts {list(experts.shape)} and weights {list(weights.shape)} do not go together; they are [T, D], "
            "[E, D, F] twice, [E, F, D] and [T, A] twice."
        )
    operands = (x, gate, up, down, experts, weights)
    axes = varying_axes(*operands)
    same = (vary_over(one, axes) for one in operands)
    return dispatch("fused_moe", IMPLEMENTATIONS, implementation, *same, activation)
