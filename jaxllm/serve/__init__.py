"""A server that OpenAI's clients can talk to."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.serve.app import Service, create_app
    from jaxllm.serve.backend import Backend, Load, Served
    from jaxllm.serve.config import ServeConfig
    from jaxllm.serve.server import Server, engine_of, serve

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.serve.app": (
            "Service",
            "create_app",
        ),
        "jaxllm.serve.backend": (
            "Backend",
            "Load",
            "Served",
        ),
        "jaxllm.serve.config": ("ServeConfig",),
        "jaxllm.serve.server": (
            "Server",
            "engine_of",
            "serve",
        ),
    },
)

__all__ = [
    "Backend",
    "Load",
    "ServeConfig",
    "Served",
    "Server",
    "Service",
    "create_app",
    "engine_of",
    "serve",
]
