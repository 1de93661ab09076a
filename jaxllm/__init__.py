"""One JAX/XLA stack to plan, train, adapt, compress and serve large language models.

    import jaxllm

    config = jaxllm.train.RunConfig(...)
    jaxllm.train.train(config)
    model = jaxllm.infer.load_model("runs/quickstart")

Sub-packages are imported on first use, so that ``import jaxllm`` itself is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxllm import _renamed
from jaxllm._platform import lift_host_memory_limit, prefer_cpu_without_accelerator

if TYPE_CHECKING:
    import pallas_kernels as kernels
    import sharding
    from jaxllm import checkpoint, compiler, config, data, evals, hub, infer, models, optim, text, train

__version__ = "0.1.0"

_SUBPACKAGES = {
    **{
        name: f"jaxllm.{name}"
        for name in (
            "checkpoint",
            "compiler",
            "config",
            "data",
            "evals",
            "hub",
            "infer",
            "models",
            "optim",
            "text",
            "train",
        )
    },
    "sharding": "sharding",
    "kernels": "pallas_kernels",
}

__all__ = [
    "checkpoint",
    "compiler",
    "config",
    "data",
    "evals",
    "hub",
    "infer",
    "kernels",
    "models",
    "optim",
    "sharding",
    "text",
    "train",
]

prefer_cpu_without_accelerator()
lift_host_memory_limit()
_renamed.install()


def __getattr__(name: str) -> Any:
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}; its sub-packages are {', '.join(__all__)}")
    return importlib.import_module(_SUBPACKAGES[name])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
