"""Training of retaining heads: a frozen model reads text, and small heads learn which entries later queries want."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxllm.convert.load import LoadedModel
from jaxllm.infer.runner.retention.head_files import save_heads
from jaxllm.models import Functional, Segments
from jaxllm.models.retaining_heads import HeadTraining, RetainingHeads, new_heads
from jaxllm.posttrain.frozen.frozen_model import FrozenModelConfig, Parts, Step, train_parts
from jaxllm.train import TrainResult

HEADS_FILE = "heads.safetensors"
"""Name of the file of retaining heads in the directory of a run."""


@dataclass(frozen=True)
class HeadsRunConfig(FrozenModelConfig):
    """Configuration of a run that trains the retaining heads of a frozen model (Locret, arXiv:2410.01805).

    The model is ``init_from``; ``optim``, ``steps`` and ``data`` are those of the heads.

    Attributes:
        hidden: hidden units of a head.
        smoothing: weight of the squared difference of neighbouring tokens' scores in the loss.
        distance: queries nearer to a token do not count: as many tokens as always stay in the cache.
    """

    hidden: int = 256
    smoothing: float = 0.0025
    distance: int = 64

    what: ClassVar[str] = "retaining heads"
    loop: ClassVar[str] = "jaxllm.posttrain.frozen.retention_training:train_heads"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden < 1 or self.smoothing < 0 or not 1 <= self.distance < self.data.seq_len:
            raise ValueError(
                f"hidden = {self.hidden}, smoothing = {self.smoothing}, distance = {self.distance}; give 1 or more, 0 "
                f"or more, and 1 to {self.data.seq_len - 1}, less than the tokens of a row."
            )


def train_heads(config: HeadsRunConfig) -> TrainResult:
    """Trains retaining heads, and writes them to ``heads.safetensors`` in the run's directory.

    Raises:
        DataError, ValueError: settings, data or model cannot be used; the message says why.
    """

    def parts(loaded: LoadedModel) -> Parts:
        heads = new_heads(loaded.model.config, config.hidden, config.seed)
        # Each layer's matrices are like those of a layer of a model.
        axes = RetainingHeads(
            ("layers", "embed", "mlp"), ("layers", "mlp"), ("layers", "mlp", "embed"), ("layers", None)
        )

        def step(rule: optax.GradientTransformation) -> Step:
            return head_step(loaded.model, rule, config.smoothing, config.distance)

        return Parts(dict(vars(heads)), dict(vars(axes)), step, write)

    def write(values: Any, directory: Path) -> str:
        save_heads(RetainingHeads(**values), directory / HEADS_FILE)
        return f"{directory / HEADS_FILE}: serve with --kv-keep locret:{directory / HEADS_FILE}"

    return train_parts(config, parts)


def head_step(model: Functional, rule: optax.GradientTransformation, smoothing: float, distance: int) -> Step:
    """Training step of the heads of a frozen model; the loss is the mean over the layers."""

    def loss_of(params: dict[str, Any], weights: Any, batch: Any) -> jax.Array:
        segments = Segments(batch.segment_ids)
        context = HeadTraining(RetainingHeads(**params), jnp.zeros(()), segments, smoothing, distance)
        _, context = model.forward(weights, batch.tokens, batch.positions, context)
        assert isinstance(context, HeadTraining)
        return context.loss / model.config.layers

    def step(params: Any, state: Any, weights: Any, batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_of)(params, weights, batch)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    return step
