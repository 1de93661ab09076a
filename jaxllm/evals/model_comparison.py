"""Comparison of a model with the one that it was made of: loss of a text, divergence, and agreement token by token.

Legend: B rows, S tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.convert.load import LoadedModel
from jaxllm.models.attention_context import Segments
from jaxllm.models.params import at_least_f32


@dataclass(frozen=True)
class ModelComparison:
    """A model beside its original, means over the tokens of a text that follow another.

    Attributes:
        tokens: number of them.
        original_nll, nll: negative log-likelihood of both, in nats.
        kl: Kullback-Leibler divergence of the model's distribution from the original's, in nats.
        agreement: share of places where both have the same likeliest token.
    """

    tokens: int
    original_nll: float
    nll: float
    kl: float
    agreement: float


def compare_models(
    original: LoadedModel,
    model: LoadedModel,
    rows: Int[np.ndarray, "B S"],
    progress: Callable[[int], None] | None = None,
) -> ModelComparison:
    """Compares two models with the training forward pass, a row at a time; both are in memory.

    Args:
        original: model that the other was made of.
        model: a quantised, distilled or fine-tuned one.
        rows: tokens, of both models' vocabulary.
        progress: called with the number of finished rows.

    Raises:
        ValueError: the vocabularies are not the same, or a row has fewer than two tokens.
    """
    sizes = [one.model.config.vocab_size for one in (original, model)]
    if sizes[0] != sizes[1] or original.tokenizer.token_bytes != model.tokenizer.token_bytes:
        raise ValueError(
            f"the models have different tokenizers, of {sizes[0]} and {sizes[1]} tokens; distributions are compared "
            "over the same tokens alone."
        )
    if rows.shape[1] < 2:
        raise ValueError(f"rows of {rows.shape[1]} tokens have none that follows another; give 2 or more.")
    scores = [_scores(one) for one in (original, model)]

    @jax.jit
    def compared(one: Array, other: Array, row: Array) -> Array:
        taken = [-jnp.mean(jnp.take_along_axis(x, row[1:, None], axis=1)) for x in (one, other)]
        kl = jnp.mean(jnp.sum(jnp.exp(one) * (one - other), axis=1))
        same = jnp.mean(jnp.argmax(one, axis=1) == jnp.argmax(other, axis=1))
        return jnp.stack([*taken, kl, same.astype(kl.dtype)])

    found = []
    for number, row in enumerate(rows):
        both = [np.asarray(score(row)) for score in scores]
        found.append(np.asarray(compared(*both, row), np.float64))
        if progress is not None:
            progress(number + 1)
    means = np.mean(found, axis=0)
    return ModelComparison(rows.shape[0] * (rows.shape[1] - 1), *(float(x) for x in means))


def _scores(loaded: LoadedModel) -> Callable[[np.ndarray], Array]:
    """Function from a row [S] to the log-probabilities [S - 1, V] of what follows each of its tokens but the last."""

    @jax.jit
    def run(params: Any, row: Array) -> Array:
        hidden, _ = loaded.model.forward(params, row[None], jnp.arange(row.size)[None], Segments())
        logits = loaded.model.head(params, hidden[:, :-1])[0]
        return jax.nn.log_softmax(logits.astype(at_least_f32(logits.dtype)))

    def scores(row: np.ndarray) -> Array:
        with jax.set_mesh(loaded.mesh):
            return run(loaded.params, jnp.asarray(row))

    return scores
