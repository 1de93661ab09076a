"""Training: train state, loss, step, loop, checkpointing and recovery of a run."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.train.config import RunConfig
    from jaxllm.train.evaluate import Evaluation, Evaluator
    from jaxllm.train.loop import TrainResult, train
    from jaxllm.train.recovery.resume import ResumeError
    from jaxllm.train.recovery.rollback import NonFiniteLossError, SpikesError
    from jaxllm.train.run import Run
    from jaxllm.train.step.loss import loss_sums, value_and_grad
    from jaxllm.train.step.loss_spikes import SpikeConfig
    from jaxllm.train.step.objective import ObjectiveConfig
    from jaxllm.train.step.param_average import EmaConfig
    from jaxllm.train.step.routing_losses import RoutingConfig
    from jaxllm.train.step.train_state import TrainState, abstract_state, init_state
    from jaxllm.train.step.training_step import jit_step, train_step
    from jaxllm.train.together.runs_file import read_runs
    from jaxllm.train.together.together_loop import train_together

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.train.config": ("RunConfig",),
        "jaxllm.train.evaluate": (
            "Evaluation",
            "Evaluator",
        ),
        "jaxllm.train.loop": (
            "TrainResult",
            "train",
        ),
        "jaxllm.train.recovery.resume": ("ResumeError",),
        "jaxllm.train.recovery.rollback": (
            "NonFiniteLossError",
            "SpikesError",
        ),
        "jaxllm.train.run": ("Run",),
        "jaxllm.train.step.loss": (
            "loss_sums",
            "value_and_grad",
        ),
        "jaxllm.train.step.loss_spikes": ("SpikeConfig",),
        "jaxllm.train.step.objective": ("ObjectiveConfig",),
        "jaxllm.train.step.param_average": ("EmaConfig",),
        "jaxllm.train.step.routing_losses": ("RoutingConfig",),
        "jaxllm.train.step.train_state": (
            "TrainState",
            "abstract_state",
            "init_state",
        ),
        "jaxllm.train.step.training_step": (
            "jit_step",
            "train_step",
        ),
        "jaxllm.train.together.runs_file": ("read_runs",),
        "jaxllm.train.together.together_loop": ("train_together",),
    },
    renamed={"Finished": "TrainResult"},
)

__all__ = [
    "EmaConfig",
    "Evaluation",
    "Evaluator",
    "NonFiniteLossError",
    "ObjectiveConfig",
    "ResumeError",
    "RoutingConfig",
    "Run",
    "RunConfig",
    "SpikeConfig",
    "SpikesError",
    "TrainResult",
    "TrainState",
    "abstract_state",
    "init_state",
    "jit_step",
    "loss_sums",
    "read_runs",
    "train",
    "train_step",
    "train_together",
    "value_and_grad",
]
