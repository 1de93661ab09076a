"""Tool calls of FunctionGemma and Gemma 4: keys without quotes, and strings between special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.serve.tools.call_format import Schemas, ToolCallFormat, UnsupportedSchema, to_json
from jaxllm.serve.tools.call_grammar import (
    FREE_STRING,
    PLAIN_PROPERTIES,
    has_plain_properties,
    in_order,
    json_rule,
    pattern,
    special_tokens_in,
    spelt,
)
from jaxllm.serve.tools.json_calls import parsed
from jaxllm.serve.tools.text_reader import ReadCall, Steps, TextReader
from jaxllm.text import Tokenizer

_DEPTH = 32
"""Nested lists and objects that are read; deeper ones are no call."""


@dataclass(frozen=True)
class GemmaCallFormat(ToolCallFormat):
    """Format whose CALL is ``name{key:VALUE,key:VALUE}``.

    A VALUE is text between two quotes, a list ``[VALUE,VALUE]``, an object ``{key:VALUE}``, or JSON of another type.

    Attributes:
        quote: special token before and after each string, in which nothing is escaped.
    """

    quote: str = ""

    @property
    def arguments_prefix(self) -> str:
        """Text of a call between the function's name and its arguments."""
        return "{"

    @property
    def call_suffix(self) -> str:
        """Text of a call after its arguments."""
        return "}" + self.close

    @property
    def start_marker(self) -> str:
        """Special token that announces calls in generated text."""
        return self.open.removesuffix("call:")

    def render_arguments(self, arguments: Any) -> str:
        """Keys and values, without the braces around them."""
        return self._render(dict(arguments))[1:-1]

    def _render(self, value: Any) -> str:
        if isinstance(value, str):
            return self.quote + value + self.quote
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._render(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._render, value)) + "]"
        return to_json(value)

    def read(self, reader: TextReader, functions: Schemas) -> Steps:
        """Reads one call from the start marker on, see ``ToolCallFormat.read``."""
        begin = yield from reader.match(self.open, 0)
        end = at = begin
        while end >= 0 and (end := (yield from reader.find(self.close, at))) >= 0:
            if reader.text.count(self.quote, begin, end) % 2 == 0:
                break
            at = end + 1  # the marker is part of a string
        call = None if end < 0 else self._call(reader.text[begin:end], functions)
        if call is None:
            yield reader.take(len(self.start_marker))
            return
        reader.take(end + len(self.close))
        yield call

    def _call(self, text: str, functions: Schemas) -> ReadCall | None:
        name, brace, rest = text.partition("{")
        if name.strip() not in functions:
            return None
        try:
            arguments, end = self._value(brace + rest, 0, _DEPTH)
        except ValueError:
            return None
        return None if rest[end - 1 :].strip() else ReadCall(name.strip(), arguments)

    def _value(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        """(value at this position, its end).

        Raises:
            ValueError: there is none.
        """
        at = _space(text, at)
        if text.startswith(self.quote, at):
            begin = at + len(self.quote)
            end = text.index(self.quote, begin)
            return text[begin:end], end + len(self.quote)
        opening = text[at : at + 1]
        if opening not in ("{", "["):
            found = re.compile(r"[^,\]}]*").match(text, at)
            word = found[0].strip() if found else ""
            if (value := parsed(word)) is None and word != "null":
                raise ValueError("no value")
            return value, at + len(found[0] if found else "")
        if not depth:
            raise ValueError("nested too deeply")
        keys, values, closing = list[str](), list[Any](), "}" if opening == "{" else "]"
        at = _space(text, at + 1)
        while not text.startswith(closing, at):
            if values:
                if not text.startswith(",", at):
                    raise ValueError("no comma")
                at += 1
            if opening == "{":
                colon = text.index(":", at)
                keys.append(text[at:colon].strip().removeprefix(self.quote).removesuffix(self.quote))
                at = colon + 1
            value, at = self._value(text, at, depth - 1)
            values.append(value)
            at = _space(text, at)
        return dict(zip(keys, values, strict=True)) if opening == "{" else values, at + 1

    def arguments_rules(self, number: int, schema: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, list[str]]:
        """Arguments in the order of the schema; those that are not required may be absent."""
        return self._object_rules(str(number), schema, {}, tokenizer)

    def _object_rules(
        self, name: str, schema: Mapping[str, Any], about: Mapping[str, Any], tokenizer: Tokenizer
    ) -> tuple[str, list[str]]:
        if not has_plain_properties(schema):
            raise UnsupportedSchema(f"this model writes calls in a notation of its own, {PLAIN_PROPERTIES}")
        about = {**about, **{word: schema[word] for word in ("$defs", "definitions") if word in schema}}
        parts, lines = list[tuple[str, bool]](), list[str]()
        for place, (key, one) in enumerate(schema.get("properties", {}).items()):
            value, more = self._value_rules(f"{name}_{place}", key, one, about, tokenizer)
            parts.append((f"{spelt(key + ':', tokenizer)} {value}", key in schema.get("required", ())))
            lines += more
        return f"first_{name}_0", lines + in_order(name, parts, spelt(",", tokenizer))

    def _value_rules(
        self, name: str, key: str, schema: Any, about: Mapping[str, Any], tokenizer: Tokenizer
    ) -> tuple[str, list[str]]:
        """(grammar expression of a value, rules that it needs)."""
        schema = schema if isinstance(schema, dict) else {}
        several = schema.get("anyOf") or schema.get("oneOf")
        if several is None and isinstance(schema.get("type"), list):
            several = [{**schema, "type": one} for one in schema["type"]]
        if several:
            parts = [self._value_rules(f"{name}_{i}", key, one, about, tokenizer) for i, one in enumerate(several)]
            return f"({' | '.join(part for part, _ in parts)})", [line for _, lines in parts for line in lines]
        kind, quote = schema.get("type"), spelt(self.quote, tokenizer)
        legal = [schema["const"]] if "const" in schema else schema.get("enum")
        if legal is not None:
            return "(" + " | ".join(spelt(self._render(one), tokenizer) for one in legal) + ")", []
        if kind == "string" and schema.keys() <= FREE_STRING:
            if special_tokens_in(tokenizer, [self.quote]):
                return f"{quote} /(.|\\n)*/ {quote}", []
            return f"{quote} text_{name}", [f"text_{name}[lazy]: /(.|\\n)*{pattern(self.quote)}/"]
        if kind == "object":
            inner, lines = self._object_rules(name, schema, about, tokenizer)
            return f'"{{" {inner} "}}"', lines
        if kind == "array" and schema.keys() <= {"type", "items", "description", "title"}:
            value, lines = self._value_rules(f"{name}_0", key, schema.get("items"), about, tokenizer)
            return f'"[" ({value} ("," {value})*)? "]"', lines
        if kind in ("integer", "number", "boolean", "null"):
            return json_rule({**about, **schema}), []
        message = f"this model writes calls in a notation of its own, where {key!r} cannot be held to its schema"
        raise UnsupportedSchema(f"{message}: a type, enum or const, without limits of strings and arrays, can be")


def _space(text: str, at: int) -> int:
    """First position from ``at`` on that is no white space."""
    while text[at : at + 1].isspace():
        at += 1
    return at
