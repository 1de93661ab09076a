"""Measured block sizes by device kind, one file ``KIND.json`` each in this folder, with spaces as underscores.

    {"device_kind": "TPU v6 lite",
     "operations": {"flash_attention": {"command": "what measured it", "blocks": {"2 bytes": {"rows": 2048}}}}}

A device kind has a file only after it was measured (``python -m benchmarks.tune``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent
Blocks = TypeVar("Blocks")


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
    file = path(kind)
    if not file.exists():
        return blocks
    fields = read(file)["operations"].get(operation, {"blocks": {}})["blocks"].get(case, {})
    names = [field.name for field in dataclasses.fields(blocks)]  # pyright: ignore[reportArgumentType]
    for name, value in fields.items():
        where = f"{file.name}: {operation}, {case}"
        if name not in names:
            raise ValueError(f"{where}: {name!r} is no field of {type(blocks).__name__}; legal: {', '.join(names)}.")
        if type(value) is not int or value < least.get(name, 1) or (name in least and value & (value - 1)):
            legal = f"a power of two, at least {least[name]}" if name in least else "a positive whole number"
            raise ValueError(f"{where}: {name} = {value!r}; it must be {legal}.")
    return dataclasses.replace(blocks, **fields)  # pyright: ignore[reportArgumentType]


def by_kind(operation: str) -> dict[str, dict[str, int]]:
    """Measured fields by ``device_kind``, for operations with a single case ``"all"``."""
    files = (read(file)["operations"] | {"": read(file)["device_kind"]} for file in sorted(FOLDER.glob("*.json")))
    return {data[""]: data[operation]["blocks"].get("all", {}) for data in files if operation in data}


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
