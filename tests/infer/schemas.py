"""Random JSON schemas: nested, with references, enums and Unicode text, and bounded, so that completions end."""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = ("name", "größe", "名前", "a b", 'quo"te', "ключ", "back\\slash", "emoji🙂", "x", "items")
VALUES = (1, -2.5, True, None, "red", "grün", "日本", 'say "hi"', "🙂", "a\\b", "", "tab\t")


def schema(rng: np.random.Generator) -> dict[str, Any]:
    """One whose root is an object, with definitions that it may refer to, one of them to itself."""
    tree = {
        "type": "object",
        "properties": {
            "value": {"type": "integer", "minimum": 0, "maximum": 9},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    whole = _object(rng, 3)
    whole["$defs"] = {"tree": tree, "colour": {"enum": ["red", "grün", "青"]}, "point": _object(rng, 1, refs=False)}
    return whole


def _object(rng: np.random.Generator, depth: int, *, refs: bool = True) -> dict[str, Any]:
    names = rng.choice(NAMES, rng.integers(1, 4), replace=False).tolist()
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1, refs) for name in names},
        "required": names[: rng.integers(0, len(names) + 1)],
        "additionalProperties": False,
    }


def _value(rng: np.random.Generator, depth: int, refs: bool) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "array", "anyOf"] if depth > 0 else []
    kinds += ["ref", "ref"] if refs else []
    kind = rng.choice(kinds)
    low = int(rng.integers(-50, 50))
    if kind == "string":
        least = int(rng.integers(0, 3))
        return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(1, 5))}
    if kind in ("integer", "number"):
        return {"type": str(kind), "minimum": low, "maximum": low + int(rng.integers(1, 1000))}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": str(rng.choice(["^[a-f]{2,4}$", "^(ja|nein)$", "^\\d{3}-\\d{2}$", "^[äöü]+x$"])),
        }
    if kind == "enum":
        return {"enum": [VALUES[i] for i in rng.choice(len(VALUES), 3, replace=False)]}
    if kind == "const":
        return {"const": VALUES[rng.integers(len(VALUES))]}
    if kind == "object":
        return _object(rng, depth, refs=refs)
    if kind == "array":
        least = int(rng.integers(0, 2))
        return {"type": "array", "items": _value(rng, depth - 1, refs), "minItems": least, "maxItems": least + 2}
    if kind == "anyOf":
        return {"anyOf": [_value(rng, depth - 1, refs), _value(rng, depth - 1, refs)]}
    if kind == "ref":
        return {"$ref": f"#/$defs/{rng.choice(['tree', 'colour', 'point'])}"}
    return {"type": str(kind)}
