"""Model inspection: what a model's files contain and how it would be loaded, from headers only; no weight is read.

Errors in the files are reported as findings.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from jaxllm.checkpoint import CheckpointError
from jaxllm.config import to_dict
from jaxllm.convert.convert import has_tokenizer
from jaxllm.convert.run_files import open_checkpoints, read_run
from jaxllm.files import DataError
from jaxllm.hub import HubError, decoder_config, find_model, safetensors
from jaxllm.hub.families.config_json import config_json
from jaxllm.hub.families.families import family
from jaxllm.hub.gguf.gguf_config import hf_config
from jaxllm.hub.gguf.gguf_file import open_gguf
from jaxllm.hub.gguf.gguf_model import TransformedTensor, hf_tensors
from jaxllm.hub.huggingface import leaves_by_path, match_names, read_config
from jaxllm.hub.model_source import refuse_pickle
from jaxllm.hub.quantised_checkpoints import BLOCKS, CONFIG_KEY, SCALES, dequantise_tensors, without_quantisation
from jaxllm.models import DecoderConfig, functional
from jaxllm.text import (
    ChatTemplate,
    Tokenizer,
    load_template,
    load_tokenizer,
    template_from_gguf,
    tokenizer_from_gguf,
)

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """Tensor of a file.

    Attributes:
        name: name in the file.
        shape: shape in the file.
        kind: dtype or quantised format.
        bytes: size in the file.
        ours: parameter of jaxllm that it becomes, or how else it is used; a key of the JSON output.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    bytes: int
    ours: str = "not used"


@dataclass
class Inspection:
    """Result of an inspection.

    Attributes:
        path: path of the files.
        format: "Hugging Face", "GGUF", or "jaxllm run".
        family: name of the family in transformers or in the file; None if unknown.
        config: architecture; None if it is not supported.
        parameters: number of parameters; of an unsupported model, number of elements of the tensors.
        bytes: size of all tensors in the files.
        tensors: tensors of the files.
        tokenizer: properties of the tokenizer by name; None if there is none.
        templates: chat templates by name.
        loading: sentences about how the model would be loaded.
        findings: sentences about errors.
    """

    path: str
    format: str
    family: str | None = None
    config: DecoderConfig | None = None
    parameters: int = 0
    bytes: int = 0
    tensors: list[TensorInfo] = field(default_factory=list)
    tokenizer: dict[str, Any] | None = None
    templates: dict[str, str] = field(default_factory=dict)
    loading: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def attempt(self, what: Callable[[], T]) -> T | None:
        """Returns the result of a function; an error in the files becomes a finding instead."""
        try:
            return what()
        except (HubError, DataError, CheckpointError) as error:
            self.findings.append(str(error))
            return None

    def to_json(self) -> dict[str, Any]:
        """JSON values of the inspection."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["config"] = self.config and to_dict(self.config)
        plain["tensors"] = [dataclasses.asdict(t) | {"shape": list(t.shape)} for t in self.tensors]
        return plain


def inspect_model(name: Path | str) -> Inspection:
    """Inspects a run, a directory in Hugging Face's format, a GGUF file, ``smollm2`` or ``hf:ORG/NAME``.

    Raises:
        HubError: there is nothing of that name, or it is not a model's file.
    """
    path = find_model(name)
    if not path.exists():
        raise HubError(f"there is no {path}; give a run's directory, one with config.json and safetensors, or a .gguf.")
    if (path / "checkpoints").is_dir():
        found = _run(path)
    elif path.is_dir() and ((path / "config.json").is_file() or not list(path.glob("*.gguf"))):
        found = _hf(path)
    else:
        refuse_pickle(path)
        found = _gguf(path if path.is_file() else sorted(path.glob("*.gguf"))[0])
    found.bytes = sum(tensor.bytes for tensor in found.tensors)
    if found.config is None:
        found.parameters = sum(math.prod(tensor.shape) for tensor in found.tensors)
    else:
        leaves = leaves_by_path(functional(found.config).abstract()).values()
        found.parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    return found


def _hf(path: Path) -> Inspection:
    found = Inspection(str(path), "Hugging Face")
    given = found.attempt(lambda: read_config(path)) or {}
    found.family = given.get("model_type")
    source = found.attempt(lambda: without_quantisation(given)) or {}
    if source:
        found.config = found.attempt(lambda: decoder_config(source))
    tensors = _headers(path, found)
    infos = {n: TensorInfo(n, t.shape, str(t.dtype), t.nbytes) for n, t in tensors.items()}
    plain = (found.attempt(lambda: dequantise_tensors(given, tensors)) or tensors) if source else tensors
    if plain is not tensors:
        method = given[CONFIG_KEY]["quant_method"]
        found.loading.append(f"Matrices are quantised ({method}); they are dequantised as they are read.")
        parts = {n: info for n, info in infos.items() if n not in plain}
        infos = {n: infos.get(n) or _quantised(n, plain[n], parts) for n in plain}
        found.tensors = []
    _match(found, source, plain, infos)
    if has_tokenizer(path):
        _tokenizer(found, lambda: load_tokenizer(path))
    _template(found, lambda: load_template(path))
    return found


def _quantised(name: str, tensor: Any, parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """Tensor that several stored tensors represent."""
    own = [parts[n] for n in (name + BLOCKS, name + SCALES) if n in parts]
    return TensorInfo(name, tensor.shape, " + ".join(one.kind for one in own), sum(one.bytes for one in own))


def _headers(path: Path, found: Inspection) -> dict[str, Any]:
    """Tensors of all files that can be opened."""
    tensors: dict[str, Any] = {}
    if not (path / safetensors.INDEX).exists():
        return found.attempt(lambda: safetensors.open_model(path)) or tensors
    where = found.attempt(lambda: safetensors.read_index(path / safetensors.INDEX)) or {}
    for shard in sorted(set(where.values())):
        tensors |= found.attempt(functools.partial(safetensors.open_shard, path, shard, where, dict(tensors))) or {}
    return tensors


def _gguf(path: Path) -> Inspection:
    found = Inspection(str(path), "GGUF")
    model = found.attempt(lambda: open_gguf(path))
    if model is None:
        return found
    found.family = str(model.metadata.get("general.architecture"))
    source = found.attempt(lambda: hf_config(model)) or {}
    infos = {n: TensorInfo(n, t.shape, t.kind, t.nbytes, "read into the config") for n, t in model.tensors.items()}
    if source:
        found.config = found.attempt(lambda: decoder_config(source))
        tensors = hf_tensors(model, source)
        raw = {n: t.tensor.name if isinstance(t, TransformedTensor) else t.name for n, t in tensors.items()}
        _match(found, source, tensors, {n: infos[raw[n]] for n in tensors})
        found.tensors += [info for name, info in infos.items() if name not in raw.values()]
    else:
        found.tensors = [dataclasses.replace(info, ours="not known") for info in infos.values()]
    if "tokenizer.ggml.model" in model.metadata:
        _tokenizer(found, lambda: tokenizer_from_gguf(model.metadata, where=str(path)))
    _template(found, lambda: template_from_gguf(model.metadata, where=str(path)))
    return found


def _match(
    found: Inspection, source: Mapping[str, Any], tensors: Mapping[str, Any], infos: Mapping[str, TensorInfo]
) -> None:
    """Matches tensors to parameters; fills in ``tensors``, ``loading`` and ``findings``."""
    if found.config is None:
        found.tensors = [dataclasses.replace(info, ours="not known") for info in infos.values()]
        return
    config, table = found.config, family(source).table
    names = match_names(table, config, leaves_by_path(functional(config).abstract()), tensors)
    found.findings += [f"{problem}." for problem in names.problems]
    ours = {name: ", ".join(map(str, theirs.parts)) for name, theirs in names.wanted.items()}
    ours |= {name: f"the same as {own}" for name, own in names.twice.items()}
    ours |= dict.fromkeys(names.carried, "carried to an export")
    found.tensors = [dataclasses.replace(info, ours=ours.get(n, "not used")) for n, info in infos.items()]
    found.loading += _dtype_sentences(config, {infos[n].kind for n in names.wanted if n in infos})
    if config.tied:
        found.loading.append("The output head is the embedding (tied).")
    if names.carried:
        found.loading.append(
            f"{len(names.carried)} tensors are computed, not learned: carried to an export as they are."
        )


def _dtype_sentences(config: DecoderConfig, kinds: set[str]) -> list[str]:
    count = sum(math.prod(leaf.shape) for leaf in leaves_by_path(functional(config).abstract()).values())
    wide, half = (mebibytes(count * size) for size in (4, 2))
    return [
        f"The weights are {', '.join(sorted(kinds)) or 'not there'} in the files; "
        f"in memory float32, {wide}, or with --dtype bfloat16 {half}."
    ]


def _run(path: Path) -> Inspection:
    found = Inspection(str(path), "jaxllm run")
    with open_checkpoints(path) as checkpointer:
        steps = checkpointer.steps()
        if not steps:
            found.findings.append(f"{path} has no finished checkpoint yet.")
            return found
        manifest = found.attempt(checkpointer.manifest)
        run = found.attempt(lambda: read_run(path, checkpointer))
    if manifest is None or run is None:
        return found
    leaves = {p: leaf for p, leaf in manifest.leaves.items() if p.split("/")[0] == "params"}
    found.tensors = [
        TensorInfo(p, x.shape, x.dtype, math.prod(x.shape) * jnp.dtype(x.dtype).itemsize, p.removeprefix("params/"))
        for p, x in leaves.items()
    ]
    others = len(manifest.leaves) - len(leaves)
    data = sum(file.bytes for file in manifest.files.values() if file.hash is None)
    found.config = config = run.config
    found.loading.append(
        f"Step {manifest.step} is read (there: {', '.join(map(str, steps))}), in {config.param_dtype}."
    )
    if others:
        size = mebibytes(data - sum(tensor.bytes for tensor in found.tensors))
        found.loading.append(f"{others} other leaves, {size}, are for training and are not read.")
    try:
        found.family = (run.source or config_json(config))["model_type"]
    except HubError as error:
        found.loading.append(f"It cannot be exported: {error}")
    if run.fingerprint is not None:
        _tokenizer(found, run.stored_tokenizer, run.fingerprint)
    _template(found, run.template)
    return found


def _tokenizer(found: Inspection, opened: Callable[[], Tokenizer], fingerprint: str | None = None) -> None:
    tokenizer = found.attempt(opened)
    if tokenizer is None:
        return
    names = tokenizer.special_names
    found.tokenizer = {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "specials": len(names),
        "bos": _name(tokenizer.bos_id, names),
        "eos": _name(tokenizer.eos_id, names),
        "stops": {str(index): _name(index, names) for index in tokenizer.stop_ids},
        "begins_with_bos": tokenizer.adds_bos,
        "fingerprint": tokenizer.fingerprint,
    }
    if found.config is not None and tokenizer.vocab_size > found.config.vocab_size:
        found.findings.append(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {found.config.vocab_size} rows."
        )
    if fingerprint is not None and fingerprint != tokenizer.fingerprint:
        found.findings.append("the tokenizer is not the one that the checkpoint was trained with.")


def _name(index: int | None, names: Mapping[int, str]) -> str | None:
    return None if index is None else names.get(index, str(index))


def _template(found: Inspection, opened: Callable[[], ChatTemplate | None]) -> None:
    template = found.attempt(opened)
    if template is not None:
        found.templates = dict(template.sources)


def mebibytes(size: float) -> str:
    """Size in MiB, for display."""
    return f"{size / 2**20:,.1f} MiB"


def group_layers(tensors: Iterable[TensorInfo]) -> list[tuple[TensorInfo, int]]:
    """Groups tensors that differ only in the layer, with their counts; a group's name has * for the layer."""
    groups: dict[tuple[str, tuple[int, ...], str, str], list[TensorInfo]] = {}
    for tensor in tensors:
        stem = re.sub(r"\.\d+\.", ".*.", tensor.name)
        ours = re.sub(r"\[\d+\]|segments/\d+/\d+/", "", tensor.ours)
        groups.setdefault((stem, tensor.shape, tensor.kind, ours), []).append(tensor)
    return [
        (first if len(group) == 1 else dataclasses.replace(first, name=stem, ours=ours), len(group))
        for (stem, _, _, ours), group in groups.items()
        for first in group[:1]
    ]
