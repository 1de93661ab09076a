"""Pieces of grammars, in Lark's notation, that force tool calls and the text around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.text import Tokenizer

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
"""Schema of arguments that a grammar leaves free."""
PLAIN_PROPERTIES = (
    "where a grammar needs plain properties, and no others: give those, and make all functions strict or none"
)
FREE_STRING = frozenset({"type", "description", "title", "default", "examples"})
"""Words of the schema of a string that any text fits."""


def has_plain_properties(schema: Mapping[str, Any]) -> bool:
    """Whether a schema of arguments lists all properties that are legal."""
    combined = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"} & schema.keys()
    return not combined and schema.get("additionalProperties") is False


def special_tokens_in(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[int, ...]:
    """Ids of the special tokens whose names occur in texts; the detokenizer must spell them out for the parser."""
    texts = list(texts)
    return tuple(i for i, name in tokenizer.special_names.items() if any(name in text for text in texts))


def reasoning_rules(end: str, tokenizer: Tokenizer) -> list[str]:
    """Grammar rules of a reasoning section ("thought"): any text up to the end marker, then white space."""
    return ["thought: upto /\\s*/", *upto("upto", end, tokenizer)]


def upto(name: str, marker: str, tokenizer: Tokenizer) -> list[str]:
    """Grammar rule: any text up to the first occurrence of the marker, and the marker."""
    if special_tokens_in(tokenizer, [marker]):
        return [f"{name}: /(.|\\n)*/ {spelt(marker, tokenizer)}"]
    return [f"{name}[lazy]: /(.|\\n)*{pattern(marker)}/"]


def pattern(text: str) -> str:
    """Text escaped for a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def spelt(text: str, tokenizer: Tokenizer) -> str:
    """Text in Lark's notation; special tokens in it are matched by id."""
    if not text:
        return ""
    names = {name: i for i, name in tokenizer.special_names.items() if name in text}
    if not names:
        return json.dumps(text, ensure_ascii=False)
    parts = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text)
    return " ".join(f"<[{names[p]}]>" if p in names else json.dumps(p, ensure_ascii=False) for p in parts if p)


def in_order(name: str, parts: Sequence[tuple[str, bool]], between: str) -> list[str]:
    """Grammar rules ``first_NAME_0`` and on: parts in this order, each (expression, whether it must be there)."""
    lines = []
    for begun in (False, True):
        kind = "more" if begun else "first"
        for place, (expression, required) in enumerate(parts):
            skip = "" if required else f" | {kind}_{name}_{place + 1}"
            head = f"{between} " if begun else ""
            lines.append(f"{kind}_{name}_{place}: {head}{expression} more_{name}_{place + 1}{skip}")
        lines.append(f'{kind}_{name}_{len(parts)}: ""')
    return lines


def json_rule(schema: Mapping[str, Any]) -> str:
    """Grammar expression of JSON that is valid by the schema."""
    return f"%json {json.dumps(tight(schema))}"


def tight(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema for JSON without white space between tokens."""
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without properties that it does not name, unless it allows them itself.

    A JSON schema allows any further properties by default; a model that is forced to write JSON would make some up.
    An object without ``properties`` is empty then. What follows the result is valid by the schema.
    """
    out = dict(schema)
    combined = {"$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "dependentSchemas"} & out.keys()
    if out.get("type") == "object" and not combined:
        out.setdefault("properties", {})
        out.setdefault("additionalProperties", False)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(found := out.get(name), dict):
            out[name] = {key: closed(one) if isinstance(one, dict) else one for key, one in found.items()}
    if isinstance(out.get("items"), dict):
        out["items"] = closed(out["items"])
    for name in ("anyOf", "oneOf"):
        if isinstance(found := out.get(name), list):
            out[name] = [closed(one) if isinstance(one, dict) else one for one in found]
    return out
