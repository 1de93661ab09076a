"""Optimizer of a run as an optax chain: gradient clipping, update rule, decoupled weight decay, learning rate.

The optimizer state is the chain's: moments and other arrays, sharded as the parameters are.
"""

from __future__ import annotations

from typing import Any

import optax

from jaxllm.optim.adafactor import scale_by_adafactor
from jaxllm.optim.adam8bit import quantise_moments
from jaxllm.optim.bfloat16_params import store_in_bfloat16
from jaxllm.optim.config import LAYERWISE, OptimConfig
from jaxllm.optim.layerwise_rules import layerwise, scale_by_param_rms
from jaxllm.optim.low_rank import scale_by_low_rank
from jaxllm.optim.matrix_params import map_matrices
from jaxllm.optim.muon import scale_by_muon_or_adam
from jaxllm.optim.param_groups import auto_sharded, partition_matrices
from jaxllm.optim.schedule_free import schedule_free
from jaxllm.optim.schedules import schedule
from jaxllm.optim.soap import scale_by_soap
from jaxllm.optim.sophia import scale_by_sophia
from jaxllm.optim.streamed_state import streamed_optimizer


def decay_mask(logical_axes: Any) -> Any:
    """Mask of weight decay: True for matrices and embeddings, False for gains and biases.

    Args:
        logical_axes: of the parameters.
    """
    return map_matrices(lambda found: found is not None, logical_axes)


def optimizer(
    config: OptimConfig, total_steps: int, logical_axes: Any, device_every: int = 0
) -> optax.GradientTransformation:
    """Optimizer for parameters with these logical axes.

    ``update`` takes two extra inputs for two rules: "sophia" a ``hessian`` estimate, "schedule_free" gradients taken
    at ``gradient_point`` instead of at the parameters.

    Args:
        config: rule, schedule, weight decay and gradient clipping.
        total_steps: of the run, over which the learning-rate schedule is spread.
        logical_axes: of the parameters.
        device_every: optimizer offload (``jaxllm.train.host_offload``): one of so many layers is updated on the
            device, the others on the host; 0: no offload.
    """
    if config.kind in LAYERWISE:
        return layerwise(lambda axes: layerwise_transform(config, total_steps, axes), logical_axes)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    rate, mask = schedule(config.schedule, total_steps), decay_mask(logical_axes)
    if config.kind == "schedule_free":
        return optax.chain(clip, schedule_free(rate, config.b1, config.b2, config.eps, config.weight_decay, mask))
    if device_every:

        def make(axes: Any) -> optax.GradientTransformation:
            return optax.chain(optax.identity(), _rule(config, axes), *_step(config, rate, decay_mask(axes)))

        return streamed_optimizer(make, clip, logical_axes, device_every)
    return store_in_bfloat16(
        optax.chain(clip, _rule(config, logical_axes), *_step(config, rate, mask)), config.rounding
    )


def layerwise_transform(config: OptimConfig, total_steps: int, logical_axes: Any) -> optax.GradientTransformation:
    """Chain of a rule that updates layer by layer, for one part of the model; it cannot clip by global norm."""
    size = [scale_by_adafactor(logical_axes, config.eps), scale_by_param_rms(logical_axes)]
    rate = schedule(config.schedule, total_steps)
    return optax.chain(*(size if config.kind == "adalomo" else []), *_step(config, rate, decay_mask(logical_axes)))


def _step(config: OptimConfig, rate: optax.Schedule, mask: Any) -> tuple[optax.GradientTransformation, ...]:
    """Last links of a chain: weight decay and learning rate."""
    return optax.add_decayed_weights(config.weight_decay, mask=mask), optax.scale_by_learning_rate(rate)


def _rule(config: OptimConfig, logical_axes: Any) -> optax.GradientTransformation:
    """Update rule: gradients -> updates before weight decay and learning rate."""
    adam = config.b1, config.b2, config.eps
    if config.kind == "lion":
        return optax.scale_by_lion(b1=config.b1, b2=config.b2)
    if config.kind == "adafactor":
        return scale_by_adafactor(logical_axes, config.eps)
    if config.kind == "muon":
        return scale_by_muon_or_adam(logical_axes, *adam)
    if config.kind in ("galore", "apollo", "apollo_mini"):
        return scale_by_low_rank(logical_axes, config.kind, config.rank, config.every, *adam, config.moments)
    if config.kind == "soap":
        return scale_by_soap(logical_axes, config.every, *adam)
    if config.kind == "sophia":
        return scale_by_sophia(*adam)
    if config.kind == "sgd":
        return optax.trace(decay=config.b1)
    plain = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.moments == "float32":
        return plain
    small = auto_sharded(quantise_moments(config.moments, plain, first="mu", second="nu"))
    return partition_matrices(logical_axes, lambda _: small, plain)
