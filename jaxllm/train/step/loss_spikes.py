"""Spikes of the loss: how a step is seen to be one, on the devices, and what may be done about it.

A step is a spike if its loss or its gradient norm is no number, or if the logarithm of either lies more than
``threshold`` deviations above the median of the last ``window`` steps. A deviation is 1.4826 times the median absolute
deviation, which is a normal distribution's (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993), and at
least ``LEAST``. OLMo 2 calls seven standard deviations from a rolling mean a spike (arXiv:2501.00656);
medians are not moved by the spikes before. A level that lasts longer than half the window is the new median, and no
spike any more.

    skip        the step changes nothing: neither parameters nor the optimizer's state
    rollback    back to the parameters of ``back`` steps before, and on without the next ``pass_over`` batches
                (PaLM, arXiv:2204.02311, section 5.1: about 100, and 200 to 500)
    lower_rate  the learning rate is multiplied by ``factor``, from the first step of each spike on

What the last steps were is part of the state, so a run that goes on judges as one that never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SpikeAction = Literal["none", "skip", "rollback", "lower_rate"]
MIN_DEVIATION = 0.02
"""The least deviation, of logarithms: the loss of a spike at seven is a seventh larger than usual."""
MAX_LOG = 80.0
"""Of logarithms, and the place of steps that were not yet."""
ACTIONS_OF_FIELD: dict[str, tuple[SpikeAction, ...]] = {
    "window": ("skip", "rollback", "lower_rate"),
    "threshold": ("skip", "rollback", "lower_rate"),
    "limit": ("skip", "rollback", "lower_rate"),
    "back": ("rollback",),
    "pass_over": ("rollback",),
    "factor": ("lower_rate",),
}
"""Actions that have a number."""


@dataclass(frozen=True)
class SpikeConfig:
    """What is done where the loss or the gradients leap.

    Attributes:
        action: "none" (only a loss that is no number stops the run), "skip" (the step), "rollback" (to before it, and
            past its batches) or "lower_rate" (from then on).
        window: steps that are looked back on; in the first half of as many there are no spikes but what is no number.
        threshold: deviations above their median.
        limit: spikes in a window of steps that are borne; one more stops the run.
        back: "rollback" only: steps before the spike.
        pass_over: "rollback" only: batches that are left out from there on, the spike's among them.
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
                f"spikes.pass_over = {self.pass_over} ends before the spike, {self.back} steps on (spikes.back); "
                f"give {self.back + 1} or more."
            )
        for field in fields(self):
            legal = ACTIONS_OF_FIELD.get(field.name, ())
            if legal and self.action not in legal and getattr(self, field.name) != field.default:
                raise ValueError(
                    f'spikes.action = "{self.action}" has no {field.name}; it is of {", ".join(legal)}: leave it out.'
                )


class SpikeDetectorState(NamedTuple):
    """The last steps, newest first: part of a run's state.

    Attributes:
        losses, norms: logarithms of the loss and of the gradient norm.
        spikes: which were spikes.
        rate: what the learning rate is multiplied by.
        skipped: steps that changed nothing.
    """

    losses: Float[Array, " W"]
    norms: Float[Array, " W"]
    spikes: Bool[Array, " W"]
    rate: Float[Array, ""]
    skipped: Int[Array, ""]

    def update(
        self, config: SpikeConfig, loss: Float[Array, ""], grad_norm: Float[Array, ""], void: Bool[Array, ""] | None
    ) -> tuple[Bool[Array, ""], Float[Array, ""], SpikeDetectorState]:
        """Whether a step is a spike, by how many deviations, and what is known after it.

        Args:
            void: a step that says nothing, because its numbers have overflown; it is none. None: no such one.
        """
        void = jnp.zeros((), bool) if void is None else void
        there = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        values = [_logarithm(x) for x in (loss, grad_norm)]
        seen = (self.losses, self.norms)
        above = [_deviations(x, before) for x, before in zip(values, seen, strict=True)]
        score = jnp.maximum(jnp.maximum(*above), 0)
        spike = (~there | (score > config.threshold)) & ~void
        falls = spike & ~self.spikes[0] & (config.action == "lower_rate")
        losses, norms = (jnp.concatenate([x[None], old[:-1]]) for x, old in zip(values, seen, strict=True))
        spikes = jnp.concatenate([spike[None], self.spikes[:-1]])
        rate = jnp.where(falls, self.rate * config.factor, self.rate)
        new = SpikeDetectorState(losses, norms, spikes, rate, self.skipped + (spike & (config.action == "skip")))
        return spike, score, select_tree(void, self, new)


def init_spike_detector(config: SpikeConfig) -> SpikeDetectorState | None:
    """Before the first step; None where nobody looks."""
    if config.action == "none":
        return None
    # Not yet seen is as large as can be: until half of the window is there, the median is the largest seen, or this.
    # Arrays of their own, for the state is donated.
    losses, norms = (jnp.full(config.window, MAX_LOG, jnp.float32) for _ in range(2))
    return SpikeDetectorState(losses, norms, jnp.zeros(config.window, bool), jnp.float32(1), jnp.int32(0))


def select_tree(flag: Bool[Array, ""], old: Any, new: Any) -> Any:
    """``old`` where the flag is set, else ``new``; trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), old, new)


def _logarithm(x: Float[Array, ""]) -> Float[Array, ""]:
    found = jnp.log(jnp.where(x > 0, x, 0).astype(jnp.float32))
    return jnp.where(jnp.isnan(x), MAX_LOG, jnp.clip(found, -MAX_LOG, MAX_LOG))


def _deviations(x: Float[Array, ""], before: Float[Array, " W"]) -> Float[Array, ""]:
    """How far above the median."""
    middle = _median(before)
    return (x - middle) / jnp.maximum(1.4826 * _median(jnp.abs(before - middle)), MIN_DEVIATION)


def _median(x: Float[Array, " W"]) -> Float[Array, ""]:
    """The lower one of an even number."""
    return jnp.sort(x)[(x.shape[0] - 1) // 2]
