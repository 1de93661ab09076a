"""Tokenizers and chat templates: Hugging Face, SentencePiece, tiktoken and GGUF files, bytes, BPE training.

Names are imported when they are first used, so importing this package costs nothing.
"""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.text.byte_tokenizer import ByteTokenizer
    from jaxllm.text.chat_template.chat_template import ChatTemplate, TemplateError, load_template, template_from_gguf
    from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf
    from jaxllm.text.tokenizer import StreamDecoder, Tokenizer
    from jaxllm.text.tokenizer_loading import load_tokenizer

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.text.byte_tokenizer": ("ByteTokenizer",),
        "jaxllm.text.chat_template.chat_template": (
            "ChatTemplate",
            "TemplateError",
            "load_template",
            "template_from_gguf",
        ),
        "jaxllm.text.gguf_tokenizer": ("tokenizer_from_gguf",),
        "jaxllm.text.tokenizer_loading": ("load_tokenizer",),
        "jaxllm.text.tokenizer": (
            "StreamDecoder",
            "Tokenizer",
        ),
    },
)

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
