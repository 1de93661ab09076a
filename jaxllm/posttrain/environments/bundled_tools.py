"""Bundled tools of environments: a calculator and a Python interpreter."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from jaxllm.posttrain.environments.code_sandbox import run_python

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MAX_EXPRESSION = 200
"""Characters of an expression that the calculator reads."""


def calculator(expression: str) -> str:
    """Value of an arithmetic expression with numbers, parentheses, and + - * / // %.

    Raises:
        ValueError: it has anything else, or more than 200 characters.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has more than {MAX_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


def python(code: str) -> str:
    """Runs a Python program without network or files, and returns what it prints."""
    return run_python(code)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    raise ValueError("the calculator takes numbers, parentheses, and + - * / // %")
