"""Beginning a run from a model that exists instead of from random parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import sharding
from jaxllm.checkpoint import Checkpointer
from jaxllm.config import ConfigError, differences, from_dict
from jaxllm.hub import find_model, open_source
from jaxllm.models import DecoderConfig, functional
from jaxllm.text import ChatTemplate, Tokenizer, load_template, load_tokenizer

OURS = ("embed_grad", "param_dtype", "dtype", "matmul_precision", "remat", "unroll")
"""Fields of the architecture that a run chooses; the others are the model's."""


@dataclass(frozen=True)
class Beginning:
    """A model to begin from.

    Attributes:
        config: its architecture.
        tokenizer: its tokenizer.
        template: its chat template, if it has one.
        source: the ``config.json`` it came with, if it is another library's.
        load: its parameters on a mesh, in a dtype.
    """

    config: DecoderConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: Mapping[str, Any] | None
    load: Callable[[Mesh, str], Any]


def beginning(init_from: str, model: DecoderConfig) -> Beginning:
    """The model that ``init_from`` names: a run's directory, a converted checkpoint, or another library's model.

    Raises:
        HubError, CheckpointError: there is no such model, it is damaged, or it is not understood.
        ConfigError: ``model`` is another architecture; lists the differences.
    """
    path = find_model(init_from)
    found = _of_run(path) if (path / "checkpoints").is_dir() else _of_files(path)
    theirs = replace(found.config, **{name: getattr(model, name) for name in OURS})
    if changed := differences(theirs, model):
        listed = "\n  ".join(f"model.{d}" for d in changed)
        raise ConfigError(
            f"init_from = {init_from!r} has another architecture than the run's model:\n  {listed}\n"
            "(the model's own -> the run's). Take it as it is: model=open_source(find_model(init_from)).config."
        )
    return found


def _of_files(path: Path) -> Beginning:
    source = open_source(path)
    return Beginning(
        source.config,
        source.tokenizer,
        source.template,
        source.source,
        lambda mesh, dtype: source.load(mesh=mesh, dtype=dtype).params,
    )


def _of_run(path: Path) -> Beginning:
    with Checkpointer(path / "checkpoints", read_only=True) as checkpointer:
        meta = checkpointer.read_meta()
    config = from_dict(DecoderConfig, meta["config"]["model"], "the checkpoint's model")

    def load(mesh: Mesh, dtype: str) -> Any:
        model = functional(config)
        abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        with Checkpointer(path / "checkpoints", read_only=True) as checkpointer:
            params, _ = checkpointer.restore_params(abstract)
        with jax.set_mesh(mesh):
            return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params)

    folder = path / "tokenizer"
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != meta["tokenizer"]:
        raise ConfigError(f"{folder} is not the tokenizer that the checkpoint in {path} was trained with.")
    return Beginning(config, tokenizer, load_template(folder), meta.get("source"), load)
