"""Training: state, loss, step, loop."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.train.config import RunConfig
    from jaxllm.train.evaluate import Evaluation, Evaluator
    from jaxllm.train.loop import Finished, train
    from jaxllm.train.loss import loss_sums, value_and_grad
    from jaxllm.train.recovery import NonFiniteLossError, SpikesError
    from jaxllm.train.resume import ResumeError
    from jaxllm.train.routing import RoutingConfig
    from jaxllm.train.run import Run
    from jaxllm.train.spikes import SpikeConfig
    from jaxllm.train.state import TrainState, abstract_state, init_state
    from jaxllm.train.step import jit_step, train_step

_HOMES = {
    "config": ("RunConfig",),
    "evaluate": ("Evaluation", "Evaluator"),
    "loop": ("Finished", "train"),
    "loss": ("loss_sums", "value_and_grad"),
    "recovery": ("NonFiniteLossError", "SpikesError"),
    "resume": ("ResumeError",),
    "routing": ("RoutingConfig",),
    "run": ("Run",),
    "spikes": ("SpikeConfig",),
    "state": ("TrainState", "abstract_state", "init_state"),
    "step": ("jit_step", "train_step"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Evaluation",
    "Evaluator",
    "Finished",
    "NonFiniteLossError",
    "ResumeError",
    "RoutingConfig",
    "Run",
    "RunConfig",
    "SpikeConfig",
    "SpikesError",
    "TrainState",
    "abstract_state",
    "init_state",
    "jit_step",
    "loss_sums",
    "train",
    "train_step",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
