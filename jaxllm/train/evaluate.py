"""Evaluation on held-out text: cross-entropy, perplexity and bits per byte.

Perplexity per token is ``exp(nll)``. It depends on how much text a token stands for; bits per byte does not depend on
the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxllm.models import Functional
from jaxllm.train.run_processes import put_batch
from jaxllm.train.step.loss import LossSums, loss_sums


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out text.

    Attributes:
        nll: cross-entropy in nats per target token; ``exp(nll)`` is the perplexity.
        bits_per_byte: ``total nll / ln 2 / bytes that the targets stand for``.
        tokens: number of target tokens.
    """

    nll: float
    bits_per_byte: float
    tokens: int


class Evaluator:
    """Evaluates parameters on a held-out dataset; compiles once, at the first call.

    Args:
        model: the architecture.
        mesh: of the parameters.
        dataset: ``jaxllm.data.HeldoutDataset``.
        sums: ``(params, batch) -> LossSums``, for models that need another forward pass than ``loss_sums``
            (pipelines).
    """

    def __init__(self, model: Functional, mesh: Mesh, dataset: Any, sums: Callable[[Any, Any], LossSums] | None = None):
        self._mesh = mesh
        self._dataset = dataset
        self._sums = jax.jit(sums or (lambda params, batch: loss_sums(model, params, batch)))
        first = dataset.batch_at(0).tokens
        spec = model.rules.spec(("batch", "seq"), mesh, first.shape, what="held-out batch")
        self._sharding = NamedSharding(mesh, spec)

    def __call__(self, params: Any, progress: Callable[[Iterable], Iterable] = iter) -> Evaluation:
        """Evaluation of ``params`` over the whole held-out set.

        Args:
            progress: wraps the iterable of batches, to show progress.
        """
        nll = count = 0.0
        with jax.set_mesh(self._mesh):
            for batch in progress(self._dataset):
                sums: LossSums = self._sums(params, put_batch(batch, self._sharding, len(batch.tokens)))
                nll, count = nll + float(sums.nll), count + float(sums.count)
        return Evaluation(nll / count, nll / math.log(2) / self._dataset.target_bytes, int(count))
