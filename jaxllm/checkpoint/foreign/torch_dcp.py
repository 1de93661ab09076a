"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): chunks of tensors in ``*.distcp``, placed by ``.metadata``.

    atoms = read_dcp(Path("run/step-100"))                              # whole arrays by name
    atoms = read_dcp(Path("run/step-100"), parse_rules("embed*  sharded 0, padded 0 to 50257\\n*  sharded 0"))

The metadata says where each chunk lies in its tensor, so no rule is needed to place it; of rules, only padding counts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.foreign.fragment_rules import FragmentRule, rule_for
from jaxllm.checkpoint.foreign.torch_archive import ArchiveTensor, Record, read_archive, read_pickled_data

METADATA = ".metadata"


def read_dcp(folder: Path, rules: Sequence[FragmentRule] = ()) -> dict[str, np.ndarray]:
    """Tensors of a DCP checkpoint, whole, by name; what is no tensor is left out.

    Args:
        folder: of the checkpoint.
        rules: of which the padding is removed; none: nothing was padded.

    Raises:
        CheckpointError: a file is missing or damaged, or chunks do not cover their tensor.
    """
    out = {name: tensor.read() for name, tensor in dcp_tensors(folder).items()}
    for name, whole in out.items():
        if rules and (rule := rule_for(name, rules)).padding is not None:
            out[name] = FragmentRule(rule.pattern, "placed", padding=rule.padding).whole(name, [whole])
    return out


def dcp_tensors(folder: Path) -> dict[str, ArchiveTensor]:
    """Tensors of a DCP checkpoint by name, each read and made whole by a call.

    Raises:
        CheckpointError: the metadata or a tensor's first chunk is missing or damaged.
    """
    if not (folder / METADATA).exists():
        raise CheckpointError(f"{folder} has no {METADATA}: it is no checkpoint of torch.distributed.checkpoint.")
    content = read_pickled_data((folder / METADATA).read_bytes())
    tensors = _fields(content, "Metadata").get("state_dict_metadata") or {}
    places = _fields(content, "Metadata").get("storage_data") or {}
    chunks: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for index, place in places.items():
        where = _fields(index, "MetadataIndex")
        chunks.setdefault(where["fqn"], []).append((_sizes(where.get("offset")), _fields(place, "_StorageInfo")))
    out = {}
    for name, record in tensors.items():
        if not (isinstance(record, Record) and record.name.endswith("TensorStorageMetadata")):
            continue
        shape, own = _sizes(_fields(record, "TensorStorageMetadata")["size"]), chunks.get(name, [])
        dtype = _tensor(folder, name, own[0][1]).dtype if own else np.dtype(np.float32)
        out[name] = ArchiveTensor(shape, dtype, functools.partial(_assembled, folder, name, shape, own))
    return out


def _assembled(folder: Path, name: str, shape: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], Any]]) -> Any:
    whole: np.ndarray | None = None
    covered = 0
    for offsets, place in chunks:
        tensor = _tensor(folder, name, place).read()
        if whole is None:
            whole = np.empty(shape, tensor.dtype)
        begin = offsets or (0,) * len(shape)
        index = tuple(slice(start, start + size) for start, size in zip(begin, tensor.shape, strict=True))
        if whole[index].shape != tensor.shape:
            raise CheckpointError(f"{folder}: a chunk of {name} at {begin} reaches beyond its shape {shape}.")
        whole[index] = tensor
        covered += tensor.size
    if whole is None or covered != whole.size:
        raise CheckpointError(
            f"{folder}: the chunks of {name} have {covered} elements, but its shape {shape} has {int(np.prod(shape))}."
        )
    return whole


def _tensor(folder: Path, name: str, place: Mapping[str, Any]) -> ArchiveTensor:
    file = folder / place["relative_path"]
    if file.parent != folder or not file.exists():
        raise CheckpointError(f"{folder}: {place['relative_path']}, which has a chunk of {name}, is missing.")
    with file.open("rb") as opened:
        opened.seek(place["offset"])
        data = opened.read(place["length"])
    found = read_archive(data)
    if not isinstance(found, ArchiveTensor):
        raise CheckpointError(f"{file}: at {place['offset']} there is no tensor, but {name} should be there.")
    return found


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    """Fields of a data class of DCP's metadata."""
    if isinstance(record, Record) and record.name.endswith(kind) and isinstance(record.state, Mapping):
        return record.state
    raise CheckpointError(f"the metadata has {record!r} where a {kind} is expected.")


def _sizes(found: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in found or ())
