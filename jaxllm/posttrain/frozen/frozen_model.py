"""Training of small parts beside a frozen model, such as what a serving engine adds to it: the loop that they share.

A run takes minutes, so it has no checkpoints: one that was stopped begins anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxllm.convert.load import LoadedModel, load_model
from jaxllm.data import load_dataset
from jaxllm.optim.build import optimizer
from jaxllm.train import RunConfig, TrainResult

READ = ("name", "model", "init_from", "data", "optim", "steps", "seed", "log_every", "out")
"""Settings that every such run reads, beside its own; the others have to be as they are by default."""

Step = Callable[[Any, Any, Any, Any], tuple[Any, Any, dict[str, jax.Array]]]
"""``(parts, optimizer state, weights of the model, batch) -> (parts, state, metrics)``."""


@dataclass(frozen=True)
class FrozenModelConfig(RunConfig):
    """Configuration of a run that trains parts beside the frozen model of ``init_from``."""

    loop_together: ClassVar[str] = ""
    what: ClassVar[str] = ""
    """What the run trains, in errors."""
    also_reads: ClassVar[tuple[str, ...]] = ()
    """Further settings of ``RunConfig`` that the run reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.init_from:
            raise ValueError(f"{self.what} are those of a model: give init_from.")
        read, shared = (*READ, *self.also_reads), dataclasses.fields(RunConfig)
        own = [field.name for field in dataclasses.fields(self) if field.name not in {one.name for one in shared}]
        for field in shared:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if field.name not in read and getattr(self, field.name) != default:
                raise ValueError(
                    f"{field.name} = {getattr(self, field.name)!r}, which the training of {self.what} does not read; "
                    f"leave it out. It reads {', '.join((*read, *own))}."
                )


@dataclass(frozen=True)
class Parts:
    """Parts that a run trains.

    Attributes:
        values: the parts before training.
        axes: logical axes of each, for the optimizer.
        step: ``rule -> Step`` for an optimizer's rule.
        write: writes the trained parts into the run's directory; returns a line that says how they are used.
    """

    values: Any
    axes: Any
    step: Callable[[optax.GradientTransformation], Step]
    write: Callable[[Any, Path], str]


def train_parts(config: FrozenModelConfig, parts_of: Callable[[LoadedModel], Parts]) -> TrainResult:
    """Trains parts beside a frozen model, with a line of the log every ``log_every`` steps.

    Args:
        config: the run.
        parts_of: the parts, of the loaded model.

    Raises:
        DataError, ValueError: settings, data or model cannot be used; the message says why.
    """
    loaded = load_model(config.init_from)
    dataset = load_dataset(config.data, loaded.tokenizer, loaded.template).train
    dataset.check_steps(config.steps)
    parts = parts_of(loaded)
    weights = jax.tree.map(lambda x: x.addressable_data(0), loaded.params)  # of one device, without a mesh
    rule = optimizer(config.optim, config.steps, parts.axes)
    values, state, update = parts.values, rule.init(parts.values), jax.jit(parts.step(rule))
    for step in range(config.steps):
        values, state, metrics = update(values, state, weights, jax.tree.map(jnp.asarray, dataset.batch_at(step)))
        if step == 0 or (step + 1) % config.log_every == 0 or step + 1 == config.steps:
            said = ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
            print(f"step {step + 1:5} of {config.steps}: {said}", flush=True)
    directory = Path(config.out) / config.name
    print(parts.write(values, directory))
    return TrainResult(directory, config.steps, True, None, None)
