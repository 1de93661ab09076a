"""Frozen reference model of a run: parameters beside the trained ones, which score batches for the objective.

They are sharded as the trained ones are, and are in neither the optimizer nor the checkpoints: a checkpoint has their
source and a checksum, and a resumed run loads them again. A run that trains nothing but the adapter of its model has
the reference in its own state: the base, without a second copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

import sharding
from jaxllm.config import ConfigError
from jaxllm.models import Functional
from jaxllm.models.params import at_least_f32
from jaxllm.models.value_head import without_value_head
from jaxllm.peft.adapted_model import base_params
from jaxllm.peft.base_hash import params_checksum
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.text import Tokenizer
from jaxllm.train.config import RunConfig
from jaxllm.train.init_from import InitialModel, open_initial_model
from jaxllm.train.run_model import run_model, trained_params
from jaxllm.train.step.loss import token_logprobs
from jaxllm.train.step.train_state import initial_params

START = "start"
"""Value of ``RunConfig.reference``: the parameters that the run starts from."""


class ReferenceModel:
    """Frozen parameters of a reference model, loaded at their first use.

    Args:
        config: the run, which has a ``reference``.
        model: the architecture.
        mesh: of the run.
        init_model: the model that the run starts from, or None.

    Raises:
        ConfigError, HubError, CheckpointError: there is no such model, or it has another architecture.
    """

    def __init__(self, config: RunConfig, model: Functional, mesh: Mesh, init_model: InitialModel | None):
        self.source, self._config, self._model, self._mesh = config.reference, config, model, mesh
        self._opened = init_model if self.source == START else open_initial_model(self.source, config.model)
        self._params: Any = None
        self.is_base = self.source == START and trains_adapter_only(config)

    @property
    def params(self) -> Any:
        """The parameters, on the devices of the run."""
        if self._params is None:
            model, mesh = self._model, self._mesh
            abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
            there = sharding.shardings_of(abstract)
            if self._opened is None:
                with jax.set_mesh(mesh):
                    self._params = initial_params(model, self._config.seed, there)
            else:
                loaded = self._opened.load(mesh, self._config.model.param_dtype)
                self._params = jax.tree.map(jax.device_put, loaded, there)
        return self._params

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Checks that another model's tokens are those of the run; raises ConfigError.

        Models of one family may end texts differently; what counts is that each id is the same token.
        """
        own = None if self.source == START or self._opened is None else self._opened.tokenizer
        if own is None:
            return
        if own.token_bytes != tokenizer.token_bytes or own.special_names != tokenizer.special_names:
            raise ConfigError(
                f"reference = {self.source!r} has another tokenizer than the run ({own.vocab_size} tokens, the run's "
                f"data.tokenizer = {self._config.data.tokenizer!r} has {tokenizer.vocab_size}): its log-probabilities "
                'would be those of other texts. Give a reference of the same family, or reference = "start".'
            )

    def facts(self) -> dict[str, str]:
        """Source and checksum of the parameters, for checkpoints; those of a run's own base are among its facts."""
        return {"source": self.source} | ({} if self.is_base else {"checksum": params_checksum(self.params)})

    def compile_scorer(self, batch: Any, options: Any, trained: Any) -> Callable[[Any, Any], Any]:
        """Compiled function ``(params, batch) -> batch`` that adds ``reference_logprobs`` to a batch.

        Args:
            batch: shapes and shardings of the data source's batches.
            options: of the compiler.
            trained: shapes and shardings of the run's parameters, which have the base where that is the reference.
        """
        config, own = self._config, self.is_base
        params = base_params(trained) if own else self.params

        def score(params: Any, batch: Any) -> Array:
            shared: dict[str, Any] = {"accumulate": config.accumulate, "layout": config.parallel.layout}
            return token_logprobs(self._model, params, batch, **shared)[0]

        with jax.set_mesh(self._mesh):
            compiled = jax.jit(score).lower(params, batch).compile(compiler_options=options)

        frozen = None if own else params

        def add_scores(trained: Any, batch: Any) -> Any:
            return batch._replace(reference_logprobs=compiled(base_params(trained) if own else frozen, batch))

        return add_scores

    def scores(self, batch: Any) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the ``reference_logprobs`` of a batch."""
        dtype = at_least_f32(jnp.dtype(self._config.model.dtype))
        return jax.ShapeDtypeStruct(batch.tokens.shape, dtype, sharding=batch.tokens.sharding)


def trains_adapter_only(config: RunConfig) -> bool:
    """Whether the base of a run's adapter stays as it was loaded, so that the run without its adapter is its start."""
    method = ADAPTER_METHODS[config.adapter.kind] if config.adapter else None
    if method is None or method.declare is None or method.needs_gradients or method.architecture is not None:
        return False
    return not any(jax.tree.leaves(without_value_head(base_params(trained_params(config, run_model(config))))))
