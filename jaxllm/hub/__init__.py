"""Published models: Hugging Face directories, GGUF files and the hub, loaded and exported by one weight mapping."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.hub.errors import HubError
    from jaxllm.hub.families.families import decoder_config
    from jaxllm.hub.gguf.gguf_model import find_smollm2, load_gguf
    from jaxllm.hub.huggingface import HubModel, export_hf, load_hf
    from jaxllm.hub.model_source import ModelSource, find_model, open_source

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.hub.errors": ("HubError",),
        "jaxllm.hub.families.families": ("decoder_config",),
        "jaxllm.hub.gguf.gguf_model": (
            "find_smollm2",
            "load_gguf",
        ),
        "jaxllm.hub.huggingface": (
            "HubModel",
            "export_hf",
            "load_hf",
        ),
        "jaxllm.hub.model_source": (
            "ModelSource",
            "find_model",
            "open_source",
        ),
    },
    renamed={"Source": "ModelSource"},
)

__all__ = [
    "HubError",
    "HubModel",
    "ModelSource",
    "decoder_config",
    "export_hf",
    "find_model",
    "find_smollm2",
    "load_gguf",
    "load_hf",
    "open_source",
]
