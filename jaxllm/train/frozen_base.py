"""Frozen base of a run with an adapter: its parameters come from ``init_from`` at each start and are in no checkpoint.

A checkpoint has the trained parameters, the source of the base and a hash of its values; a resumed run loads the
base again and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jaxllm.config import ConfigError
from jaxllm.models import Functional
from jaxllm.models.param_subset import merge, select
from jaxllm.peft.adapted_model import start_params, targeted
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.peft.base_hash import base_hash
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.train.config import RunConfig
from jaxllm.train.init_from import InitialModel
from jaxllm.train.run_model import base_model, saved_params
from jaxllm.train.step.train_state import TrainState

BaseGradients = Callable[[RunConfig, Any], Any]
"""``(run, base) -> gradients`` of the run's trainable parameters on its first batches."""


class FrozenBase:
    """Frozen base of a run's adapter.

    Args:
        config: the run, which has an adapter.
        model: the adapted model.
        mesh: of the run.
        init_model: the base.

    Raises:
        ConfigError: the run starts from no model.
    """

    def __init__(self, config: RunConfig, model: Functional, mesh: Mesh, init_model: InitialModel | None):
        if init_model is None:
            raise ConfigError(
                f"adapter.kind = {config.adapter.kind!r} adapts a trained model, but the run starts from none; set "
                "init_from, such as --init-from smollm2."
            )
        self._config, self._model, self._mesh, self._init_model = config, model, mesh, init_model
        self._saved = saved_params(config, model)
        self._hash = ""

    def start_params(self, gradients: BaseGradients | None = None) -> Any:
        """Parameters before training: the base, read again, and fresh adapters; the caller may donate them.

        Args:
            gradients: gradients of the base on the first batches, for methods that start from them; None: the adapters
                will be replaced by those of a checkpoint.
        """
        config = self._config
        base = self._init_model.load(self._mesh, config.model.param_dtype)
        self._hash = base_hash(base)
        needed = gradients is not None and ADAPTER_METHODS[config.adapter.kind].needs_gradients
        found = gradients(self.without_adapter(), base) if needed and gradients is not None else None
        return start_params(self._model, config.adapter, base, self._mesh, config.seed, found)

    def without_adapter(self) -> RunConfig:
        """The run with the targeted matmuls of the base as its trainable parameters, and no adapter."""
        paths = targeted(base_model(self._config), self._config.adapter.targets)
        return replace(self._config, adapter=AdapterConfig(), trainable=tuple(paths))

    def facts(self) -> dict[str, str]:
        """Source of the base and hash of its values, for checkpoints; after ``start_params``."""
        return {"source": self._config.init_from, "hash": self._hash}

    def without_base(self, state: TrainState) -> TrainState:
        """State with None in place of the parameters that are not trained, as checkpoints have it."""
        return replace(state, params=select(self._saved, state.params))

    def with_base(self, state: TrainState, params: Any) -> TrainState:
        """Inverse of ``without_base``: a restored state with the other parameters of ``params``."""
        return replace(state, params=merge(state.params, params))


def trained_only(base: FrozenBase | None, state: TrainState) -> TrainState:
    """State as checkpoints have it: without the parameters of a frozen base."""
    return state if base is None else base.without_base(state)
