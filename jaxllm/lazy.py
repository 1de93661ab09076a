"""Lazy exports: a package names its public API without importing the modules behind it.

    __getattr__, __dir__ = lazy_exports(__name__, {"jaxllm.infer.llm": ("LLM",)}, renamed={"Model": "LLM"})

``import jaxllm`` and ``jaxllm --help`` stay fast, because a module is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, Sequence[str]], renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Module-level ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use.

    Args:
        package: the package's own name.
        homes: module -> the public names that it defines.
        renamed: deprecated name -> the name that replaces it; using one raises a ``FutureWarning``.

    Returns:
        the two functions, to be bound in the package.
    """
    home = {name: module for module, names in homes.items() for name in names}
    old = dict(renamed or {})

    def getattr_(name: str) -> Any:
        if name in old:
            message = f"{package}.{name} is now {package}.{old[name]}; the old name goes away in the next release."
            warnings.warn(message, FutureWarning, stacklevel=2)
            name = old[name]
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    def dir_() -> list[str]:
        return sorted(home)

    return getattr_, dir_
