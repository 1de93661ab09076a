"""Distillation of a few of a model's layers into a model of their own, which drafts for it (speculative decoding).

The student keeps the first and the last layers of the model, its embedding and its output head, and learns the model's
distribution at every place of text (Hinton et al., arXiv:1503.02531, at temperature 1; DistilBERT, arXiv:1910.01108,
section 3, begins with layers of the teacher too). Embedding and head stay as they are: the student's bytes are mostly
theirs, and its drafts are of the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxllm.convert.load import LoadedModel
from jaxllm.data import Batch
from jaxllm.hub.families.config_json import TOKENS, config_json
from jaxllm.hub.huggingface import HubModel, export_hf
from jaxllm.infer.speculate.self_draft import first_and_last, with_layers
from jaxllm.models import Functional, Segments
from jaxllm.posttrain.frozen.frozen_model import FrozenModelConfig, Parts, Step, train_parts
from jaxllm.train import TrainResult

MODEL_DIRECTORY = "model"
"""Directory of the student in the run's: config.json, safetensors and the tokenizer's files."""


@dataclass(frozen=True)
class DistillationRunConfig(FrozenModelConfig):
    """Configuration of a run that distils a draft model from the model of ``init_from``.

    Attributes:
        layers: layers of the model that the draft keeps, the first and the last ones.
    """

    layers: int = 4

    what: ClassVar[str] = "distilled drafts"
    loop: ClassVar[str] = "jaxllm.posttrain.frozen.distillation:train_distilled"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.layers < self.model.layers:
            raise ValueError(
                f"layers = {self.layers}, but the model has {self.model.layers}; give 1 to {self.model.layers - 1}."
            )


def train_distilled(config: DistillationRunConfig) -> TrainResult:
    """Trains a draft model, and writes it in Hugging Face's format to ``model`` in the run's directory.

    Raises:
        DataError, ValueError: settings, data or model cannot be used, or the directory exists; the message says why.
        HubError: no family of transformers has the draft's architecture; raised before the training.
    """
    layers = first_and_last(config.layers, config.model.layers)
    target = Path(config.out) / config.name / MODEL_DIRECTORY
    if target.exists():
        raise ValueError(f"{target} exists; give another name or out, or remove it.")

    def parts(loaded: LoadedModel) -> Parts:
        student, params = student_of(loaded.model, loaded.params, layers)
        source = _config_json(student, loaded)
        axes, start = trained_of(student.logical_axes()), trained_of(params)
        wide = jax.tree.map(lambda x: x.addressable_data(0).astype(jnp.float32), start)

        def step(rule: optax.GradientTransformation) -> Step:
            return distillation_step(loaded.model, student, rule)

        def write(values: Any, directory: Path) -> str:
            trained = jax.tree.map(lambda x, like: x.astype(like.dtype), values, start)
            export_hf(HubModel(student.config, with_trained(params, trained), source), target)
            loaded.tokenizer.save(target)
            return f"{target}: serve with --speculate draft:{target}"

        return Parts(wide, axes, step, write)

    return train_parts(config, parts)


def student_of(model: Functional, params: Any, layers: list[int]) -> tuple[Functional, Any]:
    """Model of some layers, and its weights before training.

    Raises:
        ValueError: the model's weights are packed or adapted.
    """
    student, own = with_layers(model, params, layers)
    leaves = jax.tree.leaves(own, is_leaf=lambda x: not isinstance(x, dict | tuple))
    if any(not isinstance(x, jax.Array) for x in leaves):
        raise ValueError(
            "distilled drafts are trained of a model whose weights are plain: no packed ones, and no adapter beside "
            "them. `jaxllm convert RUN OUT --merge` merges an adapter."
        )
    return student, own


def trained_of(params: Any) -> Any:
    """Weights of a draft that are trained: its layers and the final norm."""
    return {"segments": params["segments"], "norm": params["head"]["norm"]}


def with_trained(params: Any, values: Any) -> Any:
    """A draft's weights with trained ones in their places."""
    return params | {"segments": values["segments"], "head": params["head"] | {"norm": values["norm"]}}


def distillation_step(model: Functional, student: Functional, rule: optax.GradientTransformation) -> Step:
    """Training step of a draft of a frozen model.

    Its metrics are the loss, which is the mean Kullback-Leibler divergence of the draft's distribution from the model's
    in nats a token; ``right``, the share of places where both have the same likeliest token; and ``overlap``, the mean
    sum of the smaller one of both probabilities: the acceptance of a sampled token (arXiv:2211.17192, section 3.2).

    Args:
        model: the frozen model.
        student: the draft, which has its embedding and head.
        rule: updates the draft's trained weights.
    """

    def loss_of(values: Any, weights: Any, batch: Any) -> tuple[Array, dict[str, Array]]:
        segments = jnp.asarray(batch.segment_ids)
        context = Segments(segments)
        whole, _ = model.forward(weights, batch.tokens, batch.positions, context)
        own = with_trained({"embedding": weights["embedding"], "head": weights["head"]}, values)
        made, _ = student.forward(own, batch.tokens, batch.positions, context)
        logits = student.head(own, made), jax.lax.stop_gradient(model.head(weights, whole))
        found, wanted = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in logits)
        real = segments > 0

        def mean(x: Array) -> Array:
            return jnp.sum(jnp.where(real, x, 0.0)) / jnp.maximum(1, jnp.sum(real))

        loss = mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))
        right = mean(1.0 * (jnp.argmax(found, -1) == jnp.argmax(wanted, -1)))
        overlap = mean(jnp.sum(jnp.exp(jnp.minimum(found, wanted)), axis=-1))
        return loss, {"loss": loss, "right": right, "overlap": overlap}

    def step(values: Any, state: Any, weights: Any, batch: Batch) -> tuple[Any, Any, dict[str, Array]]:
        grads, metrics = jax.grad(loss_of, has_aux=True)(values, weights, batch)
        updates, state = rule.update(grads, state, values)
        return optax.apply_updates(values, updates), state, metrics

    return step


def _config_json(student: Functional, loaded: LoadedModel) -> Mapping[str, Any]:
    """The draft's ``config.json``, with the length and the ids of special tokens of the model that it is of."""
    source = loaded.source or {}
    tokenizer = loaded.tokenizer
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    ids |= {name: source[name] for name in TOKENS if name in source}
    return config_json(student.config, source.get("max_position_embeddings") or loaded.longest, ids)
