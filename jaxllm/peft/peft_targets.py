"""Targets of PEFT configurations: which modules of a model a configuration adapts, and with which rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm.peft.adapter import AdapterError

ALL_LINEAR = "all-linear"


def module_targets(config: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Names of the modules that a configuration targets, as PEFT matches them.

    Args:
        config: ``adapter_config.json``: ``target_modules`` is a list of names or of their ends, a regular
            expression, or "all-linear"; ``exclude_modules``, ``modules_to_save`` and ``layers_to_transform`` leave
            modules out.
        names: of all modules that can be adapted.

    Raises:
        AdapterError: a pattern is not a regular expression.
    """
    try:
        return {name for name in names if _is_target(config, name)}
    except re.error as error:
        raise AdapterError(f"target_modules: {error.pattern!r} is not a regular expression: {error}.") from error


def pattern_value(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Value of the first pattern that a module's name ends with (``rank_pattern``, ``alpha_pattern``)."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _is_target(config: Mapping[str, Any], name: str) -> bool:
    if _matches(config.get("exclude_modules") or [], name):
        return False
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in config.get("modules_to_save") or []):
        return False
    targets = config.get("target_modules") or []
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        return True
    if not _matches(targets, name):
        return False
    layers = config.get("layers_to_transform")
    if isinstance(targets, str) or layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or r"[^.]*"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name):
            return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _matches(targets: str | list[str], name: str) -> bool:
    """Whether a name matches a regular expression, or is or ends with one of several names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in targets)
