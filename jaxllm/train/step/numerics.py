"""What a run's numbers need beside parameters: the scale of a float16 loss, what 8-bit products have seen.

Gradients of a float16 forward pass are lost below 6e-8. The loss is multiplied by a power of two before they are
made, and they are divided by it after; a step whose gradients overflow is skipped and halves the scale,
``GROWTH_EVERY`` steps without one double it (arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.models import DecoderConfig
from jaxllm.models.low_precision_matmul import init_amax_history, update_amax_history

FIRST_SCALE = 2.0**15
GROWTH_EVERY = 200
LEAST_SCALE, LARGEST_SCALE = 1.0, 2.0**24


class LossScale(NamedTuple):
    """A power of two, and the steps since it last changed."""

    scale: Float[Array, ""]
    steps: Int[Array, ""]

    def updated(self, finite: Bool[Array, ""]) -> LossScale:
        """After a step whose gradients were finite, or not."""
        steps = jnp.where(finite, self.steps + 1, 0)
        grows = steps >= GROWTH_EVERY
        scale = jnp.where(finite, jnp.where(grows, 2 * self.scale, self.scale), self.scale / 2)
        return LossScale(jnp.clip(scale, LEAST_SCALE, LARGEST_SCALE), jnp.where(grows, 0, steps))


class Numerics(NamedTuple):
    """State of a precision.

    Attributes:
        loss_scale: of float16.
        seen: of "fp8_delayed", by segment and block: ``jaxllm.models.low_precision_matmul.init_amax_history``.
    """

    loss_scale: LossScale | None
    seen: Any

    @property
    def scale(self) -> Float[Array, ""] | float:
        """What the loss is multiplied by."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def updated(self, finite: Bool[Array, ""], seen: Any) -> Numerics:
        """After a step; nothing is remembered of one that was skipped."""
        scale = None if self.loss_scale is None else self.loss_scale.updated(finite)
        known = jax.tree.map(lambda old, now: jnp.where(finite, update_amax_history(old, now), old), self.seen, seen)
        return Numerics(scale, known)

    def should_skip(self, finite: Bool[Array, ""]) -> Bool[Array, ""]:
        """Whether a step is skipped, because a smaller scale may mend it."""
        return jnp.zeros((), bool) if self.loss_scale is None else ~finite & (self.loss_scale.scale > LEAST_SCALE)


def init_numerics(config: DecoderConfig) -> Numerics | None:
    """Before the first step; None for a model that needs no such state."""
    scale = LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0)) if config.dtype == "float16" else None
    seen = None
    if config.matmul_precision == "fp8_delayed":
        segments = enumerate(config.segments)
        seen = {
            str(s): init_amax_history([block.weight_matmuls for block in group], repeats)
            for s, (group, repeats) in segments
        }
    return None if scale is None and seen is None else Numerics(scale, seen)
