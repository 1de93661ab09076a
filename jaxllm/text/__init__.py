"""Text and tokens: tokenizers of every kind that models come with, and chat templates.

Names are imported when they are first used, so importing this package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.text.byte import ByteTokenizer
    from jaxllm.text.gguf import tokenizer_from_gguf
    from jaxllm.text.load import load_tokenizer
    from jaxllm.text.template import ChatTemplate, TemplateError, load_template, template_from_gguf
    from jaxllm.text.tokenizer import StreamDecoder, Tokenizer

_HOMES = {
    "byte": ("ByteTokenizer",),
    "gguf": ("tokenizer_from_gguf",),
    "load": ("load_tokenizer",),
    "template": ("ChatTemplate", "TemplateError", "load_template", "template_from_gguf"),
    "tokenizer": ("StreamDecoder", "Tokenizer"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "StreamDecoder",
    "TemplateError",
    "Tokenizer",
    "load_template",
    "load_tokenizer",
    "template_from_gguf",
    "tokenizer_from_gguf",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
