"""Tool calls in Python: calls with keyword arguments, in a list (Llama 4) or a block of code (Gemma 3)."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.serve.tools.call_format import Schemas, ToolCallFormat, UnsupportedSchema, to_json
from jaxllm.serve.tools.call_grammar import PLAIN_PROPERTIES, has_plain_properties, in_order, json_rule, spelt
from jaxllm.serve.tools.text_reader import ReadCall, Steps, TextReader
from jaxllm.text import Tokenizer

_NAMES = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


@dataclass(frozen=True)
class PythonCallFormat(ToolCallFormat):
    """Format whose CALL is ``name(key=value, ...)``, with Python's literals, or JSON's ``true``, ``false``, ``null``.

    A list of calls ends with its bracket where ``begin`` ends with "[", and at ``end`` otherwise.
    """

    @property
    def arguments_prefix(self) -> str:
        """Text of a call between the function's name and its arguments."""
        return "("

    @property
    def call_suffix(self) -> str:
        """Text of a call after its arguments."""
        return ")"

    def render_arguments(self, arguments: Any) -> str:
        """Keyword arguments."""
        return ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())

    def read(self, reader: TextReader, functions: Schemas) -> Steps:
        """Reads the list of calls, see ``ToolCallFormat.read``."""
        begin = yield from reader.match(self.begin, 0)
        if begin < 0:
            yield reader.take(len(self.start_marker))
            return
        if self.begin.endswith("["):
            end = yield from reader.bracketed(begin - 1, "\"'")
            text, rest = reader.text[begin - 1 : end], self.end.removeprefix("]")
            if end >= 0 and rest:
                end = max(end, (yield from reader.match(rest, end)))
        else:
            at = yield from reader.find(self.end.strip(), begin)
            text, end = reader.text[begin:at], at + len(self.end.strip()) if at >= 0 else -1
        calls = [] if end < 0 else calls_in(text, functions)
        if not calls:
            yield reader.take(len(self.start_marker))
            return
        reader.take(end)
        yield from calls

    def arguments_rules(self, number: int, schema: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, list[str]]:
        """Keyword arguments in the order of the schema; those that are not required may be absent."""
        if not has_plain_properties(schema):
            raise UnsupportedSchema(f"this model writes calls in Python, {PLAIN_PROPERTIES}")
        about = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        parts = [
            (
                f"{spelt(key + '=', tokenizer)} {json_rule({**about, **one} if isinstance(one, dict) else about)}",
                key in schema.get("required", ()),
            )
            for key, one in schema.get("properties", {}).items()
        ]
        return f"first_{number}_0", in_order(str(number), parts, spelt(", ", tokenizer))


def calls_in(text: str, functions: Schemas) -> list[ReadCall]:
    """Calls of a list, a tuple or lines of Python; [] unless all of it is calls of functions that may be called."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            body = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    nodes: list[ast.expr] = []
    for statement in body:
        if not isinstance(statement, ast.Expr):
            return []
        nodes += statement.value.elts if isinstance(statement.value, ast.List | ast.Tuple) else [statement.value]
    found = [_call(node, functions) for node in nodes]
    calls = [one for one in found if one is not None]
    return calls if len(calls) == len(found) else []


def _call(node: ast.expr, functions: Schemas) -> ReadCall | None:
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    if name == "print" and name not in functions and len(node.args) == 1 and not node.keywords:
        return _call(node.args[0], functions)  # how Gemma's code shows a result
    names = list(functions.get(name, {}).get("properties", {}))
    if name not in functions or len(node.args) > len(names) or any(word.arg is None for word in node.keywords):
        return None
    try:
        arguments = {key: _value(value) for key, value in zip(names, node.args, strict=False)}
        return ReadCall(name, arguments | {str(word.arg): _value(word.value) for word in node.keywords})
    except (ValueError, TypeError, RecursionError):
        return None


def _literal(value: Any) -> str:
    """Python literal of a JSON value; strings are as in JSON."""
    if isinstance(value, str):
        return to_json(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(one)}" for key, one in value.items()) + "}"
    return repr(value)


def _value(node: ast.expr) -> Any:
    """Value of a literal, as JSON has it.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("unpacking")
        return {str(ast.literal_eval(key)): _value(one) for key, one in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"a {type(value).__name__}")
    return value
