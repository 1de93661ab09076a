"""Optimizer of a run as an optax chain: gradient clipping, update rule, decoupled weight decay, learning rate.

The optimizer state is the chain's: moments and other arrays, sharded as the parameters are.
"""

from __future__ import annotations

from typing import Any

import optax

from jaxllm.optim.bfloat16_params import store_in_bfloat16
from jaxllm.optim.config import OptimConfig
from jaxllm.optim.layerwise_rules import layerwise, layerwise_transforms
from jaxllm.optim.optimizer_table import OPTIMIZERS
from jaxllm.optim.schedules import schedule
from jaxllm.optim.streamed_state import Make, streamed_optimizer


def optimizer(
    config: OptimConfig, total_steps: int, logical_axes: Any, device_every: int = 0
) -> optax.GradientTransformation:
    """Optimizer for parameters with these logical axes.

    Some need more of the training step than gradients at the parameters: the row's ``hooks`` say what
    (``jaxllm.optim.optimizer_spec.StepHooks``).

    Args:
        config: rule, schedule, weight decay and gradient clipping.
        total_steps: of the run, over which the learning-rate schedule is spread.
        logical_axes: of the parameters.
        device_every: optimizer offload (``jaxllm.train.host_offload``): one of so many layers is updated on the
            device, the others on the host; 0: no offload.
    """
    spec = OPTIMIZERS[config.kind]
    rate = schedule(config.schedule, total_steps)
    if spec.layerwise:
        return layerwise(lambda axes: optax.chain(*spec.links(config, axes, rate)), logical_axes)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    if device_every:
        return streamed_optimizer(layer_optimizer(config, total_steps), clip, logical_axes, device_every)
    return store_in_bfloat16(optax.chain(clip, *spec.links(config, logical_axes, rate)), config.rounding)


def layer_optimizer(config: OptimConfig, total_steps: int) -> Make:
    """Logical axes of a part of the parameters -> optimizer of the part, which takes clipped gradients.

    The part of an optimizer that streams (``OptimizerSpec.streamable``): its state is that part of the whole state.

    Args:
        config, total_steps: as for ``optimizer``.
    """
    links, rate = OPTIMIZERS[config.kind].links, schedule(config.schedule, total_steps)

    def make(axes: Any) -> optax.GradientTransformation:
        return optax.chain(optax.identity(), *links(config, axes, rate))

    return make


def layerwise_parts(config: OptimConfig, total_steps: int, logical_axes: Any) -> dict[str, Any]:
    """Transformations of a layerwise optimizer by part of the model, for the steps that apply them.

    Args:
        config, total_steps, logical_axes: as for ``optimizer``.
    """
    links, rate = OPTIMIZERS[config.kind].links, schedule(config.schedule, total_steps)
    return layerwise_transforms(lambda axes: optax.chain(*links(config, axes, rate)), logical_axes)
