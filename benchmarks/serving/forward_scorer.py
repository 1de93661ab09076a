"""Scorer of the tasks of ``jaxllm.evals`` by the training forward: no engine is built for a model that is read once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.convert.load import load_model
from jaxllm.evals.scorer import Scorer
from jaxllm.models.attention_context import Segments
from jaxllm.quant.input_statistics import calibration_rows

ROWS, MULTIPLE = 16, 16
"""Rows of a batch, and what its length is a multiple of."""


class ForwardScorer(Scorer):
    """Scorer of texts that fit a forward pass.

    Args:
        model: a directory or file.
        weights: see ``load_model``; activations are rounded where they are packed.
    """

    def __init__(self, model: Path, weights: str = "plain"):
        self.loaded = load_model(model, weights=weights)

        def scores(params: Any, tokens: Any) -> tuple[Any, Any]:
            places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            hidden, _ = self.loaded.model.forward(params, tokens, places, Segments())
            logits = self.loaded.model.head(params, hidden[:, :-1])
            found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=2)[..., 0]
            return found, found >= jnp.max(jax.nn.log_softmax(logits), axis=-1)

        self._scores = jax.jit(scores)

    def mean_loss(self, ids: Sequence[int], rows: int, length: int) -> float:
        """Mean loss on rows of tokens, a row at a time."""
        return -float(np.mean([self._run(row[None])[0] for row in calibration_rows(ids, rows, length)]))

    def _run(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with jax.set_mesh(self.loaded.mesh):
            found = self._scores(self.loaded.params, jnp.asarray(tokens, jnp.int32))
            return np.asarray(found[0]), np.asarray(found[1])

    def _score(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Log-likelihood of the last tokens of each text, and whether each of them is the most likely."""
        length = -(-max(len(ids) for ids, _ in texts) // MULTIPLE) * MULTIPLE
        out = []
        for start in range(0, len(texts), ROWS):
            batch = texts[start : start + ROWS]
            tokens = np.zeros((ROWS, length), np.int32)
            for row, (ids, _) in enumerate(batch):
                tokens[row, : len(ids)] = ids
            values, greedy = self._run(tokens)
            for row, (ids, scored) in enumerate(batch):
                own = slice(len(ids) - 1 - scored, len(ids) - 1)
                out.append((float(values[row, own].sum()), bool(greedy[row, own].all())))
        return out

    def _start(self) -> list[int]:
        start = self.loaded.tokenizer.start_id
        return [] if start is None else [start]

    def _ids(self, text: str) -> list[int]:
        return list(self.loaded.tokenizer.encode(text)) if text else self._start()
