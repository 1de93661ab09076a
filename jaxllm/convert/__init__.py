"""Models on disk: load, convert, inspect and upcycle them, whether they are runs or published checkpoints."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.convert.load import LoadedModel, ModelNotFoundError, load_model

__getattr__, __dir__ = lazy_exports(
    __name__, {"jaxllm.convert.load": ("LoadedModel", "ModelNotFoundError", "load_model")}
)

__all__ = ["LoadedModel", "ModelNotFoundError", "load_model"]
