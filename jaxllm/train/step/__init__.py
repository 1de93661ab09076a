"""Training step: loss, gradients, optimizer update, and the variants that some optimizers need."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.train.step.training_step import jit_step, train_step

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.train.step.training_step": (
            "jit_step",
            "train_step",
        )
    },
)

__all__ = ["jit_step", "train_step"]
