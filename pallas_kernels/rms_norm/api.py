"""RMS norm: public operation and its implementations."""

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
    """RMS norm ``x / sqrt(mean(x^2) + eps) * gain`` over the gain's dimensions, the last of x (arXiv:1910.07467).

    Args:
        x: input; its shape must end in the gain's.
        gain: learned scale of the normalised values.
        eps: added to the mean square.
        plus_one: the stored gain is the scale minus one, so that zero is neutral (Gemma).
        implementation: "xla" saves x and one value per row for the backward pass; "reference" saves what JAX's
            autodiff of the formula saves, several float32 copies of x. See ``pallas_kernels._dispatch``.

    Returns:
        Normalised values, computed in at least float32, in ``x.dtype``. Differentiable in x and gain.

    Raises:
        ValueError: the shapes do not match.
    """
    if gain.ndim == 0 or x.shape[-gain.ndim :] != gain.shape:
        raise ValueError(
            f"rms_norm: x {list(x.shape)} and gain {list(gain.shape)} do not go together; x's shape must end in the "
            "gain's."
        )
    axes = varying_axes(x, gain)
    arguments = vary_over(x, axes), vary_over(gain, axes)
    return dispatch("rms_norm", IMPLEMENTATIONS, implementation, *arguments, eps=eps, plus_one=plus_one)
