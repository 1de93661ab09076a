"""Training of retaining heads: a frozen model reads text, and small heads learn which entries later queries want."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxllm.convert.load import load_model
from jaxllm.data import load_dataset
from jaxllm.infer.runner.retention.head_files import save_heads
from jaxllm.models import Functional, Segments
from jaxllm.models.retaining_heads import HeadTraining, RetainingHeads, new_heads
from jaxllm.optim.build import optimizer
from jaxllm.train import RunConfig, TrainResult

HEADS_FILE = "heads.safetensors"
"""Name of the file of retaining heads in the directory of a run."""
USED = ("name", "model", "init_from", "data", "optim", "steps", "seed", "log_every", "out")
OWN = ("hidden", "smoothing", "distance")
"""Settings that a run of retaining heads reads; the others have to be as they are by default."""


@dataclass(frozen=True)
class HeadsRunConfig(RunConfig):
    """Configuration of a run that trains the retaining heads of a frozen model (Locret, arXiv:2410.01805).

    The model is ``init_from``; ``optim``, ``steps`` and ``data`` are those of the heads. A run takes minutes, so it has
    no checkpoints: one that was stopped begins anew.

    Attributes:
        hidden: hidden units of a head.
        smoothing: weight of the squared difference of neighbouring tokens' scores in the loss.
        distance: queries nearer to a token do not count: as many tokens as always stay in the cache.
    """

    hidden: int = 256
    smoothing: float = 0.0025
    distance: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.init_from:
            raise ValueError("retaining heads are those of a model: give init_from.")
        if self.hidden < 1 or self.smoothing < 0 or not 1 <= self.distance < self.data.seq_len:
            raise ValueError(
                f"hidden = {self.hidden}, smoothing = {self.smoothing}, distance = {self.distance}; give 1 or more, 0 "
                f"or more, and 1 to {self.data.seq_len - 1}, less than the tokens of a row."
            )
        for field in dataclasses.fields(RunConfig):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if field.name not in USED and getattr(self, field.name) != default:
                raise ValueError(
                    f"{field.name} = {getattr(self, field.name)!r}, which the training of retaining heads does not "
                    f"read; leave it out. It reads {', '.join((*USED, *OWN))}."
                )


def train_heads(config: HeadsRunConfig) -> TrainResult:
    """Trains retaining heads, and writes them to ``heads.safetensors`` in the run's directory.

    Raises:
        DataError, ValueError: settings, data or model cannot be used; the message says why.
    """
    loaded = load_model(config.init_from)
    dataset = load_dataset(config.data, loaded.tokenizer, loaded.template).train
    dataset.check_steps(config.steps)
    weights = jax.tree.map(lambda x: x.addressable_data(0), loaded.params)  # of one device, without a mesh
    heads = new_heads(loaded.model.config, config.hidden, config.seed)
    # Each layer's matrices are like those of a layer of a model.
    axes = RetainingHeads(("layers", "embed", "mlp"), ("layers", "mlp"), ("layers", "mlp", "embed"), ("layers", None))
    rule = optimizer(config.optim, config.steps, dataclasses.asdict(axes))
    step_of = head_step(loaded.model, rule, config.smoothing, config.distance)
    state, update = rule.init(vars(heads)), jax.jit(step_of)
    params, losses = dict(vars(heads)), []
    for step in range(config.steps):
        batch = dataset.batch_at(step)
        params, state, loss = update(params, state, weights, jax.tree.map(jnp.asarray, batch))
        losses.append(float(loss))
        if step == 0 or (step + 1) % config.log_every == 0 or step + 1 == config.steps:
            print(f"step {step + 1:5} of {config.steps}: loss {losses[-1]:.4f}", flush=True)
    directory = Path(config.out) / config.name
    save_heads(RetainingHeads(**params), directory / HEADS_FILE)
    print(f"{directory / HEADS_FILE}: serve with --kv-keep locret:{directory / HEADS_FILE}")
    return TrainResult(directory, config.steps, True, None, None)


def head_step(model: Functional, rule: optax.GradientTransformation, smoothing: float, distance: int) -> Any:
    """Training step: (heads, optimizer state, weights of the model, batch) -> (heads, state, mean loss of a layer)."""

    def loss_of(params: dict[str, Any], weights: Any, batch: Any) -> jax.Array:
        segments = Segments(batch.segment_ids)
        context = HeadTraining(RetainingHeads(**params), jnp.zeros(()), segments, smoothing, distance)
        _, context = model.forward(weights, batch.tokens, batch.positions, context)
        assert isinstance(context, HeadTraining)
        return context.loss / model.config.layers

    def step(params: dict[str, Any], state: Any, weights: Any, batch: Any) -> tuple[dict[str, Any], Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, weights, batch)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss  # pyright: ignore[reportReturnType]

    return step
