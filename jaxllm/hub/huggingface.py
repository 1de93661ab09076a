"""Hugging Face directories: loads and exports ``config.json`` and safetensors, without torch or transformers.

A round trip of load and export reproduces the files byte for byte at the same dtype.
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
from jaxllm.hub.packed_weights import PackedOrPlain, packed_leaf_paths, place_packed
from jaxllm.hub.quantised_checkpoints import dequantise_tensors, without_quantisation
from jaxllm.hub.safetensors import LazyTensor, Progress
from jaxllm.hub.weight_mapping import HFTensor, TensorPart, WeightTable, hf_layout
from jaxllm.models import DecoderConfig, functional
from jaxllm.models.packed_weight import has_packed

NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Suffixes of tensors in older files that are computed, not learned; an export carries them through unchanged."""

READER_THREADS = 2
"""Number of layers of a leaf that are read and converted in parallel; each needs a buffer of its own."""
EXPERT_LEAVES = 3
"""Number of leaves of a layer held in memory while the tensors of its experts are written one by one."""

Tensors = Mapping[str, Any]
"""Tensors by name: arrays, or lazy ones with ``shape``, ``[slices]`` and ``__array__``."""


Put = Callable[[str, Any], Any]
"""``(path, parameter) -> what takes its place``."""


@dataclass(frozen=True)
class CarriedTensors:
    """Data beside the parameters that an export needs to reproduce the loaded files.

    Attributes:
        tensors: tensors that are not learned, by name.
        twice: second name of a tensor that is saved twice -> its own name.
        bare: whether names lack the family's prefix.
    """

    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    twice: Mapping[str, str] = field(default_factory=dict)
    bare: bool = False


@dataclass(frozen=True)
class HubModel:
    """A loaded published model.

    Attributes:
        config: its architecture as a ``DecoderConfig``.
        params: its parameters.
        source: its ``config.json``, which an export carries over; for a quantised model without the quantisation entry,
            because an export is in plain floating point.
        carried: further data that an export carries over.
    """

    config: DecoderConfig
    params: Any
    source: Mapping[str, Any]
    carried: CarriedTensors = CarriedTensors()


def load_hf(
    directory: Path | str, *, mesh: Mesh | None = None, dtype: str = "float32", progress: Progress | None = None
) -> HubModel:
    """Loads a local model directory straight into its shards: each device reads only the slices that it holds.

    Args:
        directory: has config.json and model.safetensors, or shards with an index.
        mesh: mesh that the parameters are placed on; one device by default.
        dtype: dtype in which parameters are stored and computed.
        progress: called for every parameter.

    Raises:
        HubError: an unknown family, an unsupported configuration, a tensor that is missing, unused or of another
            shape, a
            value that is not finite: each by name.
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
    weights: PackedOrPlain = "plain",
    progress: Progress | None = None,
    put: Put | None = None,
) -> HubModel:
    """Loads a model from a ``config.json`` and its tensors; see ``load_hf``.

    Args:
        put: called with the path and the value of every parameter as it is loaded; its result takes the place of the
            value. None: values stay where they are.
        weights: "packed": quantised experts stay as they are stored (``jaxllm.models.PackedWeight``), to be served;
            an export wants them plain.

    Raises:
        HubError: also if nothing can stay packed, or the mesh splits values that share a scale.
    """
    config = replace(decoder_config(source), param_dtype=dtype, dtype=dtype)  # type: ignore[arg-type]
    model = functional(config)
    mesh = mesh or sharding.MeshSpec.parse("dp").build(jax.devices()[:1])
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    leaves = leaves_by_path(abstract)
    found, carried = match_tensors(family(source).table, config, leaves, tensors)
    sources = sources_by_leaf(found, tensors)
    kept = packed_leaf_paths(sources) if weights == "packed" else set()
    loaded: dict[str, Any] = {}
    for done, (path, leaf) in enumerate(leaves.items()):
        if progress is not None:
            progress(path, done, len(leaves))
        value = (place_packed if path in kept else place_leaf)(leaf, sources[path], path)
        loaded[path] = value if put is None else put(path, value)
        release(tensors.values())
    params = jax.tree.unflatten(jax.tree.structure(abstract), [loaded[path] for path in leaves])
    return HubModel(config, params, source, carried)


def export_hf(
    model: HubModel, directory: Path | str, *, shard_bytes: int = 5 * 2**30, progress: Progress | None = None
) -> None:
    """Exports a model as transformers writes it: the inverse of ``load_hf``, byte for byte at the same dtype.

    One tensor at a time is held beside the parameters. Nothing is left behind if it fails.

    Raises:
        HubError: weights are packed, the directory exists, or the disk refuses.
    """
    if has_packed(model.params):
        raise HubError(
            'the model\'s weights are packed, which no published format has; load it with weights = "plain".'
        )
    leaves = leaves_by_path(model.params)
    tensors = hf_tensors(model.source, model.config, leaves, model.carried)
    with safetensors.hub_directory(Path(directory)) as temporary:
        safetensors.write_shards(temporary, tensors, shard_bytes, progress)
        write_config(temporary, model.source, model.config.param_dtype)


def hf_tensors(
    source: Mapping[str, Any], config: DecoderConfig, leaves: Mapping[str, Any], carried: CarriedTensors
) -> dict[str, Any]:
    """Tensors of an export under Hugging Face names, each made from the ``leaves`` when it is requested.

    Raises:
        HubError: the architecture has weights that the family has no name for.
    """
    try:
        names = hf_layout(family(source).table, config, leaves, bare=carried.bare)
    except ValueError as error:
        raise HubError(str(error)) from error
    row_of = functools.lru_cache(EXPERT_LEAVES)(lambda path, row: np.asarray(leaves[path][row]))
    tensors: dict[str, Any] = {
        name: LazyTensor(
            tensor.shape, leaves[tensor.parts[0].path].dtype, functools.partial(to_hf_tensor, tensor, leaves, row_of)
        )
        for name, tensor in names.items()
    }
    tensors |= carried.tensors
    return tensors | {name: tensors[own] for name, own in carried.twice.items()}


def cast(tensors: Tensors, dtype: str | None, names: Iterable[str]) -> dict[str, Any]:
    """Tensors of which those in ``names`` are cast to ``dtype`` (None: unchanged) and checked to be finite when made.

    Raises:
        HubError: a value is not finite, or would not be in ``dtype``; raised when the tensor is made.
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
        out[name] = LazyTensor(tuple(tensors[name].shape), to, functools.partial(make, name, to))
    return out


def write_config(directory: Path, source: Mapping[str, Any], dtype: str | None) -> None:
    """Writes ``config.json``; ``dtype`` is the dtype of its tensors, None for the one it states."""
    key = "torch_dtype" if "torch_dtype" in source else "dtype"
    config = {**source} | ({} if dtype is None else {key: dtype})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def to_hf_tensor(tensor: HFTensor, leaves: Mapping[str, Any], row_of: RowOf | None = None) -> np.ndarray:
    """Makes one Hugging Face tensor from the leaves.

    Args:
        row_of: returns a leaf's row of the stack of layers, from which several tensors are made (one for each expert).
    """
    pieces = []
    for part in tensor.parts:
        if len(part.at) > 1 and row_of is not None:
            value = row_of(part.path, part.at[0])[part.at[1:]]
        else:
            value = np.asarray(leaves[part.path][part.at] if part.at else leaves[part.path])
        pieces.append(part.piece.to_hf(value))
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
    """``config.json`` and tensors of a directory; a quantised model is read as the plain model that it stands for.

    Raises:
        HubError: as ``load_hf``, except for what only values would show.
    """
    given = read_config(directory)
    source = without_quantisation(given)
    decoder_config(source)  # what cannot be understood is refused before weights are looked for
    return source, dequantise_tensors(given, safetensors.open_model(directory))


def read_config(directory: Path) -> dict[str, Any]:
    """Parsed ``config.json`` of a directory."""
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


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves by path, in the order of the tree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


@dataclass(frozen=True)
class NameMatch:
    """Match between the tensors of a file and those of an architecture, by names and shapes alone.

    Attributes:
        wanted: tensors that the architecture consists of.
        carried: names of tensors that are not learned.
        twice: as in ``CarriedTensors``.
        bare: as in ``CarriedTensors``.
        problems: tensors that are missing, unused, or of another shape or dtype; each the end of a sentence.
    """

    wanted: Mapping[str, HFTensor]
    carried: tuple[str, ...]
    twice: Mapping[str, str]
    bare: bool
    problems: tuple[str, ...]


def match_names(table: WeightTable, config: DecoderConfig, leaves: Mapping[str, Any], tensors: Tensors) -> NameMatch:
    """Compares names, shapes and dtypes with those of the architecture; no value is read."""
    bare = not any(name.startswith(table.prefix) for name in tensors)
    wanted = hf_layout(table, config, leaves, bare=bare)
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
    for name, tensor in wanted.items():
        if name not in tensors:
            continue
        shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
        if shape != tensor.shape:
            problems.append(f"{name} has shape {list(shape)}; the config asks for {list(tensor.shape)}")
        if not jnp.issubdtype(dtype, jnp.floating):
            problems.append(f"{name} holds {dtype}; weights are floating point, and no quantised kind is read here")
    return NameMatch(wanted, carried, twice, bare, tuple(problems))


def match_tensors(
    table: WeightTable, config: DecoderConfig, leaves: Mapping[str, Any], tensors: Tensors
) -> tuple[Mapping[str, HFTensor], CarriedTensors]:
    """(HF tensors of the parameters by name, further tensors), once every name and shape agrees.

    Raises:
        HubError: lists tensors that are missing, left over, or of another shape.
    """
    names = match_names(table, config, leaves, tensors)
    if names.problems:
        raise HubError(f"the tensors are not those of this architecture; {'; '.join(names.problems[:5])}.")
    for name, own in names.twice.items():
        # Some files hold the tied matrix twice; that is fine as long as it is the same matrix.
        if not equal_tensors(tensors[name], tensors[own]):
            raise HubError(f"{name} differs from {own}, but the config ties them.")
        release(tensors.values())
    return names.wanted, CarriedTensors({n: np.asarray(tensors[n]) for n in names.carried}, names.twice, names.bare)


def equal_tensors(a: Any, b: Any, rows: int = 1024) -> bool:
    """Whether two tensors hold the same values, compared some rows at a time."""
    if tuple(a.shape) != tuple(b.shape):
        return False
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, a.shape[0], rows))


TensorSource = tuple[Any, TensorPart]
"""(tensor of a file, location of a weight in it)."""


def sources_by_leaf(found: Mapping[str, HFTensor], tensors: Tensors) -> dict[str, list[TensorSource]]:
    """Sources of each leaf, by its path, layer by layer."""
    sources: dict[str, list[TensorSource]] = {}
    for name, tensor in found.items():
        for part in tensor.parts:
            sources.setdefault(part.path, []).append((tensors[name], part))
    return sources


def place_leaf(leaf: Any, sources: list[TensorSource], path: str) -> jax.Array:
    """Places a leaf on devices: each device's slice is copied and converted on its own, layer by layer."""
    depth, by_place = len(sources[0][1].at), {part.at: (tensor, part) for tensor, part in sources}

    def slice_of(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(leaf.shape)
        spans = [range(*i.indices(size)) for i, size in zip(index, leaf.shape, strict=True)]
        value = _aligned([len(span) for span in spans], leaf.dtype)

        def read(here: tuple[int, ...]) -> None:
            there = tuple(span[i] for span, i in zip(spans, here, strict=False))
            _read(by_place[there], index[depth:], path, value[here])

        places = list(itertools.product(*(range(len(span)) for span in spans[:depth])))
        if len(places) == 1:
            read(places[0])
            return value
        with ThreadPoolExecutor(READER_THREADS) as pool:
            list(pool.map(read, places))
        return value

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, slice_of)


def stream_leaf(
    sources: list[TensorSource], dtype: np.dtype, path: str, piece_bytes: int = 2**25
) -> Iterator[np.ndarray]:
    """Values of a leaf as consecutive pieces in C order on the host, a layer or less at a time."""
    for tensor, part in sources:
        first, size = part.shape[0], math.prod(part.shape) * dtype.itemsize
        # If the leaf's first dimension is not the outermost one of the HF tensor, reading a part would read all of it.
        step = first if part.piece.groups[0][0] else max(1, first * piece_bytes // max(1, size))
        for begin in range(0, first, step):
            rows = slice(begin, min(first, begin + step))
            value = np.empty((rows.stop - begin, *part.shape[1:]), dtype)
            _read((tensor, part), (rows, *(slice(None),) * (len(part.shape) - 1)), path, value)
            yield value
        release([tensor])


def _read(source: TensorSource, inner: tuple[slice, ...], path: str, out: np.ndarray) -> None:
    """Reads the slice ``inner`` of a weight into ``out``, converted to its dtype.

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
    """Empty array aligned to 64 bytes, which the CPU backend uses without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)
