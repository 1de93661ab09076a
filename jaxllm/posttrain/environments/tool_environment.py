"""Tool environment: a policy calls Python functions, and its episode ends with a turn that calls none.

A call is written as Hermes and Qwen write them, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a turn
is that JSON object alone. What a function returns, or why the call failed, is the observation.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.posttrain.environments.environment import Observation

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
MAX_OBSERVATION = 4000
"""Characters of a tool's result that the policy reads."""


class ToolEnvironment:
    """Environment whose tools are Python functions with annotated parameters and a docstring.

    Args:
        functions: the tools; their names are those that the policy calls.
    """

    role = "tool"
    stop = ()

    def __init__(self, *functions: Callable[..., Any]):
        self._functions = {function.__name__: function for function in functions}
        self.tools = tuple(map(tool_schema, functions))

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Does nothing: tools have no state."""

    def step(self, action: str) -> Observation:
        """Runs the calls of a turn, one after the other; a turn without a call ends the episode."""
        calls = written_calls(action)
        if not calls:
            return Observation(done=True)
        results = [self._run(call) for call in calls]
        text = "\n".join(text for text, _ in results)
        return Observation(text, calls=len(calls), flaws=sum(not worked for _, worked in results))

    def _run(self, written: str) -> tuple[str, bool]:
        """Result of a call as text, and whether it succeeded."""
        try:
            call = json.loads(written)
        except ValueError as error:
            return f"error: the call is not valid JSON ({error})", False
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
            return 'error: a call is an object with "name" and "arguments", which is an object', False
        function = self._functions.get(str(call.get("name")))
        if function is None:
            return f"error: there is no tool {call.get('name')!r}; legal: {', '.join(self._functions)}", False
        arguments = call.get("arguments", {})
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"error: {function.__name__}: {error}", False
        try:
            result = function(**arguments)
        except Exception as error:  # whatever a tool raises is something for the policy to read
            return f"error: {type(error).__name__}: {error}", False
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        return text if len(text) <= MAX_OBSERVATION else text[:MAX_OBSERVATION] + " [cut]", True


def written_calls(action: str) -> list[str]:
    """Calls of a turn as JSON texts, in their order: those in `<tool_call>` tags, or the turn itself if it is one."""
    tagged = [one.strip() for one in _CALL.findall(action)]
    if tagged:
        return tagged
    try:
        whole = json.loads(action)
    except ValueError:
        return []
    return [action] if isinstance(whole, dict) and "name" in whole and "arguments" in whole else []


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a function, as chat templates take tools.

    Raises:
        TypeError: a parameter has no annotation, or one that JSON has no type for; names it.
    """
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = typing.get_origin(hints.get(name)) or hints.get(name)
        if kind not in _TYPES or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {function.__name__}: annotate its parameter {name} with one of "
                f"{', '.join(one.__name__ for one in _TYPES)}."
            )
        properties[name] = {"type": _TYPES[kind]}
        if parameter.default is parameter.empty:
            required.append(name)
    described = (inspect.getdoc(function) or "").partition("\n\n")[0]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": described, "parameters": parameters},
    }


def tool_instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """System message that describes tools and how to call them, for a chat template that leaves tools out."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    call = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'
    return f"You may call these functions:\n{listed}\nTo call one, write {call}. Otherwise answer."
