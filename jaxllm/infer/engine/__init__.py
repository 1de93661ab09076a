"""Inference engine: continuous batching over a paged KV cache, on the host."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.infer.engine.engine import Engine

__getattr__, __dir__ = lazy_exports(__name__, {"jaxllm.infer.engine.engine": ("Engine",)})

__all__ = ["Engine"]
