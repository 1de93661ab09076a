"""Models in Hugging Face's directory layout: ``config.json`` and safetensors, in and out.

Neither torch nor transformers is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import sharding
from jaxllm.hub import safetensors
from jaxllm.hub.errors import HubError
from jaxllm.hub.families import decoder_config, family
from jaxllm.hub.mapping import Part, Table, Theirs, layout
from jaxllm.models import DecoderConfig, functional

NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Tensors of older files that are computed, not learned, by their endings: carried through to an export as they are."""

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


Tensors = Mapping[str, Any]
"""By name, arrays or what makes an array of a slice: anything with ``shape``, ``[slices]`` and ``__array__``."""


@dataclass(frozen=True)
class Carried:
    """What an export needs beside parameters to give back the files that were loaded.

    Attributes:
        tensors: what is not learned, by name.
        twice: names under which a tensor is saved a second time -> its own name.
        bare: names lack the family's prefix.
    """

    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    twice: Mapping[str, str] = field(default_factory=dict)
    bare: bool = False


@dataclass(frozen=True)
class HubModel:
    """A model from elsewhere.

    Attributes:
        config: the architecture, in our terms.
        params: its parameters.
        source: the ``config.json`` it came with, which an export carries over.
        carried: what else an export carries over.
    """

    config: DecoderConfig
    params: Any
    source: Mapping[str, Any]
    carried: Carried = Carried()


def load_hf(
    directory: Path | str, *, mesh: Mesh | None = None, dtype: str = "float32", progress: Progress | None = None
) -> HubModel:
    """Loads a local model directory, straight into its shards: only the slices a device holds are read for it.

    Args:
        directory: has config.json and model.safetensors, or shards with an index.
        mesh: where the parameters go; one device by default.
        dtype: what parameters are stored and computed in.
        progress: called for every parameter.

    Raises:
        HubError: an unknown family, a configuration that is not understood, a tensor that is missing, not used, or of
            another shape, a value that is not finite: each by name.
        ShardingError: the model does not fit the mesh.
    """
    directory = Path(directory)
    source = read_config(directory)
    decoder_config(source)  # what cannot be understood is refused before weights are looked for
    tensors = safetensors.open_model(directory)
    return load_tensors(source, tensors, mesh=mesh, dtype=dtype, progress=progress)


def load_tensors(
    source: Mapping[str, Any],
    tensors: Tensors,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> HubModel:
    """A model from a ``config.json`` and its tensors; see ``load_hf``."""
    config = replace(decoder_config(source), param_dtype=dtype, dtype=dtype)  # type: ignore[arg-type]
    model = functional(config)
    mesh = mesh or sharding.MeshSpec.parse("dp").build(jax.devices()[:1])
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    leaves = paths(abstract)
    found, carried = match(family(source).table, config, leaves, tensors)
    sources: dict[str, list[tuple[Any, Part]]] = {path: [] for path in leaves}
    for name, theirs in found.items():
        for part in theirs.parts:
            sources[part.path].append((tensors[name], part))
    loaded: dict[str, jax.Array] = {}
    for done, (path, leaf) in enumerate(leaves.items()):
        if progress is not None:
            progress(path, done, len(leaves))
        loaded[path] = place_leaf(leaf, sources[path], path)
        safetensors.release(tensors)
    params = jax.tree.unflatten(jax.tree.structure(abstract), [loaded[path] for path in leaves])
    return HubModel(config, params, source, carried)


def export_hf(
    model: HubModel, directory: Path | str, *, shard_bytes: int = 5 * 2**30, progress: Progress | None = None
) -> None:
    """Writes a model as transformers writes it; the inverse of ``load_hf``, byte for byte at the same dtype.

    One tensor at a time is held beside the parameters. Nothing is left behind if it fails.

    Raises:
        HubError: the directory exists, or the disk refuses.
    """
    leaves = paths(model.params)
    carried = model.carried
    names = layout(family(model.source).table, model.config, leaves, bare=carried.bare)
    order = sorted({**names, **carried.tensors, **carried.twice})

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for done, name in enumerate(order):
            if progress is not None:
                progress(name, done, len(order))
            own = carried.twice.get(name, name)
            yield name, to_theirs(names[own], leaves) if own in names else np.asarray(carried.tensors[own])

    key = "torch_dtype" if "torch_dtype" in model.source else "dtype"
    config = {**model.source, key: model.config.param_dtype}
    files = {"config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
    safetensors.write_model(Path(directory), tensors(), files, shard_bytes)


def to_theirs(tensor: Theirs, leaves: Mapping[str, Any]) -> np.ndarray:
    """One of their tensors, of our leaves."""
    pieces = []
    for part in tensor.parts:
        leaf = leaves[part.path]
        pieces.append(part.piece.to_theirs(np.asarray(leaf if part.row is None else leaf[part.row])))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=tensor.parts[0].axis)


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's ``config.json``."""
    file = directory / "config.json"
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise HubError(f"{directory} has no config.json; give the directory of a saved model.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HubError(f"{file} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise HubError(f"{file} is not a JSON object.")
    return value


def paths(tree: Any) -> dict[str, Any]:
    """Leaves by path, in the tree's order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def match(
    table: Table, config: DecoderConfig, leaves: dict[str, Any], tensors: Tensors
) -> tuple[dict[str, Theirs], Carried]:
    """Their tensors by name, once every name and shape agrees, and what is not a parameter.

    Raises:
        HubError: lists what is missing, what is left over, what has another shape.
    """
    bare = not any(name.startswith(table.prefix) for name in tensors)
    wanted = layout(table, config, leaves, bare=bare)
    carried = {n: np.asarray(tensors[n]) for n in tensors if f".{n}".endswith(NOT_WEIGHTS) and n not in wanted}
    extra = sorted(set(tensors) - set(wanted) - set(carried))
    twice: dict[str, str] = {}
    if config.tied and "lm_head.weight" in extra:
        # Some files hold the tied matrix twice; that is fine as long as it is the same matrix.
        table_name = next(n for n, t in wanted.items() if t.parts[0].path == "embedding/table")
        if table_name in tensors and not np.array_equal(tensors["lm_head.weight"], tensors[table_name]):
            raise HubError(f"lm_head.weight differs from {table_name}, but the config ties them.")
        extra.remove("lm_head.weight")
        twice = {"lm_head.weight": table_name}
    missing = sorted(set(wanted) - set(tensors))
    if missing or extra:
        parts = [f"missing: {', '.join(missing[:5])} ({len(missing)} in all)"] if missing else []
        parts += [f"not used: {', '.join(extra[:5])} ({len(extra)} in all)"] if extra else []
        raise HubError(f"the tensors are not those of this architecture; {'; '.join(parts)}.")
    for name, theirs in wanted.items():
        if tuple(tensors[name].shape) != theirs.shape:
            raise HubError(f"{name} has shape {list(tensors[name].shape)}; the config asks for {list(theirs.shape)}.")
    return wanted, Carried(carried, twice, bare)


def place_leaf(leaf: Any, sources: list[tuple[Any, Part]], path: str) -> jax.Array:
    """One of our leaves from their tensors, each device's slice copied and converted on its own, layer by layer."""
    stacked = sources[0][1].row is not None

    def slice_of(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(leaf.shape)
        inner = index[1:] if stacked else index
        rows = sources[index[0]] if stacked else sources
        shape = [len(range(*i.indices(size))) for i, size in zip(index, leaf.shape, strict=True)]
        value = _aligned(shape, leaf.dtype)
        for row, (tensor, part) in enumerate(rows):
            here = value[row] if stacked else value
            here[...] = part.read(tensor, inner)
            if not np.isfinite(here).all():
                raise HubError(f"{path} holds values that are not finite; the file is damaged or the model diverged.")
        return value

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, slice_of)


def _aligned(shape: list[int], dtype: Any) -> np.ndarray:
    """An array to fill, at a multiple of 64 bytes: such a one the CPU backend takes as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)
