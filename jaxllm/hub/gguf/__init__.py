"""GGUF files: parsing, dequantisation, and their metadata as a Hugging Face configuration."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.hub.gguf.gguf_file import Gguf, open_gguf

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.hub.gguf.gguf_file": (
            "Gguf",
            "open_gguf",
        )
    },
)

__all__ = ["Gguf", "open_gguf"]
