"""An optimizer as an optax chain: clipping, a rule, decoupled decay, the learning rate."""

from __future__ import annotations

from typing import Any

import optax

from jaxllm.optim.adafactor import scale_by_adafactor
from jaxllm.optim.config import OptimConfig
from jaxllm.optim.low_rank import scale_by_low_rank
from jaxllm.optim.matrices import map_matrices
from jaxllm.optim.muon import scale_by_muon_or_adam
from jaxllm.optim.narrow import narrow
from jaxllm.optim.schedules import schedule


def decay_mask(logical_axes: Any) -> Any:
    """True for the parameters that weight decay applies to: those that map to or from the residual stream or a latent.

    Gains and biases have such an axis alone, or not at all.
    """
    return map_matrices(lambda found: found is not None, logical_axes)


def optimizer(config: OptimConfig, total_steps: int, logical_axes: Any) -> optax.GradientTransformation:
    """The transformation for parameters with these logical axes."""
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    rule = optax.chain(
        clip,
        _rule(config, logical_axes),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(logical_axes)),
        optax.scale_by_learning_rate(schedule(config.schedule, total_steps)),
    )
    return narrow(rule, config.rounding)


def _rule(config: OptimConfig, logical_axes: Any) -> optax.GradientTransformation:
    if config.kind == "lion":
        return optax.scale_by_lion(b1=config.b1, b2=config.b2)
    if config.kind == "adafactor":
        return scale_by_adafactor(logical_axes, config.eps)
    if config.kind == "muon":
        return scale_by_muon_or_adam(logical_axes, config.b1, config.b2, config.eps)
    if config.kind in ("galore", "apollo", "apollo_mini"):
        numbers = config.rank, config.refresh, config.b1, config.b2, config.eps
        return scale_by_low_rank(logical_axes, config.kind, *numbers)
    if config.kind == "sgd":
        return optax.trace(decay=config.b1)
    return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
