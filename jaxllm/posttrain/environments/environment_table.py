"""Environment table: name -> how to create the environment of an episode."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from jaxllm.config import ConfigError, closest
from jaxllm.posttrain.environments.bundled_tools import calculator, python
from jaxllm.posttrain.environments.environment import EnvironmentFactory
from jaxllm.posttrain.environments.tool_environment import ToolEnvironment, tool_schema


def _tools(argument: str) -> EnvironmentFactory:
    """Environment of the functions that ``module:function,module:function`` names."""
    functions = [_imported(one, "tools") for one in argument.split(",") if one]
    if not functions:
        raise ConfigError("environment: tools has no function; give tools:module:function, several with commas.")
    try:
        for function in functions:
            tool_schema(function)
    except TypeError as error:
        raise ConfigError(f"environment: {error}") from None
    return lambda: ToolEnvironment(*functions)


ENVIRONMENTS: dict[str, Callable[[str], EnvironmentFactory]] = {
    "calculator": lambda _: lambda: ToolEnvironment(calculator),
    "python": lambda _: lambda: ToolEnvironment(python),
    "tools": _tools,
}
"""Environment table: name -> argument after the colon -> factory. A row may be added from outside the package."""


def find_environment(spec: str) -> EnvironmentFactory:
    """Factory of an environment: a row of the table, ``tools:module:function,...``, or ``module:factory``.

    Raises:
        ConfigError: there is none; says what is legal.
    """
    name, colon, argument = spec.partition(":")
    if name in ENVIRONMENTS:
        if argument and name != "tools":
            raise ConfigError(f"environment = {spec!r}: {name} takes no argument.")
        return ENVIRONMENTS[name](argument)
    if not colon:
        raise ConfigError(
            f"environment = {spec!r}; legal: {', '.join(ENVIRONMENTS)}, or module:factory for one of your own."
            f"{closest(name, ENVIRONMENTS)}"
        )
    return _imported(spec, "environment")


def _imported(spec: str, what: str) -> Any:
    module, _, name = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"environment: {what} {spec!r} cannot be imported: {error}.") from error
    if not callable(found):
        raise ConfigError(f"environment: {spec!r} is a {type(found).__name__}, which cannot be called.")
    return found
