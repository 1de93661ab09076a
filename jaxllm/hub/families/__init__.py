"""Model families: each ``config.json`` format of Hugging Face as a ``DecoderConfig``, in both directions."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.hub.families.families import decoder_config, family

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.hub.families.families": (
            "decoder_config",
            "family",
        )
    },
)

__all__ = ["decoder_config", "family"]
