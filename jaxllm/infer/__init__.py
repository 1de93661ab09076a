"""Inference with the training forward."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.infer.async_engine import AsyncEngine, EngineStopped
    from jaxllm.infer.cache import DenseCache, empty_cache
    from jaxllm.infer.chat import Chat
    from jaxllm.infer.config import EngineConfig
    from jaxllm.infer.engine import Engine
    from jaxllm.infer.grammar import Grammar
    from jaxllm.infer.llm import LLM, Completion, Output, for_one
    from jaxllm.infer.load import LoadedModel, ModelNotFoundError, load_model
    from jaxllm.infer.manifest import RecompileError
    from jaxllm.infer.paged import PagedCache
    from jaxllm.infer.pieces import Piece
    from jaxllm.infer.sampling import SamplingParams
    from jaxllm.infer.sequence import Request

_HOMES = {
    "async_engine": ("AsyncEngine", "EngineStopped"),
    "cache": ("DenseCache", "empty_cache"),
    "chat": ("Chat",),
    "config": ("EngineConfig",),
    "engine": ("Engine",),
    "grammar": ("Grammar",),
    "llm": ("LLM", "Completion", "Output", "for_one"),
    "load": ("LoadedModel", "ModelNotFoundError", "load_model"),
    "manifest": ("RecompileError",),
    "paged": ("PagedCache",),
    "pieces": ("Piece",),
    "sampling": ("SamplingParams",),
    "sequence": ("Request",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Chat",
    "Completion",
    "DenseCache",
    "Engine",
    "EngineConfig",
    "EngineStopped",
    "Grammar",
    "LoadedModel",
    "ModelNotFoundError",
    "Output",
    "PagedCache",
    "Piece",
    "RecompileError",
    "Request",
    "SamplingParams",
    "empty_cache",
    "for_one",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
