"""Deprecated option names: commands accept them for one release and print a line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def with_current_options(argv: list[str], new_names: Mapping[str, str]) -> list[str]:
    """Arguments with deprecated options replaced by the current ones, and a line on stderr for each.

    Args:
        argv: arguments of a command, options as ``--name value`` or ``--name=value``.
        new_names: deprecated option -> the option that replaces it, both with dashes.
    """
    out = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name in new_names:
            print_rename(name, new_names[name])
            word = new_names[name] + equals + value
        out.append(word)
    return out


def print_rename(old: str, new: str) -> None:
    """Prints on stderr that an option has a new name."""
    print(f"{old} is now {new}; the old name goes away in the next release.", file=sys.stderr)
