"""Policy losses written by hand in numpy, of random rollouts with given log-probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import Batch
from jaxllm.models import Functional, Segments, functional
from jaxllm.models.value_head import with_value_head
from jaxllm.posttrain.algorithms import ALGORITHMS, token_weights
from jaxllm.train import ObjectiveConfig, value_and_grad
from jaxllm.train.step.objective import make_objective
from jaxllm.train.step.train_state import initial_params
from tests.posttrain.pairs import MODEL, completion_logprobs, drawn_pairs, packed, spoilt

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
        "old_values": [rng.normal(0, 0.7, len(x)) for x in completions],
        "returns": [rng.normal(0, 1, len(x)) for x in completions],
        "lengths": np.array([len(x) for x in completions], np.float64),
    }


def model_of(algorithm: str) -> Functional:
    """The tiny model, with a value head where the algorithm has one."""
    model = functional(MODEL)
    return with_value_head(model) if ALGORITHMS[algorithm].has_values else model


def drawn_params(seed: int, algorithm: str) -> Any:
    """Parameters of the tiny model."""
    return spoilt(jax.jit(lambda: initial_params(model_of(algorithm), 0, None))(), seed)


def completion_values(params: Any, pairs: list[Any]) -> list[Any]:
    """Value of the state before each token of a completion, whose sequence has a row of its own."""
    found = []
    for prompt, *both in pairs:
        for completion in both:
            ids = jnp.asarray(np.concatenate([prompt, completion])[None, :-1])
            hidden, _ = functional(MODEL).forward(params, ids, jnp.arange(ids.shape[1])[None], Segments())
            scale = jnp.sqrt((hidden**2).mean(axis=-1, keepdims=True) + MODEL.norm_eps)
            normed = hidden / scale * params["head"]["norm"]["gain"]
            found.append((normed @ params["head"]["value"])[0, len(prompt) - 1 :])
    return found


def rollout_rows(pairs: list[Any], values: dict[str, Any], algorithm: str, rows: int, *, kl: bool) -> Batch:
    """Packed rows with the values of each completion on its targets."""
    row_of = ALGORITHMS[algorithm]
    batch = packed(pairs, rows, 2 * 9 * len(pairs) // rows)
    weights = token_weights(values["lengths"], row_of.mean_over, LARGEST)
    names = ("weights", "advantages", "old", "reference", "old_values", "returns")
    found = {name: np.zeros(batch.tokens.shape) for name in names}
    for number in range(len(values["lengths"])):
        pair, side = divmod(number, 2)
        row, segment = pair % rows, 2 * (pair // rows) + side + 1
        said = (batch.segment_ids[row] == segment) & (batch.targets[row] >= 0)
        found["weights"][row, said], found["advantages"][row, said] = weights[number], values["advantages"][number]
        for name in names[2:]:
            found[name][row, said] = values[name][number]
    return batch._replace(
        weights=found["weights"], advantages=found["advantages"], old_logprobs=found["old"],
        reference_logprobs=found["reference"] if kl else None,
        old_values=found["old_values"] if row_of.has_values else None,
        returns=found["returns"] if row_of.has_values else None,
    )  # fmt: skip


def options_of(algorithm: str, *, kl: bool) -> dict[str, Any]:
    """Options of an algorithm's objective."""
    objective: Any = objective_of(algorithm, kl=kl)
    return {name: getattr(objective, name) for name in objective.__dataclass_fields__}


def objective_of(algorithm: str, *, kl: bool) -> Any:
    """Objective of an algorithm."""
    row = ALGORITHMS[algorithm]
    return make_objective(ObjectiveConfig(row.objective, row.options + KL * kl))


def reference_policy_loss(algorithm: str, params: Any, pairs: list[Any], values: dict[str, Any], *, kl: bool) -> Any:
    """Loss by the formulas of the algorithm's paper, completion by completion."""
    row, options = ALGORITHMS[algorithm], options_of(algorithm, kl=kl)
    sums, means = [], []
    critic = completion_values(params, pairs) if row.has_values else []
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
        if row.has_values:
            loss += options["value_coefficient"] * value_losses(critic[number], values, number, options["value_clip"])
        sums.append(loss.sum())
        means.append(loss.mean())
    if row.mean_over == "sequences":
        return sum(means) / len(means)
    if row.mean_over == "tokens":
        return sum(sums) / values["lengths"].sum()
    return sum(sums) / (len(sums) * LARGEST)


def value_losses(now: Any, values: dict[str, Any], number: int, clip: float) -> Any:
    """Value loss of each token of a completion (the published code of arXiv:1707.06347)."""
    old, returns = (jnp.asarray(values[name][number]) for name in ("old_values", "returns"))
    moved = now - old
    near = old + jnp.where(moved > clip, clip, jnp.where(moved < -clip, -clip, moved))
    return 0.5 * jnp.where((near - returns) ** 2 > (now - returns) ** 2, (near - returns) ** 2, (now - returns) ** 2)


def policy_loss_and_grads(algorithm: str, params: Any, batch: Batch, accumulate: int = 1) -> tuple[Any, Any, Any]:
    """Loss, gradients and metrics by the objective itself."""
    objective = objective_of(algorithm, kl=batch.reference_logprobs is not None)
    run = jax.jit(value_and_grad(model_of(algorithm), objective=objective, accumulate=accumulate))
    sums, grads = run(params, jax.tree.map(jnp.asarray, batch))
    return sums.loss / sums.total, grads, sums.means()
