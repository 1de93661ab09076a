"""Initialisation from an existing model (``init_from``) instead of from random parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import keystr

import sharding
from jaxllm.checkpoint.restore import RestoreOptions
from jaxllm.config import ConfigError, differences
from jaxllm.convert.adapter_run import adapter_run
from jaxllm.convert.load import load_params
from jaxllm.convert.run_files import BESIDE_MODEL, TokenizerMismatchError, open_checkpoints, read_run
from jaxllm.hub import find_model, open_source
from jaxllm.models import DecoderConfig, functional
from jaxllm.text import ChatTemplate, Tokenizer
from jaxllm.train.disk.state_files import put_on_disk

RUN_FIELDS = ("embed_grad", "param_dtype", "dtype", "matmul_precision", "remat", "unroll", "residual")
"""Fields of the architecture that the run chooses; all others must be the model's. None of them changes what parameters
there are, so that plain layers can be fine-tuned into ladder ones."""


@dataclass(frozen=True)
class InitialModel:
    """A model to initialise a run from.

    Attributes:
        config: its architecture.
        tokenizer: its tokenizer.
        template: its chat template, or None.
        source: the ``config.json`` of a model of another library, or None.
        load: ``(mesh, dtype) -> params``: its parameters, sharded over a mesh. A third argument is a tree of the
            parameters in which ``DiskLeaf`` takes the values of its parameter as soon as they are loaded.
    """

    config: DecoderConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: Mapping[str, Any] | None
    load: Callable[..., Any]


def open_initial_model(init_from: str, model: DecoderConfig) -> InitialModel:
    """Opens the model that ``init_from`` names: a run directory, a converted checkpoint, or another library's model.

    Args:
        init_from: see ``RunConfig.init_from``.
        model: architecture of the run.

    Raises:
        HubError, CheckpointError: there is no such model, it is damaged, or its format is not supported.
        ConfigError: ``model`` is a different architecture; lists the differences.
    """
    path = find_model(init_from)
    found = _from_run(path) if (path / "checkpoints").is_dir() else _from_files(path)
    stored = replace(found.config, **{name: getattr(model, name) for name in RUN_FIELDS})
    if changed := differences(stored, model):
        listed = "\n  ".join(f"model.{d}" for d in changed)
        raise ConfigError(
            f"init_from = {init_from!r} has a different architecture from the run's model:\n  {listed}\n"
            "(init_from's -> the run's). To use it as it is: model=open_source(find_model(init_from)).config."
        )
    return found


def _from_files(path: Path) -> InitialModel:
    """Model in this project's converted format or another library's."""
    source = open_source(path)
    return InitialModel(
        source.config,
        source.tokenizer,
        source.template,
        source.source,
        lambda mesh, dtype, targets=None: source.load(mesh=mesh, dtype=dtype, put=_into(targets)).params,
    )


def _into(targets: Any) -> Callable[[str, Any], Any] | None:
    """Function ``(path, parameter) -> what takes its place``; None where all parameters stay in memory."""
    if targets is None:
        return None
    by_path = {keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(targets)}
    return lambda path, value: put_on_disk(value, by_path[path])


def _from_run(path: Path) -> InitialModel:
    """Newest checkpoint of a run."""
    with open_checkpoints(path) as checkpointer:
        run = read_run(path, checkpointer)

    def load(mesh: Mesh, dtype: str, targets: Any = None) -> Any:
        model = functional(run.config)
        abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        with open_checkpoints(path) as checkpointer:
            if (adapted := adapter_run(run)) is not None:
                params = adapted.merged_params(checkpointer, None, mesh, load_params)
            elif targets is not None:
                cast = RestoreOptions(cast=True)
                return checkpointer.restore_params(targets, beside=BESIDE_MODEL, reading=cast)[0]
            else:
                params, _ = checkpointer.restore_params(abstract, beside=BESIDE_MODEL)
        with jax.set_mesh(mesh):
            return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params)

    try:
        tokenizer = run.tokenizer()
    except TokenizerMismatchError:
        message = f"{path / 'tokenizer'} is not the tokenizer that the checkpoint in {path} was trained with."
        raise ConfigError(message) from None
    return InitialModel(run.config, tokenizer, run.template(), run.source, load)
