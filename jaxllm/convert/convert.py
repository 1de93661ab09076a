"""Model conversion between formats, with one tensor or a slice of one in memory at a time.

From a run, a Hugging Face directory or a GGUF file to Hugging Face's format or to a checkpoint like a run's. The
result gets its name only when it is complete (atomic commit).
"""

from __future__ import annotations

import importlib.metadata
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from jaxllm.checkpoint import Checkpointer, CheckpointError, StreamedLeaf
from jaxllm.checkpoint.foreign.foreign_checkpoint import is_foreign, open_foreign
from jaxllm.checkpoint.foreign.fragment_rules import AttentionHeads
from jaxllm.config import to_dict
from jaxllm.convert.adapter_run import AdapterRun, adapter_run
from jaxllm.convert.load import load_params
from jaxllm.convert.run_files import BESIDE_MODEL, checked_tokenizer, open_checkpoints, params_prefix, read_run
from jaxllm.convert.upcycle import upcycled_config, upcycled_leaf
from jaxllm.files import release
from jaxllm.hub import HubError, ModelSource, find_model, open_source
from jaxllm.hub.families.config_json import TOKENS, config_json
from jaxllm.hub.families.families import decoder_config, family
from jaxllm.hub.huggingface import (
    CarriedTensors,
    cast,
    hf_tensors,
    leaves_by_path,
    match_tensors,
    read_config,
    sources_by_leaf,
    stream_leaf,
    write_config,
)
from jaxllm.hub.safetensors import Progress, hub_directory, write_shards
from jaxllm.models import DecoderConfig, functional
from jaxllm.peft.peft_files import write_peft
from jaxllm.text import Tokenizer
from jaxllm.text.tokenizer_files import write_stop_ids

DType = Literal["float32", "bfloat16", "float16"]
CHECKPOINT_DTYPES = ("float32", "bfloat16", "float64")
"""Dtypes that a checkpoint's parameters can have."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)
"""Tokenizer and template files beside the weights, copied unchanged."""
TOKENIZER_DEFINITIONS = ("tokenizer.json", "tokenizer.model", "*.tiktoken")
"""Tokenizer files that this package can read."""

Leaves = Callable[[str], dict[str, StreamedLeaf]]


@dataclass(frozen=True)
class ConvertibleModel:
    """Model to convert; no weight has been read yet.

    Attributes:
        config: architecture.
        source: its ``config.json``.
        dtype: dtype of all its weights; None if they have several.
        tensors: tensors of an export, by Hugging Face name.
        weights: names of the tensors that are parameters.
        leaves: parameters of this package in a dtype, to be streamed.
        carried: tensors of an export that are not parameters.
        tokenizer: opens the tokenizer; None if there is none.
        write_tokenizer: writes tokenizer and template into a directory.
        keeps: whether an export without a requested dtype keeps dtypes and ``config.json`` unchanged.
        exact: names of tensors that stay in float32 whatever the dtype of the others.
    """

    config: DecoderConfig
    source: Mapping[str, Any]
    dtype: str | None
    tensors: Mapping[str, Any]
    weights: tuple[str, ...]
    leaves: Leaves
    carried: CarriedTensors
    tokenizer: Callable[[], Tokenizer] | None
    write_tokenizer: Callable[[Path], None]
    keeps: bool = False
    exact: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion: directory, number of tensors (or leaves), bytes, dtype, has a tokenizer or not."""

    path: Path
    tensors: int
    bytes: int
    dtype: str
    has_tokenizer: bool


def convert(
    source: Path | str,
    out: Path | str,
    to: Literal["hf", "jaxllm", "peft"] | None,
    *,
    dtype: DType | None = None,
    step: int | None = None,
    upcycle: int | None = None,
    top_k: int | None = None,
    ema: bool = False,
    merge: bool = False,
    like: Path | str | None = None,
    fragments: str | None = None,
    shard_bytes: int = 5 * 2**30,
    progress: Progress | None = None,
) -> ConversionResult:
    """Writes a model in another format.

    Args:
        source: as in ``load_model``; or a checkpoint of Megatron or of torch.distributed.checkpoint, with ``like``.
        out: directory to create; it must not exist.
        to: "hf": config.json, safetensors and tokenizer files for transformers; "jaxllm": a checkpoint and a tokenizer
            for ``load_model``; "peft": the adapter of a run, for the library peft. None: "peft" for a run with an
            adapter, or "hf" with ``merge``.
        dtype: dtype of the written parameters. By default values are preserved: an export of a Hugging Face directory
            has the same bytes; elsewhere weights of several dtypes, or quantised ones, become float32.
        step: step of a run's checkpoint; the newest by default.
        upcycle: sparse upcycling: make a mixture of this many experts of a dense model; the first forward pass is the
            same.
        top_k: experts per token, 2 by default; for ``upcycle``.
        ema: write the average of a run's parameters (``RunConfig.ema``) in their place; by default in float32.
        merge: write the model of a run with an adapter, merged into its base.
        like: directory with the ``config.json`` of a foreign checkpoint's model, and its tokenizer if there is one.
        fragments: text of the rules by which a foreign checkpoint's fragments become the tensors of that model
            (``jaxllm.checkpoint.foreign.fragment_rules``); by default those of its framework.
        shard_bytes: maximum size of a safetensors file.
        progress: called for every tensor.

    Raises:
        HubError: the model cannot be read, has no such format, has a value that is not finite or out of ``dtype``'s
            range; ``out`` exists; ``top_k`` is given without ``upcycle``, or ``like`` without a foreign checkpoint.
        CheckpointError: the run's or the foreign checkpoint is missing or damaged.
        DataError: the tokenizer cannot be read, or is another model's.
    """
    out = Path(out)
    if out.exists():  # checked before anything is read
        raise HubError(f"{out} exists; choose another name, or move it away.")
    if top_k is not None and upcycle is None:
        raise HubError(f"top_k = {top_k} is for upcycle: give upcycle, the number of experts, too, or leave it out.")
    path = find_model(source)
    adapted = _adapter_run(path, step)
    chosen = _format(path, to, adapted is not None, merge)
    if chosen == "peft" and adapted is not None:
        if dtype is not None or upcycle is not None or ema:
            raise HubError('to = "peft" writes an adapter as it is: leave dtype, upcycle and ema out.')
        return _write_adapter(adapted, out, step)
    model = _open(path, step, ema, None if like is None else Path(like), fragments)
    write = _write_hf if chosen == "hf" else _write_jaxllm
    with hub_directory(out) as temporary:
        if upcycle is not None:
            mixture = _upcycled(model, upcycle, 2 if top_k is None else top_k, named=chosen == "hf")
            if chosen == "jaxllm":
                return replace(_write_jaxllm(mixture, temporary, dtype, shard_bytes, progress), path=out)
            # Through a checkpoint, from which single experts can be read.
            way = temporary / "checkpoint"
            way.mkdir()
            _write_jaxllm(mixture, way, None, shard_bytes, progress)
            made = _write_hf(_open_run(way, None), temporary, dtype, shard_bytes, progress)
            shutil.rmtree(way)
            return replace(made, path=out)
        return replace(write(model, temporary, dtype, shard_bytes, progress), path=out)


def _adapter_run(path: Path, step: int | None) -> AdapterRun | None:
    """The run with an adapter in a directory; None if it is something else."""
    if not (path / "checkpoints").is_dir() or is_foreign(path):
        return None
    with open_checkpoints(path) as checkpointer:
        return adapter_run(read_run(path, checkpointer, step))


def _format(path: Path, to: str | None, adapted: bool, merge: bool) -> str:
    """Format to write; raises HubError where it is not said, or does not fit the source."""
    if not adapted and (merge or to in (None, "peft")):
        why = "so there is nothing to merge" if merge else "so say what to write: --to hf or --to jaxllm"
        raise HubError(f"{path} is not a run with an adapter, {why}.")
    if adapted and merge and to == "peft":
        raise HubError('merge writes a whole model, to "hf" or "jaxllm"; leave merge out to write the adapter.')
    if adapted and not merge and to in ("hf", "jaxllm"):
        raise HubError(
            f"{path} has an adapter beside its base: give merge to write the merged model to {to!r}, or to = 'peft' "
            "for the adapter alone."
        )
    return to or ("hf" if merge else "peft")


def _write_adapter(adapted: AdapterRun, out: Path, step: int | None) -> ConversionResult:
    run = adapted.run
    with open_checkpoints(run.path) as checkpointer:
        adapter = adapted.adapter(checkpointer, step)
    base = functional(run.config)
    write_peft(out, adapter, base, run.source or config_json(run.config, None, {}))
    arrays = jax.tree.leaves((dict(adapter.factors), dict(adapter.magnitudes), dict(adapter.modules)))
    has_tokens = run.fingerprint is not None
    if has_tokens:
        copy_tokenizer_files(run.path / "tokenizer", out)
    return ConversionResult(out, len(arrays), adapter.nbytes, str(arrays[0].dtype), has_tokens)


def _upcycled(model: ConvertibleModel, experts: int, top_k: int, *, named: bool) -> ConvertibleModel:
    """Model with mixtures of experts in place of its feed-forward layers.

    Args:
        named: a family of transformers must have the architecture.
    """
    config = upcycled_config(model.config, experts, top_k)
    shapes = {path: leaf.shape for path, leaf in leaves_by_path(functional(config).abstract()).items()}
    ids = {name: model.source[name] for name in TOKENS if name in model.source}
    try:
        source = config_json(config, model.source.get("max_position_embeddings"), ids)
    except HubError:
        if named:
            raise
        source = {}

    def leaves(dtype: str) -> dict[str, StreamedLeaf]:
        dense = model.leaves(dtype)
        return {path: upcycled_leaf(path, shape, dense) for path, shape in shapes.items()}

    return replace(model, config=config, source=source, leaves=leaves, carried=CarriedTensors(), keeps=False)


def _open(path: Path, step: int | None, ema: bool, like: Path | None, fragments: str | None) -> ConvertibleModel:
    foreign = path.is_dir() and is_foreign(path)
    if foreign and like is None:
        raise HubError(
            f"{path} is another framework's checkpoint, which does not say its architecture: give like, the directory "
            "of a config.json of its model."
        )
    if not foreign and (like is not None or fragments is not None):
        raise HubError(f"{path} is not another framework's checkpoint: leave like and fragments out.")
    if (path / "checkpoints").is_dir() and not foreign:
        return _open_run(path, step, ema)
    if ema:
        raise HubError(f"{path} is not a run's directory, so it has no parameter average: leave ema out.")
    if step is not None:
        raise HubError(f"{path} is not a run's directory, so it has no step {step}.")
    source = open_source(path) if like is None else _open_foreign(path, like, fragments)
    try:
        return _open_source(source)
    except HubError as error:
        raise error if str(source.path) in str(error) else HubError(f"{source.path}: {error}") from error


def _open_foreign(path: Path, like: Path, fragments: str | None) -> ModelSource:
    """A foreign checkpoint as the published model whose ``config.json`` is in ``like``."""
    source = read_config(like)
    config = decoder_config(source)
    specs = [block.attention.kv_spec for block in config.pattern]
    layouts = {None if spec.latent else AttentionHeads(spec.kv_heads, spec.key_dim) for spec in specs}
    heads = layouts.pop() if len(layouts) == 1 else None
    return ModelSource(like, "hf", source, open_foreign(path, config.vocab_size, heads, fragments))


def _open_source(source: ModelSource) -> ConvertibleModel:
    table = family(source.source).table
    shapes = leaves_by_path(functional(source.config).abstract())
    found, carried = match_tensors(table, source.config, shapes, source.tensors)
    by_path = sources_by_leaf(found, source.tensors)

    def leaves(dtype: str) -> dict[str, StreamedLeaf]:
        to = _dtypes(source.config, dtype)
        return {p: StreamedLeaf(x.shape, to[p], stream_leaf(by_path[p], to[p], p)) for p, x in shapes.items()}

    def write_tokenizer(folder: Path) -> None:
        if source.gguf is None:
            copy_tokenizer_files(source.path, folder)
        elif there:
            source.tokenizer.save(folder)
            if source.template is not None:
                source.template.save(folder)

    there = has_tokenizer(source.path) if source.gguf is None else "tokenizer.ggml.model" in source.gguf.metadata
    exact = tuple(n for n, tensor in found.items() if {p.path for p in tensor.parts} & _exact(source.config))
    types = {str(source.tensors[name].dtype) for name in found if name not in exact}
    return ConvertibleModel(
        config=source.config,
        source=source.source,
        dtype=types.pop() if len(types) == 1 else None,
        tensors=source.tensors,
        weights=(*found, *carried.twice),
        leaves=leaves,
        carried=carried,
        tokenizer=(lambda: source.tokenizer) if there else None,
        write_tokenizer=write_tokenizer,
        keeps=source.gguf is None,
        exact=exact,
    )


def _dtypes(config: DecoderConfig, dtype: str) -> dict[str, np.dtype]:
    """Dtype of each parameter if most are in ``dtype``; some are wider."""
    return {
        path: leaf.dtype
        for path, leaf in leaves_by_path(functional(replace(config, param_dtype=dtype)).abstract()).items()
    }  # type: ignore[arg-type]


def _exact(config: DecoderConfig) -> set[str]:
    """Parameters that stay in float32 when others are in bfloat16."""
    return {path for path, dtype in _dtypes(config, "bfloat16").items() if dtype != jnp.bfloat16}


def _open_run(path: Path, step: int | None, ema: bool = False) -> ConvertibleModel:
    with open_checkpoints(path) as checkpointer:
        run = read_run(path, checkpointer, step)
        arrays = checkpointer.map_leaves(step, prefix=params_prefix(path, checkpointer, step, ema))
        arrays = {name: leaf for name, leaf in arrays.items() if name not in BESIDE_MODEL}
        kept = checkpointer.map_leaves(step, prefix="carried")
        if (adapted := adapter_run(run)) is not None:
            mesh = sharding.MeshSpec.parse("dp").build(jax.devices()[:1])
            merged = adapted.merged_params(checkpointer, step, mesh, load_params)
            arrays = leaves_by_path(jax.device_get(merged))
    config, meta = run.config, run.meta
    if ema and config.param_dtype == "bfloat16":
        config = replace(config, param_dtype="float32")
    tokenizer = None if run.fingerprint is None else run.tokenizer()
    about = meta.get("carried", {"names": [], "twice": {}, "bare": False})
    carried = CarriedTensors({n: kept[str(i)] for i, n in enumerate(about["names"])}, about["twice"], about["bare"])
    source = run.source or config_json(config, meta["config"].get("data", {}).get("seq_len"), _tokens(tokenizer))

    def leaves(dtype: str) -> dict[str, StreamedLeaf]:
        to = _dtypes(config, dtype)
        return {p: StreamedLeaf(a.shape, to[p], _slices(a, to[p], p)) for p, a in arrays.items()}

    tensors = hf_tensors(source, config, arrays, carried)
    return ConvertibleModel(
        config=config,
        source=source,
        dtype=config.param_dtype,
        tensors=tensors,
        weights=tuple(name for name in tensors if name not in carried.tensors),
        leaves=leaves,
        carried=carried,
        tokenizer=None if tokenizer is None else lambda: tokenizer,
        write_tokenizer=lambda folder: copy_tokenizer_files(path / "tokenizer", folder),
        exact=tuple(
            n for n, x in tensors.items() if n not in carried.tensors and x.dtype != jnp.dtype(config.param_dtype)
        ),
    )


def _tokens(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Token ids that a ``config.json`` contains."""
    if tokenizer is None:
        return {}
    stops = list(tokenizer.stop_ids)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": stops[0] if len(stops) == 1 else stops or None}


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory has a tokenizer file that this package can read."""
    return any(file for pattern in TOKENIZER_DEFINITIONS for file in folder.glob(pattern))


def copy_tokenizer_files(folder: Path, out: Path) -> None:
    """Copies the files of tokenizer and template."""
    for pattern in TOKENIZER_FILES:
        for file in sorted(folder.glob(pattern)):
            target = out / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _write_hf(
    model: ConvertibleModel, folder: Path, dtype: str | None, shard_bytes: int, progress: Progress | None
) -> ConversionResult:
    to = dtype or (None if model.keeps else model.dtype or "float32")
    tensors = cast(model.tensors, to, [name for name in model.weights if name not in model.exact])
    tensors = cast(tensors, None, model.exact)
    write_shards(folder, tensors, shard_bytes, progress)
    write_config(folder, model.source, to if dtype or {"dtype", "torch_dtype"} & model.source.keys() else None)
    model.write_tokenizer(folder)
    size = sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors.values())
    return ConversionResult(
        folder, len(tensors), size, to or model.dtype or "several types", model.tokenizer is not None
    )


def _write_jaxllm(
    model: ConvertibleModel, folder: Path, dtype: str | None, shard_bytes: int, progress: Progress | None
) -> ConversionResult:
    if dtype is not None and dtype not in CHECKPOINT_DTYPES:
        raise HubError(f"a checkpoint's parameters cannot be {dtype}; legal: {', '.join(CHECKPOINT_DTYPES[:2])}.")
    to = dtype or (model.dtype if model.dtype in CHECKPOINT_DTYPES else "float32")
    config = replace(model.config, param_dtype=to, dtype=to)  # type: ignore[arg-type]
    kept, tokenizer = model.carried.tensors, model.tokenizer and model.tokenizer()
    leaves = {f"params/{path}": leaf for path, leaf in model.leaves(to).items()}
    leaves |= {f"carried/{i}": StreamedLeaf(a.shape, a.dtype, [a]) for i, a in enumerate(kept.values())}
    counted = {
        path: replace(leaf, pieces=_counted(leaf.pieces, path, done, len(leaves), progress))
        for done, (path, leaf) in enumerate(leaves.items())
    }
    meta = {
        "config": {"model": to_dict(config)},
        "source": dict(model.source),
        "carried": {"names": list(kept), "twice": dict(model.carried.twice), "bare": model.carried.bare},
        "tokenizer": tokenizer and tokenizer.fingerprint,
        "versions": {"jaxllm": importlib.metadata.version("jaxllm")},
    }
    tokenizer_folder = folder / "tokenizer"
    tokenizer_folder.mkdir()
    model.write_tokenizer(tokenizer_folder)
    if tokenizer is not None and checked_tokenizer(folder, tokenizer.fingerprint).stop_ids != tokenizer.stop_ids:
        write_stop_ids(tokenizer_folder, tokenizer.stop_ids)  # the source has them in its config.json
    try:
        with Checkpointer(folder / "checkpoints") as checkpointer:
            checkpointer.save_streamed(0, counted, meta)
    except CheckpointError as error:
        if isinstance(error.__cause__, HubError):
            raise error.__cause__ from None
        raise
    (folder / "checkpoints" / ".lock").unlink(missing_ok=True)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    return ConversionResult(folder, len(leaves), size, to, model.tokenizer is not None)


def _slices(array: np.ndarray, dtype: np.dtype, path: str, size: int = 2**22) -> Iterator[np.ndarray]:
    """Slices of ``size`` elements of a memory-mapped array, cast to ``dtype``."""
    flat = array.reshape(-1)
    for begin in range(0, flat.size, size):
        with np.errstate(over="ignore", invalid="ignore"):
            part = flat[begin : begin + size].astype(dtype)
        if not np.isfinite(part).all():
            raise HubError(f"{path} has values that are not finite in {dtype}.")
        yield part
        release([array])


def _counted(slices: Any, path: str, done: int, total: int, progress: Progress | None) -> Iterator[np.ndarray]:
    if progress is not None:
        progress(path, done, total)
    yield from slices
