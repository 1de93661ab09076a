"""AdamW (arXiv:1711.05101) with decay masks and global-norm clipping, as an optax chain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from jaxllm.optim.schedules import ScheduleConfig, schedule


@dataclass(frozen=True)
class OptimConfig:
    """AdamW; 8 bytes of state per parameter in float32.

    Attributes:
        schedule: the learning rate.
        b1, b2: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices and embeddings; gains and biases are left alone.
        clip_norm: gradients of a larger global norm are scaled down to it; None for no clipping.
    """

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim: {name} = {getattr(self, name)}; it must lie in [0, 1).")
        if not self.eps > 0:
            raise ValueError(f"optim: eps = {self.eps}; give a positive number.")
        if not self.weight_decay >= 0:
            raise ValueError(f"optim: weight_decay = {self.weight_decay}; give 0 (none) or a positive number.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optim: clip_norm = {self.clip_norm}; give a positive number, or None for no clipping.")


STREAMS = ("embed", "vocab_embed", "expert_embed", "latent")
"""Logical axes of what layers read and write."""


def decay_mask(logical_axes: Any) -> Any:
    """True for the parameters that weight decay applies to: those that map to or from the residual stream or a latent.

    Gains and biases have such an axis alone, or not at all.
    """

    def decays(axes: tuple[str | None, ...]) -> bool:
        own = [a for a in axes if a != "layers"]
        return len(own) > 1 and any(a in STREAMS for a in own)

    return jax.tree.map(decays, logical_axes, is_leaf=lambda x: isinstance(x, tuple))


def optimizer(config: OptimConfig, total_steps: int, logical_axes: Any) -> optax.GradientTransformation:
    """The transformation for parameters with these logical axes."""
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(
        clip,
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(logical_axes)),
        optax.scale_by_learning_rate(schedule(config.schedule, total_steps)),
    )
