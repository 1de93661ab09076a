"""Model of a run: its architecture with sharding rules and adapters, and which of its parameters are trained."""

from __future__ import annotations

from typing import Any

from jaxllm.models import Functional, functional
from jaxllm.models.param_subset import trainable_mask
from jaxllm.peft.adapted_model import adapted_model
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.train.config import RunConfig


def run_model(config: RunConfig) -> Functional:
    """Functions of a run's model, with its adapters.

    Raises:
        ConfigError: a target of the adapters matches nothing.
    """
    return adapted_model(base_model(config), config.adapter)


def base_model(config: RunConfig) -> Functional:
    """Functions of a run's model without adapters."""
    return functional(config.model, config.parallel.rules())


def saved_params(config: RunConfig, model: Functional) -> Any:
    """Tree of booleans, True for the parameters that checkpoints of a run with an adapter have: all but its base's."""
    method = ADAPTER_METHODS[config.adapter.kind]
    return trainable_mask(model, (*method.trained, *method.kept, *config.trainable))


def trained_params(config: RunConfig, model: Functional) -> Any:
    """Tree of booleans, True for the parameters that a run trains; None for all.

    Args:
        model: of the run (``run_model``).

    Raises:
        ConfigError: a pattern of ``trainable`` matches nothing.
    """
    own = ADAPTER_METHODS[config.adapter.kind].trained if config.adapter else ()
    return trainable_mask(model, (*own, *config.trainable))
