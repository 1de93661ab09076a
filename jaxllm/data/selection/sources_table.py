"""Sources table: a TOML file with the sources of a data mixture and their weights.

    [[sources]]
    name = "web"
    source = ["web.parquet"]
    weight = 0.7

`jaxllm data mix` writes one, and `jaxllm train RECIPE --sources FILE` trains on it. The fields of a row are those of
`SourceConfig`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from jaxllm.config import ConfigError, from_dict
from jaxllm.data.config import SourceConfig
from jaxllm.files import DataError, at, atomic


def write_sources(path: Path, sources: Sequence[SourceConfig], note: str = "") -> None:
    """Writes a sources table, with the lines of ``note`` as comments above it."""
    lines = [f"# {line}" for line in note.splitlines()]
    for one in sources:
        lines += ["", "[[sources]]"]
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            if field.name in ("name", "source", "weight") or value != field.default:
                lines.append(f"{field.name} = {_toml(value)}")
    with atomic(path) as file:
        file.write(("\n".join(lines).lstrip("\n") + "\n").encode())


def read_sources(path: Path) -> tuple[SourceConfig, ...]:
    """Sources of a table, for ``DataConfig.mixture``.

    Raises:
        DataError: the file is missing, is not TOML, or has no sources.
        ConfigError: a row has an unknown field or a value that is not legal.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{at(path)}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{at(path)}: not valid TOML ({error})") from None
    rows = table.pop("sources", None)
    if not isinstance(rows, list) or not rows or table:
        other = f", and nothing else such as {next(iter(table))!r}" if table else ""
        raise DataError(f"{at(path)}: a sources table has rows [[sources]] with name, source and weight{other}")
    return tuple(from_dict(SourceConfig, row, f"{at(path)}: sources.{number}") for number, row in enumerate(rows))


def _toml(value: object) -> str:
    """TOML text of a string, a number or a tuple of strings; TOML has no null."""
    if value is None:
        raise ConfigError("a sources table cannot say None; leave the field at its default")
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
