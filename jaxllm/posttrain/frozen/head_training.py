"""Training of a draft head of a frozen model (EAGLE, arXiv:2401.15077, section 3.2).

A pass over the text trains the head at every place at once: it reads the model's own feature of the token before, and
learns the model's distribution there (Kullback-Leibler divergence) and the model's feature (smooth L1, both divided by
their root mean square, since the output head normalises them). As the paper does in drafts, noise is added to the
features that the head reads, so that it learns to go on from its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxllm.convert.load import LoadedModel
from jaxllm.data import Batch
from jaxllm.infer.speculate.draft_head import (
    FUSIONS,
    HEAD_FILE,
    DraftHead,
    head_forward,
    head_model,
    new_head,
    normalised,
    save_head,
)
from jaxllm.models import Functional, Segments
from jaxllm.posttrain.frozen.frozen_model import FrozenModelConfig, Parts, Step, train_parts
from jaxllm.train import TrainResult


@dataclass(frozen=True)
class DraftHeadRunConfig(FrozenModelConfig):
    """Configuration of a run that trains a draft head of a frozen model (EAGLE, arXiv:2401.15077).

    The model is ``init_from``.

    Attributes:
        fusion: row of ``jaxllm.infer.speculate.draft_head.FUSIONS``: concat (EAGLE) or gated (DGF, arXiv:2412.18934).
        feature: weight of the features' loss beside that of the distributions.
        noise: width of the uniform noise on the features that the head reads, which have a root mean square of 1.
    """

    fusion: str = "concat"
    feature: float = 0.1
    noise: float = 0.1

    what: ClassVar[str] = "a draft head"
    loop: ClassVar[str] = "jaxllm.posttrain.frozen.head_training:train_head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion not in FUSIONS:
            raise ValueError(f"fusion = {self.fusion!r}; legal: {', '.join(FUSIONS)}.")
        if min(self.feature, self.noise) < 0:
            raise ValueError(f"feature = {self.feature}, noise = {self.noise}; give 0 or more.")


def train_head(config: DraftHeadRunConfig) -> TrainResult:
    """Trains a draft head, and writes it to ``head.safetensors`` in the run's directory.

    Raises:
        DataError, ValueError: settings, data or model cannot be used; the message says why.
    """

    def parts(loaded: LoadedModel) -> Parts:
        head = new_head(loaded.model, loaded.params, config.fusion)
        smaller, _ = head_model(loaded.model, loaded.params)
        fusion_axes = jax.tree.map(lambda x: (None,) * x.ndim, head.weights["fusion"])
        axes = {"fusion": fusion_axes, "segments": smaller.logical_axes()["segments"]}

        def step(rule: optax.GradientTransformation) -> Step:
            return head_step(loaded.model, head, rule, config.feature, config.noise, config.seed)

        def write(values: Any, directory: Path) -> str:
            save_head(dataclasses.replace(head, weights=values), directory)
            return f"{directory / HEAD_FILE}: serve with --speculate head:{directory}"

        return Parts(head.weights, axes, step, write)

    return train_parts(config, parts)


def head_step(
    model: Functional, head: DraftHead, rule: optax.GradientTransformation, feature: float, noise: float, seed: int
) -> Step:
    """Training step of a draft head of a frozen model.

    Its metrics are the loss, and ``right``, the share of places where the head's likeliest token is the model's: the
    acceptance of the first token of a greedy draft.

    Args:
        model: the frozen model.
        head: the head, for its fusion.
        rule: updates its weights.
        feature, noise: see ``DraftHeadRunConfig``.
        seed: of the noise.
    """

    def loss_of(values: Any, smaller: Functional, weights: Any, batch: Any, drawn: Array) -> tuple[Array, Array]:
        segments = jnp.asarray(batch.segment_ids)
        whole, _ = model.forward(weights, batch.tokens, batch.positions, Segments(segments))
        before = normalised(jnp.pad(whole[:, :-1], ((0, 0), (1, 0), (0, 0)))) + noise * drawn.astype(whole.dtype)
        first = jnp.pad(segments[:, :-1], ((0, 0), (1, 0))) != segments
        before = jnp.where(first[..., None], 0, before)
        own = dataclasses.replace(head, weights=values)
        made, _ = head_forward(smaller, weights, own, before, batch.tokens, batch.positions, Segments(segments))
        found, wanted = (jax.nn.log_softmax(model.head(weights, x).astype(jnp.float32)) for x in (made, whole))
        divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
        off = normalised(made).astype(jnp.float32) - normalised(whole).astype(jnp.float32)
        apart = jnp.mean(optax.huber_loss(off), axis=-1)
        real = segments > 0
        right = jnp.sum(real & (jnp.argmax(found, -1) == jnp.argmax(wanted, -1))) / jnp.maximum(1, jnp.sum(real))
        return jnp.sum(jnp.where(real, divergence + feature * apart, 0.0)) / jnp.maximum(1, jnp.sum(real)), right

    def step(values: Any, state: Any, weights: Any, batch: Batch) -> tuple[Any, Any, dict[str, Array]]:
        # The rows themselves draw the noise, so that a step needs no number.
        key = jax.random.fold_in(jax.random.key(seed), jnp.sum(batch.tokens, dtype=jnp.uint32))
        drawn = jax.random.uniform(key, (*batch.tokens.shape, model.config.embed_dim), jnp.float32, -0.5, 0.5)
        smaller, _ = head_model(model, weights)
        (loss, right), grads = jax.value_and_grad(loss_of, has_aux=True)(values, smaller, weights, batch, drawn)
        updates, state = rule.update(grads, state, values)
        return optax.apply_updates(values, updates), state, {"loss": loss, "right": right}

    return step
