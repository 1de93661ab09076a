"""Tool calls in XML: a tag with the function's name and one for each parameter, as Qwen3-Coder and GLM-4.5 write them.

A parameter whose schema is a string is the text between its tags; others are JSON.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.serve.tools.call_format import Schemas, ToolCallFormat, UnsupportedSchema, to_json
from jaxllm.serve.tools.call_grammar import (
    FREE_STRING,
    PLAIN_PROPERTIES,
    has_plain_properties,
    json_rule,
    pattern,
    spelt,
)
from jaxllm.serve.tools.json_calls import parsed
from jaxllm.serve.tools.text_reader import ReadCall, Steps, TextReader
from jaxllm.text import Tokenizer


@dataclass(frozen=True)
class XmlCallFormat(ToolCallFormat):
    """Format whose CALL is ``NAME name_end (key_open KEY key_close VALUE value_close)* call_close``.

    Attributes:
        name_end: text after the function's name.
        key_open, key_close: text around a parameter's name.
        value_close: text after a parameter's value.
        bare_open: shorter text that some models write in place of ``open``; "": none.
    """

    name_end: str = ""
    key_open: str = ""
    key_close: str = ""
    value_close: str = ""
    bare_open: str = ""

    @property
    def arguments_prefix(self) -> str:
        """Text of a call between the function's name and its arguments."""
        return self.name_end

    @property
    def start_markers(self) -> tuple[str, ...]:
        """All markers that announce calls."""
        return (self.start_marker, *filter(None, [self.bare_open]))

    def render_arguments(self, arguments: Any) -> str:
        """Arguments as tags."""
        values = {key: value if isinstance(value, str) else to_json(value) for key, value in arguments.items()}
        return "".join(
            f"{self.key_open}{key}{self.key_close}{value}{self.value_close}" for key, value in values.items()
        )

    def read(self, reader: TextReader, functions: Schemas) -> Steps:
        """Reads one call from the start marker on, see ``ToolCallFormat.read``."""
        at = -1
        for opening in filter(None, (self.open, self.bare_open)):
            if at < 0:
                at = yield from reader.match(opening, 0)
        found = None
        if at >= 0:
            found = yield from self._call(reader, functions, at)
        if found is None:
            yield reader.take(max(1, len(self.start_marker)))
            return
        call, end = found
        reader.take(end)
        yield call

    def _call(self, reader: TextReader, functions: Schemas, at: int) -> Steps:
        """(call, its end), or None."""
        end = yield from reader.find(self.name_end.strip() or "\n", at)
        name = reader.text[at:end].strip()
        if end < 0 or name not in functions:
            return None
        at, arguments = end + len(self.name_end.strip() or "\n"), {}
        schemas = functions[name].get("properties", {})
        key_close, value_close = self.key_close.strip(), self.value_close.strip()
        while (begin := (yield from reader.match(self.key_open, at))) >= 0:
            if (middle := (yield from reader.find(key_close, begin))) < 0:
                return None
            if (end := (yield from reader.find(value_close, middle))) < 0:
                return None
            key, value = reader.text[begin:middle].strip(), reader.text[middle + len(key_close) : end]
            for edge in ("\n",) if self.key_close.endswith("\n") else ():
                value = value.removeprefix(edge).removesuffix(edge)
            arguments[key] = _value(value, schemas.get(key, {}))
            at = end + len(value_close)
        tags = [tag + ">" for tag in self.close.split(">") if tag.strip()]
        for number, tag in enumerate(tags):
            if (end := (yield from reader.match(tag, at))) < 0:
                return (ReadCall(name, arguments), at) if number else None  # the outer tag may be missing
            at = end
        return ReadCall(name, arguments), at

    def arguments_rules(self, number: int, schema: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, list[str]]:
        """A tag for each property, in the order of the schema; those that are not required may be absent."""
        if not has_plain_properties(schema):
            raise UnsupportedSchema(f"this model writes calls in XML, {PLAIN_PROPERTIES}")
        parts, lines = [], []
        for place, (key, one) in enumerate(schema.get("properties", {}).items()):
            name = f"value_{number}_{place}"
            about = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
            lines += self._value_rules(name, key, {**about, **one} if isinstance(one, dict) else {}, tokenizer)
            part = f"{spelt(self.key_open + key + self.key_close, tokenizer)} {name}"
            parts.append(f"({part})" + ("" if key in schema.get("required", ()) else "?"))
        return " ".join(parts), lines

    def _value_rules(self, name: str, key: str, schema: Mapping[str, Any], tokenizer: Tokenizer) -> list[str]:
        close = spelt(self.value_close, tokenizer)
        if schema.get("type") != "string":
            return [f"{name}: {json_rule(schema)} {close}"]
        if other := schema.keys() - FREE_STRING - {"enum", "const", "$defs", "definitions"}:
            message = f"this model writes calls in XML, where the text of {key!r} cannot be held to {min(other)!r}"
            raise UnsupportedSchema(message)
        legal = [schema["const"]] if "const" in schema else schema.get("enum")
        if legal is not None:
            return [f"{name}: ({' | '.join(spelt(str(one), tokenizer) for one in legal)}) {close}"]
        return [f"{name}[lazy]: /(.|\\n)*{pattern(self.value_close)}/"]


def _value(text: str, schema: Any) -> Any:
    """Value of a parameter: its text where the schema says string or nothing, else JSON or a Python literal."""
    kinds = _kinds(schema)
    value = None if kinds == {"string"} else parsed(text.strip())
    if "string" in kinds:
        return None if "null" in kinds and text.strip() == "null" else text
    if text.strip() == "null":
        return None
    if value is not None:
        return value
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _kinds(schema: Any) -> set[str]:
    """Types that a schema allows; "string" where it says nothing."""
    if not isinstance(schema, dict):
        return {"string"}
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if parts:
        return {kind for one in parts for kind in _kinds(one)}
    kind = schema.get("type", "string" if "enum" not in schema and "$ref" not in schema else "object")
    return set(kind) if isinstance(kind, list) else {kind}
