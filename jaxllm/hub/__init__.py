"""Models from elsewhere and back: one table of weights a family, both ways."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.hub.errors import HubError
    from jaxllm.hub.families import decoder_config
    from jaxllm.hub.gguf_model import find_smollm2, load_gguf
    from jaxllm.hub.huggingface import HubModel, export_hf, load_hf
    from jaxllm.hub.source import Source, find_model, open_source

_HOMES = {
    "errors": ("HubError",),
    "families": ("decoder_config",),
    "gguf_model": ("find_smollm2", "load_gguf"),
    "huggingface": ("HubModel", "export_hf", "load_hf"),
    "source": ("Source", "find_model", "open_source"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "HubError",
    "HubModel",
    "Source",
    "decoder_config",
    "export_hf",
    "find_model",
    "find_smollm2",
    "load_gguf",
    "load_hf",
    "open_source",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
