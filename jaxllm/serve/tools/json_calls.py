"""Tool calls in JSON: an object with name and arguments, or a name and an object of arguments; with markers or bare.

Bare calls are those of models that write ``{"name": ..., "arguments": {...}}`` without the markers of their format, by
itself or in a fenced block of code. They count only if they name a function that may be called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.serve.tools.call_format import Schemas, ToolCallFormat, to_json
from jaxllm.serve.tools.call_grammar import tight
from jaxllm.serve.tools.text_reader import ReadCall, Steps, TextReader
from jaxllm.text import Tokenizer

ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = {"name", "type", "id", *ARGUMENT_KEYS}
_FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n?")
_FIRST_KEY = re.compile(r'[\[\s]*\{\s*"(\w*)"?')


@dataclass(frozen=True)
class JsonCallFormat(ToolCallFormat):
    """Format whose CALL is a JSON object with the function's name and its arguments.

    With ``name_separator`` a CALL is the name, the separator, and the arguments as a JSON object.

    Attributes:
        arguments_key: key of the arguments, where a CALL is an object.
        name_separator: text between name and arguments; None: a CALL is an object.
        id_separator: text between the name and an id that the model makes up, before ``name_separator``; "": none.
    """

    arguments_key: str = "arguments"
    name_separator: str | None = None
    id_separator: str = ""

    streams = True

    @property
    def name_prefix(self) -> str:
        """Text of a call before the function's name."""
        return self.open if self.name_separator is not None else self.open + '{"name": "'

    @property
    def arguments_prefix(self) -> str:
        """Text of a call between the function's name and its arguments."""
        return self.name_separator if self.name_separator is not None else f'", "{self.arguments_key}": '

    @property
    def call_suffix(self) -> str:
        """Text of a call after its arguments."""
        return self.close if self.name_separator is not None else "}" + self.close

    def render_arguments(self, arguments: Any) -> str:
        """Arguments as a JSON object."""
        return to_json(arguments)

    def arguments_rules(self, number: int, schema: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, list[str]]:
        """JSON that the schema validates."""
        return f"%json {json.dumps(tight(schema))}", []

    def read(self, reader: TextReader, functions: Schemas) -> Steps:
        """Reads calls from the start marker on, see ``ToolCallFormat.read``."""
        at = yield from reader.match(self.begin, 0)
        if at < 0:
            yield reader.take(len(self.start_marker))
        while at >= 0:
            found, at = yield from self._call(reader, functions, at)
            if found is None:
                yield reader.take(max(at, len(self.start_marker)))
                return
            reader.take(at)
            yield found
            if not (self.begin or self.exclusive):
                return  # every call has a start marker of its own
            at = yield from self._after_call(reader)

    def _after_call(self, reader: TextReader) -> Steps:
        """After a call: position of the next one, or -1 after the last."""
        if self.end and (at := (yield from reader.match(self.end, 0))) >= 0:
            reader.take(at)
            return -1
        if not (yield from reader.space()):
            return -1
        return (yield from reader.match(self.between, 0))

    def _call(self, reader: TextReader, functions: Schemas, at: int) -> Steps:
        """(call, its end), or (None, the end of the text that is not a call)."""
        held = at
        at = yield from reader.match(self.open, held)
        name = ""
        if self.name_separator is not None and at >= 0:
            marker = self.name_separator.strip()
            if (end := (yield from reader.find(marker, at))) < 0:
                return None, len(reader.text)
            name, at = reader.text[at:end], end + len(marker)
            name = (name.partition(self.id_separator)[0] if self.id_separator else name).strip()
        if at < 0:
            return None, held
        begin = yield from reader.match("{", at)
        if begin < 0:
            return None, at
        if (end := (yield from reader.bracketed(begin - 1))) < 0:
            return None, len(reader.text)
        value = parsed(reader.text[begin - 1 : end])
        if self.name_separator is None:
            found = call_of(value, functions)
        else:
            found = ReadCall(name, value) if isinstance(value, dict) and name in functions else None
        if found is None:
            return None, end
        at = yield from reader.match(self.close, end)
        return (found, at) if at >= 0 else (None, end)


def read_bare(reader: TextReader, functions: Schemas, legal: Callable[[str, dict[str, Any]], bool] | None) -> Steps:
    """Reads a call, or a list of calls, at the beginning of a line; the generator yields as ``ToolCallFormat.read``.

    Calls whose arguments are not ``legal`` are text.
    """
    at = 0
    if reader.text.startswith("```"):
        while not reader.last and ((found := _FENCE.match(reader.text)) is None or found.end() == len(reader.text)):
            yield None
        at = found.end() if (found := _FENCE.match(reader.text)) else 3
    while not reader.last and (found := _FIRST_KEY.match(reader.text, at)) is None and _may_begin(reader.text[at:]):
        yield None
    while not reader.last and (found := _FIRST_KEY.match(reader.text, at)) and found.end() == len(reader.text):
        yield None
    found = _FIRST_KEY.match(reader.text, at)
    if found is None or found[1] not in _CALL_KEYS or not found[0].endswith('"'):
        yield reader.take(max(at, 1))
        return
    start = found.start() + len(found[0]) - len(found[0].lstrip())
    end = yield from reader.bracketed(start)
    calls = [] if end < 0 else _calls(parsed(reader.text[start:end]), functions)
    if not calls or (legal is not None and not all(legal(*call) for call in calls)):
        yield reader.take(max(at, 1))
        return
    if at:
        tail = yield from reader.match("```", end)
        end = tail if tail >= 0 else end
    reader.take(end)
    yield from calls


def _may_begin(text: str) -> bool:
    """Whether a text may yet become the beginning of a bare call."""
    return re.fullmatch(r"\s*(\[\s*)?(\{\s*)?", text) is not None


def _calls(value: Any, functions: Schemas) -> list[ReadCall]:
    """Calls of an object or a list of objects, all of which must be calls."""
    found = [call_of(one, functions) for one in (value if isinstance(value, list) else [value])]
    calls = [one for one in found if one is not None]
    return calls if len(calls) == len(found) else []


def call_of(value: Any, functions: Schemas) -> ReadCall | None:
    """Call that an object with name and arguments is; None where it is none of a function that may be called."""
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in functions:
        return None
    if not value.keys() <= _CALL_KEYS or len(keys := value.keys() & set(ARGUMENT_KEYS)) != 1:
        return None
    arguments = value[keys.pop()]
    arguments = parsed(arguments) if isinstance(arguments, str) else arguments
    return ReadCall(name, arguments) if isinstance(arguments, dict) else None


def parsed(text: str) -> Any:
    """The JSON value that a text is; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
