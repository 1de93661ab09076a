"""Evaluation on held-out text: cross-entropy, perplexity and bits per byte; or a run's own objective on held-out pairs.

Perplexity per token is ``exp(nll)``. It depends on how much text a token stands for; bits per byte does not depend on
the tokenizer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxllm.models import Functional
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.train.config import RunConfig
from jaxllm.train.init_from import open_initial_model
from jaxllm.train.reference import ReferenceModel
from jaxllm.train.run_model import base_model
from jaxllm.train.run_processes import put_batch
from jaxllm.train.run_rows import pad_rows, rows_on_mesh
from jaxllm.train.step.loss import LossSums, loss_sums
from jaxllm.train.step.objective import Objective, make_objective


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out text.

    Attributes:
        nll: cross-entropy in nats per target token; ``exp(nll)`` is the perplexity.
        bits_per_byte: ``total nll / ln 2 / bytes that the targets stand for``.
        tokens: number of target tokens.
        metrics: the objective's loss and metrics, such as the accuracy on pairs; empty for the cross-entropy of text.
    """

    nll: float
    bits_per_byte: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)


class Evaluator:
    """Evaluates parameters on a held-out dataset; compiles once, at the first call.

    Args:
        model: the architecture.
        mesh: of the parameters.
        dataset: ``jaxllm.data.HeldoutDataset``.
        sums: ``(params, batch) -> LossSums``, for models that need another forward pass than ``loss_sums``
            (pipelines).
        objective: the loss to evaluate besides; None: the cross-entropy alone.
        score: ``(params, batch shapes) -> (params, batch) -> batch``, compiles what adds fields to a batch that the
            objective reads (``ReferenceModel.compile_scorer``); None: nothing.
        micro_batches: number that ``sums`` splits a batch into.
    """

    def __init__(
        self,
        model: Functional,
        mesh: Mesh,
        dataset: Any,
        sums: Callable[[Any, Any], LossSums] | None = None,
        objective: Objective | None = None,
        score: Callable[[Any, Any], Callable[[Any, Any], Any]] | None = None,
        micro_batches: int = 1,
    ):
        self._objective, self._score, self._scorer = objective, score, None
        self._mesh = mesh
        self._dataset = dataset
        self._sums = jax.jit(sums or (lambda params, batch: loss_sums(model, params, batch, objective=objective)))
        rows, length = dataset.batch_at(0).tokens.shape
        self._rows = rows_on_mesh(rows, mesh, model.rules, micro_batches)
        spec = model.rules.spec(("batch", "seq"), mesh, (self._rows, length), what="held-out batch")
        self._sharding = NamedSharding(mesh, spec)

    def __call__(self, params: Any, progress: Callable[[Iterable], Iterable] = iter) -> Evaluation:
        """Evaluation of ``params`` over the whole held-out set.

        Args:
            progress: wraps the iterable of batches, to show progress.
        """
        nll = count = items = 0.0
        found: dict[str, float] = {}
        with jax.set_mesh(self._mesh):
            for batch in progress(self._dataset):
                placed = self._scored(params, self.placed(batch))
                sums: LossSums = self._sums(params, placed)
                nll, count = nll + float(sums.nll), count + float(sums.count)
                if self._objective is not None:
                    items += float(sums.total)
                    for name, value in {"loss": sums.loss, **(sums.metrics or {})}.items():
                        found[name] = found.get(name, 0.0) + float(value)
        metrics = {name: value / items for name, value in found.items()}
        return self.evaluation(nll, count, metrics)

    def placed(self, batch: Any) -> Any:
        """A held-out batch on the devices."""
        return put_batch(pad_rows(batch, self._rows), self._sharding, self._rows)

    def evaluation(self, nll: float, count: float, metrics: dict[str, float] | None = None) -> Evaluation:
        """Evaluation from sums over the whole held-out set.

        Args:
            nll: negative log-likelihood.
            count: target tokens.
            metrics: of the objective.
        """
        return Evaluation(nll / count, nll / math.log(2) / self._dataset.target_bytes, int(count), metrics or {})

    def on(self, dataset: Any) -> Evaluator:
        """Evaluator by the same program on another held-out dataset, whose batches have the same shapes."""
        other = copy.copy(self)
        other._dataset = dataset
        return other

    def _scored(self, params: Any, batch: Any) -> Any:
        if self._score is None:
            return batch
        if self._scorer is None:
            self._scorer = self._score(*(jax.tree.map(_shape, tree) for tree in (params, batch)))
        return self._scorer(params, batch)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def evaluates_objective(config: RunConfig) -> bool:
    """Whether a run's held-out data is for its objective, such as pairs, and not text."""
    return "text" not in make_objective(config.objective, config.z_loss).contents


def objective_evaluator(
    config: RunConfig,
    model: Functional,
    mesh: Mesh,
    dataset: Any,
    reference: ReferenceModel | None = None,
    options: Any = None,
) -> Evaluator:
    """Evaluator of a run's objective on its held-out data.

    Args:
        config: the run.
        model, mesh, dataset: see ``Evaluator``.
        reference: of the run; None: the objective needs none.
        options: of the compiler.
    """

    def score(params: Any, batch: Any) -> Any:
        assert reference is not None
        return reference.compile_scorer(batch, options, params)

    objective = make_objective(config.objective, config.z_loss)
    return Evaluator(model, mesh, dataset, None, objective, None if reference is None else score)


def evaluate_loaded(config: RunConfig, model: Functional, params: Any, mesh: Mesh, dataset: Any) -> Evaluation:
    """Evaluation of a run's objective with loaded parameters, of which adapters are a part.

    Args:
        config: the run.
        model, params, mesh: as ``load_model`` returns them.
        dataset: the held-out data.
    """
    whole, reference = replace(config, adapter=AdapterConfig(), trainable=()), None
    if config.reference:
        start = open_initial_model(config.init_from, config.model) if config.init_from else None
        reference = ReferenceModel(whole, base_model(whole), mesh, start)
    return objective_evaluator(whole, model, mesh, dataset, reference)(params)


def heldout_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Values of an evaluation by the names that the log and the receipt have them under."""
    if evaluation.metrics:
        named = {f"heldout_{name}": value for name, value in evaluation.metrics.items()}
        return {"heldout_nll": evaluation.nll} | named
    return {"heldout_nll": evaluation.nll, "heldout_bits_per_byte": evaluation.bits_per_byte}


def described_evaluation(evaluation: Evaluation) -> str:
    """Values of an evaluation for a log."""
    if evaluation.metrics:
        return ", ".join(f"{name} {value:.4f}" for name, value in evaluation.metrics.items())
    return f"{evaluation.nll:.4f} nats per token, {evaluation.bits_per_byte:.4f} bits per byte"
