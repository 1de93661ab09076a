"""Inference: LLM API, engine with continuous batching, samplers and KV caches, over the training forward pass."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.convert.load import LoadedModel, ModelNotFoundError, load_model
    from jaxllm.infer.adapter_catalogue import AdapterCatalogue, AdapterNotFoundError
    from jaxllm.infer.async_engine import AsyncEngine, EngineStopped
    from jaxllm.infer.chat_session import Chat
    from jaxllm.infer.engine.engine import Engine
    from jaxllm.infer.engine.stream_output import OutputDelta
    from jaxllm.infer.engine_config import EngineConfig
    from jaxllm.infer.grammar import Grammar
    from jaxllm.infer.llm import LLM, Completion, Output, single_user_config
    from jaxllm.infer.runner.dense_cache import DenseCache, empty_cache
    from jaxllm.infer.runner.paged_cache import PagedCache
    from jaxllm.infer.runner.program_cache import RecompileError
    from jaxllm.infer.sampling_params import SamplingParams
    from jaxllm.infer.scheduling.sequence import Request

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.convert.load": (
            "LoadedModel",
            "ModelNotFoundError",
            "load_model",
        ),
        "jaxllm.infer.adapter_catalogue": (
            "AdapterCatalogue",
            "AdapterNotFoundError",
        ),
        "jaxllm.infer.async_engine": (
            "AsyncEngine",
            "EngineStopped",
        ),
        "jaxllm.infer.chat_session": ("Chat",),
        "jaxllm.infer.engine.engine": ("Engine",),
        "jaxllm.infer.scheduling.sequence": ("Request",),
        "jaxllm.infer.engine.stream_output": ("OutputDelta",),
        "jaxllm.infer.engine_config": ("EngineConfig",),
        "jaxllm.infer.grammar": ("Grammar",),
        "jaxllm.infer.llm": (
            "Completion",
            "LLM",
            "Output",
            "single_user_config",
        ),
        "jaxllm.infer.runner.dense_cache": (
            "DenseCache",
            "empty_cache",
        ),
        "jaxllm.infer.runner.paged_cache": ("PagedCache",),
        "jaxllm.infer.runner.program_cache": ("RecompileError",),
        "jaxllm.infer.sampling_params": ("SamplingParams",),
    },
    renamed={"Piece": "OutputDelta", "for_one": "single_user_config"},
)

__all__ = [
    "LLM",
    "AdapterCatalogue",
    "AdapterNotFoundError",
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
    "OutputDelta",
    "PagedCache",
    "RecompileError",
    "Request",
    "SamplingParams",
    "empty_cache",
    "load_model",
    "single_user_config",
]
