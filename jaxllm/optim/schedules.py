"""Learning-rate schedules: step -> learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int

ScheduleKind = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule of a run.

    Attributes:
        kind: "cosine" (arXiv:1608.03983, one cycle), "wsd" (warm-up, stable, linear decay: arXiv:2404.06395) or
            "constant" (after warm-up).
        peak: learning rate after warm-up.
        warmup: fraction of the run in which the rate rises linearly from 0.
        decay: "wsd" only: last fraction of the run, in which the rate falls to ``floor``.
        floor: final learning rate as a fraction of ``peak`` ("cosine" and "wsd").
    """

    kind: ScheduleKind = "cosine"
    peak: float = 3e-3
    warmup: float = 0.02
    decay: float = 0.2
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ValueError(f"schedule: kind = {self.kind!r}; legal: {', '.join(get_args(ScheduleKind))}.")
        for name in ("warmup", "decay", "floor"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"schedule: {name} = {getattr(self, name)} is a fraction; it must lie in [0, 1].")
        if not 0 < self.peak < math.inf:
            raise ValueError(f"schedule: peak = {self.peak}; a learning rate is positive.")
        if self.kind == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"schedule: warmup {self.warmup} + decay {self.decay} exceed the run; lower one.")


def schedule(config: ScheduleConfig, total_steps: int) -> optax.Schedule:
    """Learning-rate schedule of a run of ``total_steps``, as an optax schedule."""
    warmup = round(config.warmup * total_steps)
    floor = config.peak * config.floor

    def rate(count: ArrayLike) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.result_type(float))  # float64 where 64-bit JAX is on
        # Step 0 has a positive rate: a first update of size zero would waste a batch.
        rising = config.peak * (step + 1) / max(warmup, 1)
        if config.kind == "constant":
            after = jnp.full_like(step, config.peak)
        elif config.kind == "cosine":
            progress = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0, 1)
            after = floor + (config.peak - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        else:
            decay = max(round(config.decay * total_steps), 1)
            progress = jnp.clip((step - (total_steps - decay)) / decay, 0, 1)
            after = config.peak + (floor - config.peak) * progress
        return jnp.where(step < warmup, rising, after)

    return rate


def schedule_count(opt_state: Any) -> Int[Array, ""] | None:
    """Number of updates that the learning-rate schedule in an optimizer state has counted; None if it has no count.

    Steps that leave the optimizer state as it was, such as those that overflow, are not in it.
    """
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState))
    counts = [jnp.asarray(part.count) for part in parts if isinstance(part, optax.ScaleByScheduleState)]
    return next((count for count in counts if count.ndim == 0), None)
