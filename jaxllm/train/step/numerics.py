"""Mixed-precision state: dynamic loss scaling for float16, and the amax history of delayed fp8 scaling.

Gradients of a float16 backward pass underflow below 6e-8. Loss scaling multiplies the loss by a power of two before
differentiation and divides the gradients by it afterwards. A step whose gradients overflow is skipped and halves the
scale; ``GROWTH_EVERY`` steps without overflow double it (arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.models import DecoderConfig, functional
from jaxllm.models.low_precision_matmul import update_amax_history

FIRST_SCALE = 2.0**15
GROWTH_EVERY = 200
LEAST_SCALE, LARGEST_SCALE = 1.0, 2.0**24


class LossScale(NamedTuple):
    """Dynamic loss scale: a power of two, and the steps since it last changed."""

    scale: Float[Array, ""]
    steps: Int[Array, ""]

    def updated(self, finite: Bool[Array, ""]) -> LossScale:
        """Loss scale after a step.

        Args:
            finite: whether all gradients of the step were finite.
        """
        steps = jnp.where(finite, self.steps + 1, 0)
        grows = steps >= GROWTH_EVERY
        scale = jnp.where(finite, jnp.where(grows, 2 * self.scale, self.scale), self.scale / 2)
        return LossScale(jnp.clip(scale, LEAST_SCALE, LARGEST_SCALE), jnp.where(grows, 0, steps))


class Numerics(NamedTuple):
    """Mixed-precision state, part of the train state; field names are the leaf names in checkpoints.

    Attributes:
        loss_scale: of float16 models, else None.
        seen: amax history of the factors of fp8_delayed matmuls, by segment and block
            (``Functional.init_amax_history``), else None.
    """

    loss_scale: LossScale | None
    seen: Any

    @property
    def scale(self) -> Float[Array, ""] | float:
        """Factor that the loss is multiplied by; 1 without loss scaling."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def updated(self, finite: Bool[Array, ""], amax: Any) -> Numerics:
        """State after a step; the amax values of a non-finite step are not recorded.

        Args:
            finite: whether all gradients were finite.
            amax: largest magnitudes of this step, of the history's structure.
        """
        scale = None if self.loss_scale is None else self.loss_scale.updated(finite)
        update = lambda old, now: jnp.where(finite, update_amax_history(old, now), old)  # noqa: E731
        return Numerics(scale, jax.tree.map(update, self.seen, amax))

    def should_skip(self, finite: Bool[Array, ""]) -> Bool[Array, ""]:
        """Whether to skip a step: its gradients overflowed and the loss scale can still be halved; bool scalar."""
        return jnp.zeros((), bool) if self.loss_scale is None else ~finite & (self.loss_scale.scale > LEAST_SCALE)


def init_numerics(config: DecoderConfig) -> Numerics | None:
    """Mixed-precision state before the first step; None for models that need none."""
    scale = LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0)) if config.dtype == "float16" else None
    seen = None
    if config.matmul_precision == "fp8_delayed":
        seen = functional(config).init_amax_history()
    return None if scale is None and seen is None else Numerics(scale, seen)
