"""OpenAI-compatible HTTP server: chat completions, completions, embeddings, tool calls, structured outputs, metrics."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.serve.app import ApiService, create_app
    from jaxllm.serve.backend import Backend, EngineBackend, EngineLoad
    from jaxllm.serve.config import ServeConfig
    from jaxllm.serve.server import Server, backend_factory, serve

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.serve.app": (
            "ApiService",
            "create_app",
        ),
        "jaxllm.serve.backend": (
            "Backend",
            "EngineLoad",
            "EngineBackend",
        ),
        "jaxllm.serve.config": ("ServeConfig",),
        "jaxllm.serve.server": (
            "Server",
            "backend_factory",
            "serve",
        ),
    },
    renamed={"Load": "EngineLoad", "Served": "EngineBackend", "Service": "ApiService", "engine_of": "backend_factory"},
)

__all__ = [
    "ApiService",
    "Backend",
    "EngineBackend",
    "EngineLoad",
    "ServeConfig",
    "Server",
    "backend_factory",
    "create_app",
    "serve",
]
