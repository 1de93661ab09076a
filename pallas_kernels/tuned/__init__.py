"""Measured block sizes by device kind, one file ``KIND.json`` each in this folder, with spaces as underscores.

    {"device_kind": "TPU v6 lite",
     "operations": {"flash_attention": {"command": "what measured it", "blocks": {"2 bytes": {"rows": 2048}}}}}

A device kind has a file only after it was measured (``jaxllm tune OPERATION``). A tuner tries other fields without a
file, by ``trial_fields``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent
Blocks = TypeVar("Blocks")

_trial: ContextVar[tuple[str, Mapping[str, int]]] = ContextVar("trial_fields", default=("", {}))


@contextlib.contextmanager
def trial_fields(operation: str, fields: Mapping[str, int]) -> Iterator[None]:
    """Context manager: kernels of an operation that are traced in the body take these fields, before measured ones."""
    token = _trial.set((operation, fields))
    try:
        yield
    finally:
        _trial.reset(token)


def measured(operation: str, kind: str, case: str = "all") -> dict[str, Any]:
    """Fields of an operation on a device kind: those under trial, else those measured; empty if there are none.

    Args:
        operation: name of the operation's package.
        kind: a ``device_kind``.
        case: case of the operation, such as an item size or a shape.
    """
    trial = _trial.get()
    if trial[0] == operation:
        return dict(trial[1])
    file = path(kind)
    return read(file)["operations"].get(operation, {"blocks": {}})["blocks"].get(case, {}) if file.exists() else {}


def tuned(operation: str, kind: str, case: str, blocks: Blocks, least: Mapping[str, int]) -> Blocks:
    """``blocks`` with the measured fields replaced.

    Args:
        operation: name of the operation's package.
        kind: a ``device_kind``.
        case: case of the operation, such as an item size; a case that was not measured keeps its blocks.
        blocks: dataclass of block sizes.
        least: smallest legal value of each field that is a size; sizes are powers of two.

    Raises:
        ValueError: the device's file has a field that ``blocks`` lacks, or an illegal value.
    """
    fields = measured(operation, kind, case)
    names = [field.name for field in dataclasses.fields(blocks)]  # pyright: ignore[reportArgumentType]
    for name, value in fields.items():
        where = f"{path(kind).name}: {operation}, {case}"
        if name not in names:
            raise ValueError(f"{where}: {name!r} is no field of {type(blocks).__name__}; legal: {', '.join(names)}.")
        if type(value) is not int or value < least.get(name, 1) or (name in least and value & (value - 1)):
            legal = f"a power of two, at least {least[name]}" if name in least else "a positive whole number"
            raise ValueError(f"{where}: {name} = {value!r}; it must be {legal}.")
    return dataclasses.replace(blocks, **fields)  # pyright: ignore[reportArgumentType]


def path(kind: str) -> Path:
    """Path of a device kind's file, whether or not it exists."""
    return FOLDER / f"{kind.replace(' ', '_').replace('/', '_')}.json"


@functools.cache
def read(file: Path) -> dict[str, Any]:
    """Contents of a device kind's file.

    Raises:
        ValueError: its keys or its device kind are not as the module's docstring says.
    """
    data = json.loads(file.read_text())
    _keys(file, "", data, {"device_kind", "operations"})
    if path(data["device_kind"]).name != file.name:
        raise ValueError(
            f"{file.name}: device_kind is {data['device_kind']!r}; its file is {path(data['device_kind']).name}."
        )
    for operation, found in data["operations"].items():
        if not (FOLDER.parent / operation / "config.py").exists():
            raise ValueError(f"{file.name}: no operation {operation!r} has block sizes.")
        _keys(file, f"{operation}: ", found, {"command", "blocks"})
    return data


def _keys(file: Path, where: str, data: Mapping[str, Any], legal: set[str]) -> None:
    if set(data) != legal:
        wrong = ", ".join(sorted(set(data) ^ legal))
        raise ValueError(f"{file.name}: {where}the keys are {', '.join(sorted(legal))}; missing or unknown: {wrong}.")
