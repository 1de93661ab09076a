"""Resource limits of chat templates: steps, time, and sizes of values and output, counted while a template renders.

The limits are far above what the longest conversation needs.
"""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2

MAX_SOURCE = 1_000_000
"""Maximum length of a template in characters."""
MAX_OUTPUT = 16_000_000
"""Maximum length of the output in characters, captured text included."""
MAX_VALUE = 16_000_000
"""Maximum size of one value: characters, plus entries of all nesting levels."""
MAX_TOTAL_SIZE = 400_000_000
"""Maximum total size of all intermediate values."""
MAX_STEPS = 1_000_000
"""Maximum number of loop iterations, calls and operations."""
MAX_SECONDS = 10.0
"""Maximum rendering time."""
MAX_WIDTH = 100_000
"""Maximum width given to a function that pads, repeats or formats."""
MAX_BITS = 10_000
"""Maximum size of an integer in bits."""

# Methods of strings and numbers whose result may be larger than their arguments.
_WIDENING_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "to_bytes", "zfill"})

_VIEWS = (type({}.items()), type({}.keys()), type({}.values()))


class LimitExceeded(jinja2.TemplateError):
    """A template exceeds a resource limit."""


class ResourceMeter:
    """Resource meter: counts what one rendering uses and raises ``LimitExceeded`` above a limit."""

    def __init__(self) -> None:
        self._steps = self._total_size = self._output_size = 0
        self._deadline = time.monotonic() + MAX_SECONDS
        self._sizes: dict[int, tuple[Any, int]] = {}  # holds the value too, so that its id is not reused

    def step(self) -> None:
        """Counts one step and checks the deadline."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise LimitExceeded(f"it does not come to an end: more than {MAX_STEPS:,} steps")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise LimitExceeded(f"it runs for more than {MAX_SECONDS:g} s")

    def made(self, value: Any) -> Any:
        """Counts an intermediate value of the template and returns it."""
        self.step()
        size = self.size(value)
        self._total_size += size
        if size > MAX_VALUE or self._total_size > MAX_TOTAL_SIZE:
            raise LimitExceeded(f"it makes too much data: a value of size {size:,}, {self._total_size:,} in all")
        return value

    def written(self, value: Any) -> Any:
        """Counts a part of the output and returns it."""
        self.step()
        self._output_size += self.size(value)
        if self._output_size > MAX_OUTPUT:
            raise LimitExceeded(f"it writes more than {MAX_OUTPUT:,} characters")
        return value

    def size(self, value: Any) -> int:
        """Size of a value: characters of a string; for a list or mapping, its entries and their sizes, nested too."""
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

    def check_width(self, arguments: Iterable[Any], times: int) -> None:
        """Checks the result of padding or formatting in advance: at most the widest argument, `times` times."""
        widest = 1
        for argument in arguments:
            if isinstance(argument, int | float) and abs(argument) > MAX_WIDTH:
                raise LimitExceeded(f"it asks for a width of {argument:g}")
            widest = max(widest, abs(int(argument)) if isinstance(argument, int | float) else self.size(argument))
        self.check_size(widest * max(times, 1))

    def check_size(self, size: int) -> None:
        """Checks the size of a value before it is made."""
        if size > MAX_VALUE:
            raise LimitExceeded(f"it would make a value of size {size:,}")


def check_method(
    meter: ResourceMeter, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Checks the result size of a string's or number's method in advance; returns the arguments, iterators as lists."""
    given = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        check_format(meter, owner, given)
    elif name in _WIDENING_METHODS:
        meter.check_width(given, owner.count("\t") if name == "expandtabs" else 1)
    elif name == "replace" and len(args) > 1:
        meter.check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        return (joinable(meter, owner, args[0]), *args[1:])
    elif name == "translate" and args:
        meter.check_size(len(owner) * meter.size(args[0]))
    return args


def check_format(meter: ResourceMeter, text: str, arguments: Iterable[Any]) -> None:
    """Checks the result size of string formatting: widths are in the format or the arguments; fields use the widest."""
    if re.search(r"\{[^{}]*:[^{}]*\{", text):
        raise LimitExceeded("it takes the width of a field from another field")
    widths = [int(digits[:9]) for digits in re.findall(r"\d+", text)]
    meter.check_width([*widths, *arguments], text.count("%") + text.count("{"))


def joinable(meter: ResourceMeter, separator: Any, entries: Iterable[Any]) -> list[Any]:
    """Entries of a join as a list, after checking the size of the joined string."""
    listed = list(entries)
    meter.check_size(meter.size(listed) + len(listed) * meter.size(separator))
    return listed
