"""Parameter average: exponential moving average (EMA) of the parameters, kept beside them by a link of the step.

After step t, from 1, ``average <- d average + (1 - d) params`` with ``d = min(decay, (1 + t) / (10 + t))``, so that the
first steps, which are far from the last, are forgotten. Evaluations and exports may use the average in place of the
parameters; training never does. arXiv:1710.10196 (section 4); the warm-up is TensorFlow's ExponentialMovingAverage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.params import at_least_f32
from jaxllm.train.step.loss_spikes import select_tree
from jaxllm.train.step.step_chain import InnerStep, StepLink, StepResult, link_state
from jaxllm.train.step.train_state import TrainState

EMA = "ema"
"""Name of the average in ``TrainState.extras``, and of its leaves in checkpoints."""


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the parameters.

    Attributes:
        decay: share of the average that a step keeps, such as 0.999; 0: no average.
        evaluate: whether evaluations on held-out text use the average instead of the parameters.
    """

    decay: float = 0.0
    evaluate: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"ema: decay = {self.decay}; give 0 (no average) or a number below 1, such as 0.999.")
        if not self.evaluate and not self.decay:
            raise ValueError("ema: evaluate = False without an average: give ema.decay too, or leave evaluate out.")


def parameter_average(config: EmaConfig) -> StepLink | None:
    """Link of the parameter average (``ema``); a skipped step leaves it as it was. None is returned for decay 0."""
    if not config.decay:
        return None

    def init(params: Any) -> Any:
        # Copies, because parameters and average are both donated.
        return jax.tree.map(lambda p: jnp.array(p, at_least_f32(p.dtype), copy=True), params)

    def wrap(step: InnerStep) -> InnerStep:
        def run(state: TrainState, batch: Any) -> StepResult:
            result, old = step(state, batch), link_state(state, EMA)
            done = result.state.step.astype(jnp.result_type(float))
            decay = jnp.minimum(config.decay, (1 + done) / (10 + done))
            with jax.named_scope(EMA):
                new = jax.tree.map(lambda e, p: e + (1 - decay).astype(e.dtype) * (p - e), old, result.state.params)
            return result.with_extra(EMA, new if result.skipped is None else select_tree(result.skipped, old, new))

        return run

    return StepLink(EMA, init, wrap=wrap)


def evaluated_params(config: EmaConfig, state: TrainState) -> Any:
    """Parameters that a run evaluates: the average, in the parameters' dtype, or the parameters themselves."""
    if not config.decay or not config.evaluate:
        return state.params
    return jax.tree.map(lambda e, p: e.astype(p.dtype), state.extras[EMA], state.params)
