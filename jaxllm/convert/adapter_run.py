"""Runs with an adapter: their base, which is in no checkpoint, and the adapter of one of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import sharding
from jaxllm.checkpoint import Checkpointer
from jaxllm.config import from_dict
from jaxllm.convert.run_files import BESIDE_MODEL, RunFiles
from jaxllm.models import Functional, functional
from jaxllm.models.param_subset import merge, select, trainable_mask
from jaxllm.peft.adapted_model import adapted_model, adapter_of, merge_adapters, start_params
from jaxllm.peft.adapter import Adapter, AdapterError
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.peft.base_hash import base_hash, is_other_base
from jaxllm.peft.method_table import ADAPTER_METHODS

LoadBase = Callable[[str, Mesh], Any]
"""``(name, mesh) -> params`` of the model that a run starts from."""


@dataclass(frozen=True)
class AdapterRun:
    """A run with an adapter, at one of its checkpoints.

    Attributes:
        run: its files.
        config: its adapter.
        trainable: patterns of parameters that were trained besides.
    """

    run: RunFiles
    config: AdapterConfig
    trainable: tuple[str, ...]

    @property
    def base(self) -> str:
        """Name of the model that it starts from, as ``find_model`` takes it."""
        return self.run.meta["base"]["source"]

    @property
    def model(self) -> Functional:
        """Functions of the adapted model."""
        return adapted_model(functional(self.run.config), self.config)

    def adapter(self, checkpointer: Checkpointer, step: int | None) -> Adapter:
        """The adapter of a checkpoint, on the host; the base is not read.

        Raises:
            AdapterError: no file format has an adapter of this kind.
        """
        if self.config.has_experts:
            raise AdapterError(
                f"{self.run.path} has an adapter of the kind {self.config.kind}, for which the library peft has no "
                "files; use the run as it is (generate, chat, serve, eval)."
            )
        targets = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), self._trained(self.model.abstract()))
        trained, _ = checkpointer.restore_params(targets, step=step, beside=BESIDE_MODEL)
        facts = self.run.meta["base"]
        return replace(adapter_of(self.config, trained), base=facts["source"], base_hash=facts["hash"])

    def merged_params(self, checkpointer: Checkpointer, step: int | None, mesh: Mesh, load_base: LoadBase) -> Any:
        """Dense parameters with the adapter of a checkpoint merged into the base, in the dtype of the run.

        Raises:
            AdapterError: the base is another one than that of the run, or the adapter is no change of weights.
        """
        if ADAPTER_METHODS[self.config.kind].architecture is not None:
            what = "virtual tokens" if self.config.virtual_tokens else "experts of its own"
            raise AdapterError(
                f"{self.run.path} has {what} ({self.config.kind}), which cannot be merged into weights: use the run as "
                "it is (generate, chat, serve, eval)."
            )
        return self.served(checkpointer, step, mesh, load_base)[1]

    def served(
        self, checkpointer: Checkpointer, step: int | None, mesh: Mesh, load_base: LoadBase
    ) -> tuple[Functional, Any]:
        """Model and parameters for use: adapted weights are merged, virtual tokens and experts are part of the model.

        Raises:
            AdapterError: the base is another one than that of the run.
        """
        model, dtype = self.model, jnp.dtype(self.run.config.param_dtype)
        base = load_base(self.base, mesh)
        with jax.set_mesh(mesh):
            base = jax.tree.map(lambda leaf: leaf.astype(dtype), base)
        facts = self.run.meta["base"]
        if is_other_base(facts["hash"], found := base_hash(base)):
            raise AdapterError(
                f"{self.run.path} has adapters of {facts['source']} with the hash {facts['hash']}, which now has the "
                f"hash {found}: it is another model. Put the original one back."
            )
        start = start_params(model, self.config, base, mesh, 0)
        abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        trained, _ = checkpointer.restore_params(self._trained(abstract), step=step, beside=BESIDE_MODEL)
        with jax.set_mesh(mesh):
            params = merge_adapters(model, merge(trained, start))
        return replace(model, adapt=None), params

    def _trained(self, tree: Any) -> Any:
        method = ADAPTER_METHODS[self.config.kind]
        patterns = (*method.trained, *method.kept, *self.trainable)
        return select(trainable_mask(self.model, patterns), tree)


def adapter_run(run: RunFiles) -> AdapterRun | None:
    """The run as one with an adapter; None if it has none."""
    given = run.meta.get("config", {})
    config = from_dict(AdapterConfig, given.get("adapter", {}), "the checkpoint's adapter")
    return AdapterRun(run, config, tuple(given.get("trainable", ()))) if config else None
