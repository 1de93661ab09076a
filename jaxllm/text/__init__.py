"""Text and tokens: tokenizers of every kind that models come with, and chat templates.

Names are imported when they are first used, so importing this package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import ByteTokenizer, StreamDecoder, Tokenizer, load_tokenizer

_HOMES = {
    "tokenizer": ("ByteTokenizer", "StreamDecoder", "Tokenizer", "load_tokenizer"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["ByteTokenizer", "StreamDecoder", "Tokenizer", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
