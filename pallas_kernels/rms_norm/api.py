"""Division by the root of the mean square, times a gain: the operation, whoever computes it."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.rms_norm.reference import rms_norm_reference
from pallas_kernels.rms_norm.xla import rms_norm_xla

IMPLEMENTATIONS = {"xla": rms_norm_xla, "reference": rms_norm_reference}


def rms_norm(
    x: Float[Array, "..."],
    gain: Float[Array, "..."],
    *,
    eps: float,
    plus_one: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "..."]:
    """``x / sqrt(mean(x^2) + eps) * gain`` over the gain's dimensions, the last of x (arXiv:1910.07467).

    Args:
        x: of any shape that ends in the gain's.
        gain: multiplied with what was normalised.
        eps: added to the mean square.
        plus_one: the gain is stored less one, so that zero is neutral (as Gemma has it).
        implementation: "xla" keeps x and one number a row for the backward pass; "reference" what JAX keeps of the
            formula, several times x in float32. See ``pallas_kernels._dispatch``.

    Returns:
        Computed in at least float32, in ``x.dtype``. Differentiable in x and gain.

    Raises:
        ValueError: shapes that do not go together.
    """
    if gain.ndim == 0 or x.shape[-gain.ndim :] != gain.shape:
        raise ValueError(
            f"rms_norm: x {list(x.shape)} and gain {list(gain.shape)} do not go together; x's shape must end in the "
            "gain's."
        )
    axes = varying_axes(x, gain)
    arguments = vary_over(x, axes), vary_over(gain, axes)
    return dispatch("rms_norm", IMPLEMENTATIONS, implementation, *arguments, eps=eps, plus_one=plus_one)
