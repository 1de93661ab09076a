"""Training step: loss, gradients and update as one pure function, and what optimizers change of it."""

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
