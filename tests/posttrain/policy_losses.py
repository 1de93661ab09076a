"""Policy losses written by hand in numpy, of random rollouts with given log-probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import Batch
from jaxllm.models import functional
from jaxllm.posttrain.algorithms import ALGORITHMS, token_weights
from jaxllm.train import ObjectiveConfig, value_and_grad
from jaxllm.train.step.objective import make_objective
from tests.posttrain.pairs import MODEL, completion_logprobs, drawn_pairs, packed

KL = ("kl=0.2",)
LARGEST = 8


def drawn_rollouts(rng: np.random.Generator, count: int = 8) -> tuple[list[Any], dict[str, Any]]:
    """Pairs of completions, and of each completion an advantage, old and reference log-probabilities."""
    pairs = drawn_pairs(rng, count // 2)
    completions = [x for _, *both in pairs for x in both]
    return pairs, {
        "advantages": rng.normal(size=len(completions)),
        "old": [rng.normal(-3.2, 0.3, len(x)) for x in completions],
        "reference": [rng.normal(-3.2, 0.5, len(x)) for x in completions],
        "lengths": np.array([len(x) for x in completions], np.float64),
    }


def rollout_rows(pairs: list[Any], values: dict[str, Any], mean_over: str, rows: int, *, kl: bool) -> Batch:
    """Packed rows with the values of each completion on its targets."""
    batch = packed(pairs, rows, 2 * 9 * len(pairs) // rows)
    weights = token_weights(values["lengths"], mean_over, LARGEST)
    found = {name: np.zeros(batch.tokens.shape) for name in ("weights", "advantages", "old", "reference")}
    for number in range(len(values["lengths"])):
        pair, side = divmod(number, 2)
        row, segment = pair % rows, 2 * (pair // rows) + side + 1
        said = (batch.segment_ids[row] == segment) & (batch.targets[row] >= 0)
        found["weights"][row, said], found["advantages"][row, said] = weights[number], values["advantages"][number]
        found["old"][row, said], found["reference"][row, said] = values["old"][number], values["reference"][number]
    return batch._replace(
        weights=found["weights"], advantages=found["advantages"], old_logprobs=found["old"],
        reference_logprobs=found["reference"] if kl else None,
    )  # fmt: skip


def options_of(algorithm: str, *, kl: bool) -> dict[str, Any]:
    """Options of an algorithm's objective."""
    objective: Any = objective_of(algorithm, kl=kl)
    return {name: getattr(objective, name) for name in objective.__dataclass_fields__}


def objective_of(algorithm: str, *, kl: bool) -> Any:
    """Objective of an algorithm."""
    return make_objective(ObjectiveConfig("policy", ALGORITHMS[algorithm].options + KL * kl))


def reference_policy_loss(algorithm: str, params: Any, pairs: list[Any], values: dict[str, Any], *, kl: bool) -> Any:
    """Loss by the formulas of the algorithm's paper, completion by completion."""
    row, options = ALGORITHMS[algorithm], options_of(algorithm, kl=kl)
    sums, means = [], []
    for number, (logprobs, _) in enumerate(completion_logprobs(params, pairs)):
        old, advantage = jnp.asarray(values["old"][number]), float(values["advantages"][number])
        gap = logprobs - old
        if options["ratio"] == "sequence_mean":
            gap = jnp.full(gap.shape, gap.mean())
        elif options["ratio"] == "sequence_sum":
            gap = jnp.full(gap.shape, gap.sum())
        ratio = jnp.exp(gap)
        low, high = 1 - options["clip_low"], 1 + options["clip_high"]
        cut = jnp.where(ratio < low, low, jnp.where(ratio > high, high, ratio))
        loss = jnp.where(ratio * advantage < cut * advantage, -ratio * advantage, -cut * advantage)
        if kl:
            x = logprobs - jnp.asarray(values["reference"][number])
            loss += options["kl"] * (x**2 / 2 if options["kl_estimator"] == "k2" else jnp.exp(-x) - 1 + x)
        sums.append(loss.sum())
        means.append(loss.mean())
    if row.mean_over == "sequences":
        return sum(means) / len(means)
    if row.mean_over == "tokens":
        return sum(sums) / values["lengths"].sum()
    return sum(sums) / (len(sums) * LARGEST)


def policy_loss_and_grads(algorithm: str, params: Any, batch: Batch, accumulate: int = 1) -> tuple[Any, Any, Any]:
    """Loss, gradients and metrics by the objective itself."""
    objective = objective_of(algorithm, kl=batch.reference_logprobs is not None)
    run = jax.jit(value_and_grad(functional(MODEL), objective=objective, accumulate=accumulate))
    sums, grads = run(params, jax.tree.map(jnp.asarray, batch))
    return sums.loss / sums.total, grads, sums.means()
