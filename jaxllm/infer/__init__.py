"""Inference with the training forward."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.infer.cache import DenseCache, empty_cache
    from jaxllm.infer.chat import Chat
    from jaxllm.infer.generate import Generator
    from jaxllm.infer.load import LoadedModel, ModelNotFoundError, load_model
    from jaxllm.infer.sampler import sample

_HOMES = {
    "cache": ("DenseCache", "empty_cache"),
    "chat": ("Chat",),
    "generate": ("Generator",),
    "load": ("LoadedModel", "ModelNotFoundError", "load_model"),
    "sampler": ("sample",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Chat",
    "DenseCache",
    "Generator",
    "LoadedModel",
    "ModelNotFoundError",
    "empty_cache",
    "load_model",
    "sample",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
