"""Guided decoding over HTTP: the grammar that a request's fields ask for."""

from __future__ import annotations

import json
from typing import Any

from jaxllm.infer.grammar import Grammar
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.sampling_fields import SamplingFields

GUIDED_FIELDS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"
}  # fmt: skip
"""Older names of the kinds of ``structured_outputs``."""


def grammar_of(body: SamplingFields) -> tuple[Grammar | None, str]:
    """(grammar that a request asks for, or None; the field that it comes from).

    Raises:
        ApiError: several grammars are given, ``structured_outputs`` is empty, or a schema is no JSON object.
    """
    asked: dict[str, dict[str, Any]] = {
        field: {kind: value} for field, kind in GUIDED_FIELDS.items() if (value := getattr(body, field)) is not None
    }
    if body.structured_outputs is not None:
        asked["structured_outputs"] = given = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        if given.pop("json_object", False):
            given["json_object"] = {"type": "object"}
        if len(given) != 1:
            message = "give one of json, regex, choice, grammar and json_object."
            raise ApiError(400, message, param="structured_outputs")
    form = getattr(body, "response_format", None)
    if form is not None and form.type != "text":
        asked["response_format"] = {
            "json": {"type": "object"} if form.type == "json_object" else form.json_schema.schema_ or {}
        }
    if len(asked) > 1:
        names = sorted(asked)
        raise ApiError(400, f"give one of {' and '.join(names)}.", param=names[-1])
    for field, given in asked.items():
        ((kind, value),) = given.items()
        return _grammar(kind, value, field), field
    return None, "structured_outputs"


def _grammar(kind: str, value: Any, field: str) -> Grammar:
    if not kind.startswith("json"):
        return {"regex": Grammar.regex, "choice": Grammar.choice, "grammar": Grammar.ebnf}[kind](value)
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise ApiError(400, "the schema is not a JSON object.", param=field)
    return Grammar.json_schema(schema)
