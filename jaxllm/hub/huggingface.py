"""Models in Hugging Face's directory layout: ``config.json`` and safetensors, in and out.

Neither torch nor transformers is needed.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import sharding
from jaxllm.files import release
from jaxllm.hub import safetensors
from jaxllm.hub.errors import HubError
from jaxllm.hub.families.families import decoder_config, family
from jaxllm.hub.packed_weights import Weights, place_packed, staying_packed
from jaxllm.hub.quantised_checkpoints import dequantised, without_quantisation
from jaxllm.hub.safetensors import Lazy, Progress
from jaxllm.hub.weight_mapping import Part, Table, Theirs, layout
from jaxllm.models import DecoderConfig, Packed, functional

NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Tensors of older files that are computed, not learned, by their endings: carried through to an export as they are."""

READERS = 2
"""Layers of a leaf that are read and converted at a time; each holds a copy of its own."""
EXPERT_LEAVES = 3
"""Leaves of a layer that are held while the tensors of its experts are written, one after the other."""

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
        source: the ``config.json`` it came with, which an export carries over; of a quantised model without what says
            so, for an export is in plain numbers.
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
    source, tensors = read_model(directory)
    return load_tensors(source, tensors, mesh=mesh, dtype=dtype, progress=progress)


def load_tensors(
    source: Mapping[str, Any],
    tensors: Tensors,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    weights: Weights = "plain",
    progress: Progress | None = None,
) -> HubModel:
    """A model from a ``config.json`` and its tensors; see ``load_hf``.

    Args:
        weights: "packed": quantised experts stay as they are stored (``jaxllm.models.Packed``), to be served on one
            device; an export wants them plain.

    Raises:
        HubError: also where nothing can stay packed, or there is more than one device.
    """
    config = replace(decoder_config(source), param_dtype=dtype, dtype=dtype)  # type: ignore[arg-type]
    model = functional(config)
    mesh = mesh or sharding.MeshSpec.parse("dp").build(jax.devices()[:1])
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    leaves = paths(abstract)
    found, carried = match(family(source).table, config, leaves, tensors)
    sources = by_leaf(found, tensors)
    kept = staying_packed(sources, mesh) if weights == "packed" else set()
    loaded: dict[str, jax.Array | Packed] = {}
    for done, (path, leaf) in enumerate(leaves.items()):
        if progress is not None:
            progress(path, done, len(leaves))
        loaded[path] = (place_packed if path in kept else place_leaf)(leaf, sources[path], path)
        release(tensors.values())
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
    tensors = their_tensors(model.source, model.config, leaves, model.carried)
    with safetensors.hub_directory(Path(directory)) as temporary:
        safetensors.write_shards(temporary, tensors, shard_bytes, progress)
        write_config(temporary, model.source, model.config.param_dtype)


def their_tensors(
    source: Mapping[str, Any], config: DecoderConfig, leaves: Mapping[str, Any], carried: Carried
) -> dict[str, Any]:
    """What an export consists of, by their names, made of our ``leaves`` when it is asked for.

    Raises:
        HubError: the architecture has weights that the family has no name for.
    """
    try:
        names = layout(family(source).table, config, leaves, bare=carried.bare)
    except ValueError as error:
        raise HubError(str(error)) from error
    row_of = functools.lru_cache(EXPERT_LEAVES)(lambda path, row: np.asarray(leaves[path][row]))
    tensors: dict[str, Any] = {
        name: Lazy(
            theirs.shape, leaves[theirs.parts[0].path].dtype, functools.partial(to_theirs, theirs, leaves, row_of)
        )
        for name, theirs in names.items()
    }
    tensors |= carried.tensors
    return tensors | {name: tensors[own] for name, own in carried.twice.items()}


def cast(tensors: Tensors, dtype: str | None, names: Iterable[str]) -> dict[str, Any]:
    """The tensors, those of these ``names`` in ``dtype`` (None: in their own) and seen to be finite as they are made.

    Raises:
        HubError: when one is made that has a value that is not finite, or would not be in ``dtype``.
    """

    def make(name: str, to: np.dtype) -> np.ndarray:
        tensor = tensors[name]
        value = np.asarray(tensor)
        with np.errstate(over="ignore", invalid="ignore"):
            out = value.astype(to, copy=False)
        if not np.isfinite(out).all():
            if np.isfinite(value).all():
                raise HubError(f"{name} has values beyond the range of {dtype}; choose another dtype.")
            raise HubError(f"{name} holds values that are not finite; the file is damaged or the model diverged.")
        release([value])
        return out

    out = dict(tensors)
    for name in names:
        to = tensors[name].dtype if dtype is None else jnp.dtype(dtype)
        out[name] = Lazy(tuple(tensors[name].shape), to, functools.partial(make, name, to))
    return out


def write_config(directory: Path, source: Mapping[str, Any], dtype: str | None) -> None:
    """Writes ``config.json``; ``dtype`` is what its tensors are in, None for what it says."""
    key = "torch_dtype" if "torch_dtype" in source else "dtype"
    config = {**source} | ({} if dtype is None else {key: dtype})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def to_theirs(tensor: Theirs, leaves: Mapping[str, Any], row_of: RowOf | None = None) -> np.ndarray:
    """One of their tensors, of our leaves.

    Args:
        row_of: gives a leaf's row of the stack of layers, of which several tensors are made (one for each expert).
    """
    pieces = []
    for part in tensor.parts:
        if len(part.at) > 1 and row_of is not None:
            value = row_of(part.path, part.at[0])[part.at[1:]]
        else:
            value = np.asarray(leaves[part.path][part.at] if part.at else leaves[part.path])
        pieces.append(part.piece.to_theirs(value))
    axis, by_turns = tensor.parts[0].axis, tensor.parts[0].step > 1
    if by_turns:
        out = np.stack(pieces, axis + 1).reshape(tensor.shape)
    else:
        out = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)
    out = np.ascontiguousarray(out)
    release(leaves[part.path] for part in tensor.parts)
    return out


RowOf = Callable[[str, int], np.ndarray]


def read_model(directory: Path) -> tuple[Mapping[str, Any], Tensors]:
    """A directory's ``config.json`` and tensors; of a quantised model, those of the model that it stands for.

    Raises:
        HubError: as ``load_hf``, but for what values would tell.
    """
    given = read_config(directory)
    source = without_quantisation(given)
    decoder_config(source)  # what cannot be understood is refused before weights are looked for
    return source, dequantised(given, safetensors.open_model(directory))


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's ``config.json``."""
    file = directory / "config.json"
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise HubError(f"{directory} has no config.json; give the directory of a saved model.") from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise HubError(f"{file} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise HubError(f"{file} is not a JSON object.")
    return value


def paths(tree: Any) -> dict[str, Any]:
    """Leaves by path, in the tree's order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


@dataclass(frozen=True)
class Names:
    """How a file's tensors are those of an architecture, by names and shapes alone.

    Attributes:
        wanted: what the architecture consists of.
        carried: names of what is not learned.
        twice: as in ``Carried``.
        bare: as in ``Carried``.
        problems: what is missing, not used, or of another shape or type; each a sentence's end.
    """

    wanted: Mapping[str, Theirs]
    carried: tuple[str, ...]
    twice: Mapping[str, str]
    bare: bool
    problems: tuple[str, ...]


def match_names(table: Table, config: DecoderConfig, leaves: Mapping[str, Any], tensors: Tensors) -> Names:
    """Compares names, shapes and types; no value is read."""
    bare = not any(name.startswith(table.prefix) for name in tensors)
    wanted = layout(table, config, leaves, bare=bare)
    carried = tuple(
        n for n in tensors if n not in wanted and (f".{n}".endswith(NOT_WEIGHTS) or table.beyond(n, config))
    )
    extra = sorted(set(tensors) - set(wanted) - set(carried))
    twice: dict[str, str] = {}
    if config.tied and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        twice = {"lm_head.weight": next(n for n, t in wanted.items() if t.parts[0].path == "embedding/table")}
    missing = sorted(set(wanted) - set(tensors))
    problems = [f"missing: {', '.join(missing[:5])} ({len(missing)} in all)"] if missing else []
    problems += [f"not used: {', '.join(extra[:5])} ({len(extra)} in all)"] if extra else []
    for name, theirs in wanted.items():
        if name not in tensors:
            continue
        shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
        if shape != theirs.shape:
            problems.append(f"{name} has shape {list(shape)}; the config asks for {list(theirs.shape)}")
        if not jnp.issubdtype(dtype, jnp.floating):
            problems.append(f"{name} holds {dtype}; weights are floating point, and no quantised kind is read here")
    return Names(wanted, carried, twice, bare, tuple(problems))


def match(
    table: Table, config: DecoderConfig, leaves: Mapping[str, Any], tensors: Tensors
) -> tuple[Mapping[str, Theirs], Carried]:
    """Their tensors by name, once every name and shape agrees, and what is not a parameter.

    Raises:
        HubError: lists what is missing, what is left over, what has another shape.
    """
    names = match_names(table, config, leaves, tensors)
    if names.problems:
        raise HubError(f"the tensors are not those of this architecture; {'; '.join(names.problems[:5])}.")
    for name, own in names.twice.items():
        # Some files hold the tied matrix twice; that is fine as long as it is the same matrix.
        if not _equal(tensors[name], tensors[own]):
            raise HubError(f"{name} differs from {own}, but the config ties them.")
        release(tensors.values())
    return names.wanted, Carried({n: np.asarray(tensors[n]) for n in names.carried}, names.twice, names.bare)


def _equal(a: Any, b: Any, rows: int = 1024) -> bool:
    """Whether two tensors hold the same values, compared some rows at a time."""
    if tuple(a.shape) != tuple(b.shape):
        return False
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, a.shape[0], rows))


Source = tuple[Any, Part]
"""One of their tensors and where our weight lies in it."""


def by_leaf(found: Mapping[str, Theirs], tensors: Tensors) -> dict[str, list[Source]]:
    """For each of our leaves what it is made of, layer by layer."""
    sources: dict[str, list[Source]] = {}
    for name, theirs in found.items():
        for part in theirs.parts:
            sources.setdefault(part.path, []).append((tensors[name], part))
    return sources


def place_leaf(leaf: Any, sources: list[Source], path: str) -> jax.Array:
    """One of our leaves from their tensors, each device's slice copied and converted on its own, layer by layer."""
    depth, by_place = len(sources[0][1].at), {part.at: (tensor, part) for tensor, part in sources}

    def slice_of(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(leaf.shape)
        spans = [range(*i.indices(size)) for i, size in zip(index, leaf.shape, strict=True)]
        value = _aligned([len(span) for span in spans], leaf.dtype)

        def read(here: tuple[int, ...]) -> None:
            there = tuple(span[i] for span, i in zip(spans, here, strict=False))
            _read(by_place[there], index[depth:], path, value[here])

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, itertools.product(*(range(len(span)) for span in spans[:depth]))))
        return value

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, slice_of)


def stream_leaf(sources: list[Source], dtype: np.dtype, path: str, piece_bytes: int = 2**25) -> Iterator[np.ndarray]:
    """The same values as consecutive pieces in C order, on the host: a layer or less at a time."""
    for tensor, part in sources:
        first, size = part.shape[0], math.prod(part.shape) * dtype.itemsize
        # Where our first dimension is not the outermost of theirs, reading a part of it would read all.
        step = first if part.piece.groups[0][0] else max(1, first * piece_bytes // max(1, size))
        for begin in range(0, first, step):
            rows = slice(begin, min(first, begin + step))
            value = np.empty((rows.stop - begin, *part.shape[1:]), dtype)
            _read((tensor, part), (rows, *(slice(None),) * (len(part.shape) - 1)), path, value)
            yield value
        release([tensor])


def _read(source: Source, inner: tuple[slice, ...], path: str, out: np.ndarray) -> None:
    """The part ``inner`` of our weight into ``out``, converted to its type.

    Raises:
        HubError: a value is not finite.
    """
    tensor, part = source
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = part.read(tensor, inner)
    if not np.isfinite(out).all():
        names = zip(part.at, ("row {} of its layers", "expert {}"), strict=False)
        where = f" ({', '.join(name.format(i) for i, name in names)})" if part.at else ""
        raise HubError(f"{path}{where} holds values that are not finite; the file is damaged or the model diverged.")


def _aligned(shape: list[int], dtype: Any) -> np.ndarray:
    """An array to fill, at a multiple of 64 bytes: such a one the CPU backend takes as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)
