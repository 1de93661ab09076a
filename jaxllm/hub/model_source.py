"""Published models in any file format: opens a directory, a GGUF file or a hub repository behind one interface."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from jaxllm.config import closest
from jaxllm.files import DataError
from jaxllm.hub.errors import HubError
from jaxllm.hub.families.families import decoder_config
from jaxllm.hub.gguf.gguf_config import hf_config
from jaxllm.hub.gguf.gguf_file import Gguf, open_gguf
from jaxllm.hub.gguf.gguf_model import find_smollm2, hf_tensors
from jaxllm.hub.huggingface import HubModel, Progress, Put, Tensors, load_tensors, read_model
from jaxllm.hub.packed_weights import PackedOrPlain
from jaxllm.hub.sampling_defaults import SMOLLM2, SamplingDefaults, sampling_defaults_of, sampling_defaults_of_gguf
from jaxllm.models import DecoderConfig
from jaxllm.text import (
    ChatTemplate,
    Tokenizer,
    load_template,
    load_tokenizer,
    template_from_gguf,
    tokenizer_from_gguf,
)

PACKAGED = {"smollm2": find_smollm2}
"""Models that come in a Python package: name -> its file."""
REMOTE = "hf:"
WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken")
"""Files that are downloaded from a repository; never code, never pickles."""


@dataclass(frozen=True)
class ModelSource:
    """A published model as its files have it; each part is read when it is first used.

    Attributes:
        path: the directory or the file.
        format: "hf" (config.json and safetensors) or "gguf".
        source: its ``config.json``, or the equivalent of one.
        tensors: tensors by Hugging Face names.
        gguf: the open GGUF file, if it is one.
    """

    path: Path
    format: Literal["hf", "gguf"]
    source: Mapping[str, Any]
    tensors: Tensors
    gguf: Gguf | None = None

    @functools.cached_property
    def config(self) -> DecoderConfig:
        """Its architecture as a ``DecoderConfig``.

        Raises:
            HubError: the configuration is not supported.
        """
        return decoder_config(self.source)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer.

        Raises:
            DataError: there is none, its kind is unknown, or it has more tokens than the embedding has rows.
        """
        if self.gguf is not None:
            tokenizer = tokenizer_from_gguf(self.gguf.metadata, where=str(self.path))
        else:
            tokenizer = load_tokenizer(self.path)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise DataError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model's embedding has "
                f"{self.config.vocab_size} rows; it is not this model's tokenizer."
            )
        return tokenizer

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """Its chat template, if it has one."""
        if self.gguf is not None:
            return template_from_gguf(self.gguf.metadata, where=str(self.path))
        return load_template(self.path)

    @functools.cached_property
    def sampling(self) -> SamplingDefaults:
        """Sampling defaults that its authors recommend; empty where its files have none."""
        if self.gguf is None:
            return sampling_defaults_of(self.path)
        if own := sampling_defaults_of_gguf(self.gguf.metadata, str(self.path)):
            return own
        with contextlib.suppress(HubError):  # its package is not installed
            return SMOLLM2 if self.path.samefile(find_smollm2()) else {}
        return {}

    def load(
        self,
        *,
        mesh: Mesh | None = None,
        dtype: str = "float32",
        weights: PackedOrPlain = "plain",
        progress: Progress | None = None,
        put: Put | None = None,
    ) -> HubModel:
        """Loads its parameters; see ``load_tensors``.

        Raises:
            HubError: names the problem and the file.
        """
        try:
            return load_tensors(
                self.source, self.tensors, mesh=mesh, dtype=dtype, weights=weights, progress=progress, put=put
            )
        except HubError as error:
            raise HubError(f"{self.path}: {error}") from error


def open_source(path: Path | str) -> ModelSource:
    """Opens a directory with ``config.json`` and safetensors, or a ``.gguf`` file.

    Raises:
        HubError: it is neither, it is damaged, or its architecture is unknown.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not (path / "config.json").is_file() and len(files) == 1:
            path = files[0]
        elif files and not (path / "config.json").is_file():
            raise HubError(f"{path} has several GGUF files; name one: {', '.join(file.name for file in files[:9])}.")
        else:
            try:
                return ModelSource(path, "hf", *read_model(path))
            except HubError as error:
                raise error if str(path) in str(error) else HubError(f"{path}: {error}") from error
    refuse_pickle(path)
    if path.suffix in (".safetensors", ".json"):
        raise HubError(f"{path} is a part of a model; give its directory, {path.parent}.")
    model = open_gguf(path)
    source = hf_config(model)
    return ModelSource(path, "gguf", source, hf_tensors(model, source), model)


def hub_hint(name: Path | str) -> str:
    """Sentence for errors about a path that does not exist but is written as a repository of the Hugging Face hub is.

    "" for other paths; those in a directory that exists are not repositories.
    """
    found = re.fullmatch(r"(?:https?://)?(?:huggingface\.co/|hf\.co/)?([\w.-]+/[\w.-]+)/?", str(name))
    if found is None or Path(name).exists() or (found[1] == str(name) and Path(name).parent.exists()):
        return ""
    return f" Is it a repository of the Hugging Face hub? Write {REMOTE}{found[1]}."


def refuse_pickle(file: Path) -> None:
    """Raises HubError for a file whose name says that it is a pickle."""
    if file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise HubError(f"{file}: pickle files can run any code when opened and are refused; use safetensors or GGUF.")


def find_model(name: Path | str) -> Path:
    """Resolves a model name to a path: a packaged model, ``hf:ORG/NAME`` in the local cache, or a path itself.

    Raises:
        HubError: the package is not installed (gives the command), the hub cannot be reached, or the name is that of a
            repository without ``hf:``.
    """
    name = str(name)
    if not Path(name).expanduser().exists():
        if name in PACKAGED:
            return PACKAGED[name]()
        if (hint := closest(name, PACKAGED)) and not name.startswith(REMOTE):
            raise HubError(f"there is no {name}.{hint}")
        if hint := hub_hint(name):
            raise HubError(
                f"there is no {name} on this machine. Give a run's directory, one with config.json and safetensors, a "
                f".gguf file, {' or '.join(PACKAGED)}.{hint}"
            )
    return fetch(name.removeprefix(REMOTE)) if name.startswith(REMOTE) else Path(name).expanduser()


def fetch(repository: str) -> Path:
    """Downloads a repository of the Hugging Face hub, or one file of it (ORG/NAME/FILE), once, into its cache.

    Raises:
        HubError: huggingface_hub is not installed, there is no such repository, or the network does not reach it.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise HubError(
            f"{REMOTE}{repository}: downloading needs the package huggingface_hub: pip install 'jaxllm[hf]'. "
            "Or give the directory of a model that is on this machine."
        ) from None
    try:
        if repository.count("/") > 1:
            owner, name, file = repository.split("/", 2)
            return Path(huggingface_hub.hf_hub_download(f"{owner}/{name}", file))
        # A second copy of the weights in another library's names, which some repositories have.
        twice = ["consolidated*"]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(WANTED), ignore_patterns=twice))
    except Exception as error:  # the library raises its own, requests' and OS errors
        why = (str(error).splitlines() or [""])[0]
        raise HubError(
            f"{REMOTE}{repository} cannot be downloaded: {type(error).__name__}: {why} "
            "Check the name and the connection, or give the directory of a model that is on this machine."
        ) from error
