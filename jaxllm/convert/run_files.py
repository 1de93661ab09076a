"""Run files: architecture, tokenizer and chat template of a run's directory, read from one of its checkpoints.

A run's directory has ``checkpoints/`` and ``tokenizer/``; so has a model that ``jaxllm convert --to jaxllm`` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.checkpoint import Checkpointer
from jaxllm.config import from_dict
from jaxllm.files import DataError
from jaxllm.hub import HubError
from jaxllm.hub.sampling_defaults import SamplingDefaults, sampling_defaults_of
from jaxllm.models import DecoderConfig
from jaxllm.models.value_head import VALUE_HEAD
from jaxllm.text import ChatTemplate, Tokenizer, load_template, load_tokenizer

BESIDE_MODEL = (VALUE_HEAD,)
"""Paths of parameters in checkpoints that are no part of the architecture; a model that is loaded has none of them."""


class TokenizerMismatchError(DataError):
    """A run's tokenizer is not the one that its checkpoint was trained with."""


@dataclass(frozen=True)
class RunFiles:
    """Files of a run, for one of its checkpoints; no parameters.

    Attributes:
        path: directory of the run.
        meta: metadata of the checkpoint: configuration, data cursor, versions.
        config: architecture of the model.
    """

    path: Path
    meta: dict[str, Any]
    config: DecoderConfig

    @property
    def source(self) -> Mapping[str, Any] | None:
        """Hugging Face ``config.json`` of a model that was imported, or None."""
        return self.meta.get("source")

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer that the checkpoint was trained with; None if the model has no tokenizer."""
        return self.meta["tokenizer"]

    def stored_tokenizer(self) -> Tokenizer:
        """Tokenizer in the run's directory, whichever it is.

        Raises:
            DataError: there is none, or it is damaged.
        """
        return load_tokenizer(self.path / "tokenizer")

    def tokenizer(self) -> Tokenizer:
        """Tokenizer that the checkpoint was trained with.

        Raises:
            TokenizerMismatchError: the run's directory has another one.
            DataError: there is none, or it is damaged.
        """
        return checked_tokenizer(self.path, self.fingerprint)

    def template(self) -> ChatTemplate | None:
        """Chat template, or None."""
        return load_template(self.path / "tokenizer")

    def sampling(self) -> SamplingDefaults:
        """Sampling defaults of the model that it was converted from; empty for a model that was trained here."""
        return sampling_defaults_of(self.path / "tokenizer")


def open_checkpoints(path: Path) -> Checkpointer:
    """Opens the checkpoints of a run's directory read-only."""
    return Checkpointer(path / "checkpoints", read_only=True)


def read_run(path: Path, checkpointer: Checkpointer, step: int | None = None) -> RunFiles:
    """Reads the metadata of a run's checkpoint.

    Args:
        path: directory of the run.
        checkpointer: its checkpoints, see ``open_checkpoints``.
        step: step of the checkpoint; the newest by default.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    meta = checkpointer.read_meta(step)
    return RunFiles(path, meta, from_dict(DecoderConfig, meta["config"]["model"], "the checkpoint's model"))


def params_prefix(path: Path, checkpointer: Checkpointer, step: int | None, ema: bool) -> str:
    """Path of the parameters in a run's checkpoint, or of their average (``RunConfig.ema``).

    Args:
        path, checkpointer, step: as for ``read_run``.
        ema: whether the average is wanted.

    Raises:
        HubError: the run has no average.
    """
    if not ema:
        return "params"
    if not any(name.startswith("ema/") for name in checkpointer.manifest(step).leaves):
        raise HubError(f"{path} has no average of its parameters: it was trained with ema.decay = 0. Leave ema out.")
    return "ema"


def checked_tokenizer(path: Path, fingerprint: str | None) -> Tokenizer:
    """Tokenizer in a run's directory, if it has this fingerprint.

    Raises:
        TokenizerMismatchError: it has another one.
        DataError: there is none, or it is damaged.
    """
    tokenizer = load_tokenizer(path / "tokenizer")
    if tokenizer.fingerprint != fingerprint:
        raise TokenizerMismatchError(
            f"{path / 'tokenizer'} is not the tokenizer this checkpoint was trained with (fingerprint "
            f"{tokenizer.fingerprint[:12]}, the checkpoint has {str(fingerprint)[:12]}); its tokens would mean other "
            "text. Put the run's own tokenizer files back."
        )
    return tokenizer
