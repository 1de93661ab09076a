"""A server that OpenAI's clients can talk to."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.serve.app import Service, create_app
    from jaxllm.serve.backend import Backend, Load, Served
    from jaxllm.serve.config import ServeConfig
    from jaxllm.serve.run import Server, engine_of, serve

_HOMES = {
    "app": ("Service", "create_app"),
    "backend": ("Backend", "Load", "Served"),
    "config": ("ServeConfig",),
    "run": ("Server", "engine_of", "serve"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["Backend", "Load", "ServeConfig", "Served", "Server", "Service", "create_app", "engine_of", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
