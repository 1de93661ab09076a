"""Options of a simulated fleet in one text, such as ``mtbf=3600,repair=120``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ConfigError

Kind = type[int] | type[float] | tuple[str, ...]
"""Legal values of an option: an integer, a number, or one of some words."""


def parse_options(what: str, text: str, legal: Mapping[str, Kind]) -> dict[str, Any]:
    """Values of the options in a text.

    Args:
        what: name of the text for messages.
        text: ``name=value``, separated by commas.
        legal: kind of each option.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is not of its kind; says what is legal.
    """
    found: dict[str, Any] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _, value = part.partition("=")
        kind = legal.get(name)
        try:
            if kind is None or name in found or (isinstance(kind, tuple) and value not in kind):
                raise ValueError
            found[name] = value if isinstance(kind, tuple) else kind(value)
        except ValueError:
            raise ConfigError(f"{what}: {part!r}; legal, each once: {', '.join(map(_shown, legal.items()))}.") from None
    return found


def _shown(option: tuple[str, Kind]) -> str:
    name, kind = option
    return f"{name}={'|'.join(kind) if isinstance(kind, tuple) else 'N' if kind is int else 'NUMBER'}"
