"""Model of a run: its architecture with sharding rules and adapters, and which of its parameters are trained."""

from __future__ import annotations

from typing import Any

from jaxllm.models import Functional, functional
from jaxllm.models.param_subset import trainable_mask
from jaxllm.models.value_head import VALUE_HEAD, with_value_head
from jaxllm.peft.adapted_model import adapted_model
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.train.config import RunConfig
from jaxllm.train.step.objective import make_objective


def run_model(config: RunConfig) -> Functional:
    """Functions of a run's model, with its adapters, and with a value head where its objective has one.

    Raises:
        ConfigError: a target of the adapters matches nothing.
    """
    model = adapted_model(base_model(config), config.adapter)
    return with_value_head(model) if has_value_head(config) else model


def has_value_head(config: RunConfig) -> bool:
    """Whether a run's parameters have a value head."""
    return make_objective(config.objective, config.z_loss).value_head


def base_model(config: RunConfig) -> Functional:
    """Functions of a run's model without adapters."""
    return functional(config.model, config.parallel.rules())


def saved_params(config: RunConfig, model: Functional) -> Any:
    """Tree of booleans, True for the parameters that checkpoints of a run with an adapter have: all but its base's."""
    method = ADAPTER_METHODS[config.adapter.kind]
    return trainable_mask(model, (*method.trained, *method.kept, *config.trainable, *_critic(config)))


def _critic(config: RunConfig) -> tuple[str, ...]:
    return (VALUE_HEAD,) if has_value_head(config) else ()


def trained_params(config: RunConfig, model: Functional) -> Any:
    """Tree of booleans, True for the parameters that a run trains; None for all.

    Args:
        model: of the run (``run_model``).

    Raises:
        ConfigError: a pattern of ``trainable`` matches nothing.
    """
    own = ADAPTER_METHODS[config.adapter.kind].trained if config.adapter else ()
    patterns = (*own, *config.trainable)
    return trainable_mask(model, (*patterns, *_critic(config)) if patterns else ())
