"""What a chat template may use, counted while it runs.

The limits are far above what the longest conversation needs.
"""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2

MAX_SOURCE = 1_000_000
"""Characters of a template."""
MAX_OUTPUT = 16_000_000
"""Characters that a template may write, captured text included."""
MAX_VALUE = 16_000_000
"""Size of one value: characters, and entries counted through all levels."""
MAX_MADE = 400_000_000
"""Size of all values made on the way."""
MAX_STEPS = 1_000_000
"""Turns of loops, calls and operations."""
MAX_SECONDS = 10.0
MAX_WIDTH = 100_000
"""A number given to a function that pads, repeats or formats."""
MAX_BITS = 10_000
"""Bits of a whole number."""

# Methods of texts and numbers that make more than they are given.
_WIDENING_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "to_bytes", "zfill"})

_VIEWS = (type({}.items()), type({}.keys()), type({}.values()))


class LimitExceeded(jinja2.TemplateError):
    """A template does more than any conversation needs."""


class Meter:
    """What one rendering has used."""

    def __init__(self) -> None:
        self._steps = self._made = self._written = 0
        self._deadline = time.monotonic() + MAX_SECONDS
        self._sizes: dict[int, tuple[Any, int]] = {}  # with the value itself, so that no other gets its id

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise LimitExceeded(f"it does not come to an end: more than {MAX_STEPS:,} steps")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise LimitExceeded(f"it runs for more than {MAX_SECONDS:g} s")

    def made(self, value: Any) -> Any:
        """Counts a value that the template made, and hands it on."""
        self.step()
        size = self.size(value)
        self._made += size
        if size > MAX_VALUE or self._made > MAX_MADE:
            raise LimitExceeded(f"it makes too much on the way: a value of size {size:,}, {self._made:,} in all")
        return value

    def written(self, value: Any) -> Any:
        """Counts what is written, and hands it on."""
        self.step()
        self._written += self.size(value)
        if self._written > MAX_OUTPUT:
            raise LimitExceeded(f"it writes more than {MAX_OUTPUT:,} characters")
        return value

    def size(self, value: Any) -> int:
        """Characters of a text; for a list or mapping the sum over its entries, as if they were written out."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise LimitExceeded(f"it makes a number of {value.bit_length():,} bits")
            return 1
        if isinstance(value, _VIEWS):
            value = value.mapping
        if not isinstance(value, list | tuple | Mapping):
            return 1
        if (known := self._sizes.get(id(value))) is not None:
            return known[1]
        entries = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        total = 1 + len(entries) + sum(self.size(one) for one in entries)
        self._sizes[id(value)] = (value, total)
        return total

    def check_widening(self, arguments: Iterable[Any], times: int) -> None:
        """Sizes in advance what padding or formatting makes: at most the widest argument, `times` times."""
        widest = 1
        for argument in arguments:
            if isinstance(argument, int | float) and abs(argument) > MAX_WIDTH:
                raise LimitExceeded(f"it asks for a width of {argument:g}")
            widest = max(widest, abs(int(argument)) if isinstance(argument, int | float) else self.size(argument))
        self.check_size(widest * max(times, 1))

    def check_size(self, size: int) -> None:
        if size > MAX_VALUE:
            raise LimitExceeded(f"it would make a value of size {size:,}")


def check_method(meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Sizes what a method of a text or number would make; the arguments, with iterators written out."""
    given = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        check_format(meter, owner, given)
    elif name in _WIDENING_METHODS:
        meter.check_widening(given, owner.count("\t") if name == "expandtabs" else 1)
    elif name == "replace" and len(args) > 1:
        meter.check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        return (joinable(meter, owner, args[0]), *args[1:])
    elif name == "translate" and args:
        meter.check_size(len(owner) * meter.size(args[0]))
    return args


def check_format(meter: Meter, text: str, arguments: Iterable[Any]) -> None:
    """Widths stand in the format itself or among the arguments; each field may use the widest."""
    if re.search(r"\{[^{}]*:[^{}]*\{", text):
        raise LimitExceeded("it takes the width of a field from another field")
    widths = [int(digits[:9]) for digits in re.findall(r"\d+", text)]
    meter.check_widening([*widths, *arguments], text.count("%") + text.count("{"))


def joinable(meter: Meter, separator: Any, entries: Iterable[Any]) -> list[Any]:
    """What is joined, as a list whose joined size is legal."""
    listed = list(entries)
    meter.check_size(meter.size(listed) + len(listed) * meter.size(separator))
    return listed
