"""Loss spike detection on the devices, and the actions that a run can take at a spike.

A step is a loss spike if its loss or gradient norm is not finite, or if the logarithm of either lies more than
``threshold`` deviations above the median of the last ``window`` steps. One deviation is 1.4826 times the median
absolute deviation (MAD), which for a normal distribution is the standard deviation (Iglewicz and Hoaglin, How to
Detect and Handle Outliers, 1993), and at least ``MIN_DEVIATION``. OLMo 2 calls seven standard deviations from a
rolling mean a spike (arXiv:2501.00656); unlike a mean, a median is not moved by earlier spikes. A level that lasts
longer than half the window becomes the new median and is no spike any more.

    skip        the step changes neither parameters nor optimizer state
    rollback    back to the parameters of ``back`` steps before, then on without the next ``pass_over`` batches
                (PaLM, arXiv:2204.02311, section 5.1: about 100 steps back, 200 to 500 batches skipped)
    lower_rate  the learning rate is multiplied by ``factor``, once per spike, from its first step on

The detector's window is part of the train state, so a resumed run judges steps as an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SpikeAction = Literal["none", "skip", "rollback", "lower_rate"]
MIN_DEVIATION = 0.02
"""Least deviation, of logarithms: at a threshold of 7, a spike's loss is at least a seventh larger than the median."""
MAX_LOG = 80.0
"""Bound of logarithms, and the value of steps before the first."""
ACTIONS_OF_FIELD: dict[str, tuple[SpikeAction, ...]] = {
    "window": ("skip", "rollback", "lower_rate"),
    "threshold": ("skip", "rollback", "lower_rate"),
    "limit": ("skip", "rollback", "lower_rate"),
    "back": ("rollback",),
    "pass_over": ("rollback",),
    "factor": ("lower_rate",),
}
"""Config field -> actions that use it."""


@dataclass(frozen=True)
class SpikeConfig:
    """Loss spike detection and what is done at a spike.

    Attributes:
        action: "none" (only a non-finite loss stops the run), "skip" (leave the step out), "rollback" (to before the
            spike, skipping its batches) or "lower_rate" (of learning, from then on).
        window: steps that the median is taken over; in the first half of a window only non-finite steps are spikes.
        threshold: deviations above the median.
        limit: spikes tolerated in a window of steps; one more stops the run.
        back: "rollback" only: steps to go back before the spike.
        pass_over: "rollback" only: batches that are skipped from there on, the spike's among them.
        factor: "lower_rate" only: what the learning rate is multiplied by.
    """

    action: SpikeAction = "none"
    window: int = 128
    threshold: float = 7.0
    limit: int = 8
    back: int = 100
    pass_over: int = 200
    factor: float = 0.5

    def __post_init__(self) -> None:
        if self.action not in get_args(SpikeAction):
            raise ValueError(f"spikes.action = {self.action!r}; legal: {', '.join(get_args(SpikeAction))}.")
        for name, least in (("window", 2), ("threshold", 1), ("limit", 0), ("back", 0), ("pass_over", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"spikes.{name} = {getattr(self, name)}; give {least} or more.")
        if not 0 < self.factor < 1:
            raise ValueError(f"spikes.factor = {self.factor}; give a share of the learning rate between 0 and 1.")
        if self.pass_over <= self.back:
            raise ValueError(
                f"spikes.pass_over = {self.pass_over} ends before the spike, which is spikes.back = {self.back} steps "
                f"after the rollback point; give {self.back + 1} or more."
            )
        for field in fields(self):
            legal = ACTIONS_OF_FIELD.get(field.name, ())
            if legal and self.action not in legal and getattr(self, field.name) != field.default:
                raise ValueError(
                    f'spikes.action = "{self.action}" does not use spikes.{field.name}, which is for '
                    f"{', '.join(legal)}: leave it out."
                )


class SpikeDetectorState(NamedTuple):
    """State of the loss spike detector, newest step first; part of the train state, whose leaf names are these fields.

    Attributes:
        losses, norms: logarithms of the loss and of the gradient norm.
        spikes: which of these steps were spikes.
        rate: factor of the learning rate; 1 before the first spike.
        skipped: number of steps skipped so far; int32 scalar.
    """

    losses: Float[Array, " W"]
    norms: Float[Array, " W"]
    spikes: Bool[Array, " W"]
    rate: Float[Array, ""]
    skipped: Int[Array, ""]

    def update(
        self,
        config: SpikeConfig,
        loss: Float[Array, ""],
        grad_norm: Float[Array, ""],
        overflowed: Bool[Array, ""] | None,
    ) -> tuple[Bool[Array, ""], Float[Array, ""], SpikeDetectorState]:
        """Judges a step and adds it to the window.

        Args:
            config: of the detector.
            loss: mean loss of the step.
            grad_norm: global gradient norm, before clipping.
            overflowed: whether the step overflowed under loss scaling; such a step is no spike and
                is not added. None: no such step.

        Returns:
            whether the step is a spike; its score, in deviations above the median; the new state.
        """
        overflowed = jnp.zeros((), bool) if overflowed is None else overflowed
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        values = [_logarithm(x) for x in (loss, grad_norm)]
        windows = (self.losses, self.norms)
        above = [_deviations(x, before) for x, before in zip(values, windows, strict=True)]
        score = jnp.maximum(jnp.maximum(*above), 0)
        spike = (~finite | (score > config.threshold)) & ~overflowed
        lowers = spike & ~self.spikes[0] & (config.action == "lower_rate")
        losses, norms = (jnp.concatenate([x[None], old[:-1]]) for x, old in zip(values, windows, strict=True))
        spikes = jnp.concatenate([spike[None], self.spikes[:-1]])
        rate = jnp.where(lowers, self.rate * config.factor, self.rate)
        new = SpikeDetectorState(losses, norms, spikes, rate, self.skipped + (spike & (config.action == "skip")))
        return spike, score, select_tree(overflowed, self, new)


def init_spike_detector(config: SpikeConfig) -> SpikeDetectorState | None:
    """State before the first step; None for action "none"."""
    if config.action == "none":
        return None
    # Steps not yet seen count as MAX_LOG: until half of the window is filled, no finite step lies above the median.
    # Two arrays, because the state is donated.
    losses, norms = (jnp.full(config.window, MAX_LOG, jnp.float32) for _ in range(2))
    return SpikeDetectorState(losses, norms, jnp.zeros(config.window, bool), jnp.float32(1), jnp.int32(0))


def select_tree(flag: Bool[Array, ""], old: Any, new: Any) -> Any:
    """Selects ``old`` where the flag is set, else ``new``; both are trees of arrays of equal structure."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), old, new)


def _logarithm(x: Float[Array, ""]) -> Float[Array, ""]:
    found = jnp.log(jnp.where(x > 0, x, 0).astype(jnp.float32))
    return jnp.where(jnp.isnan(x), MAX_LOG, jnp.clip(found, -MAX_LOG, MAX_LOG))


def _deviations(x: Float[Array, ""], before: Float[Array, " W"]) -> Float[Array, ""]:
    """Distance of ``x`` above the median, in deviations."""
    middle = _median(before)
    return (x - middle) / jnp.maximum(1.4826 * _median(jnp.abs(before - middle)), MIN_DEVIATION)


def _median(x: Float[Array, " W"]) -> Float[Array, ""]:
    """Median; of an even number of values the lower one."""
    return jnp.sort(x)[(x.shape[0] - 1) // 2]
