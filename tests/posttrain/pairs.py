"""Preference pairs of a tiny model: packed batches, the same pairs one by one, and losses written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import Batch
from jaxllm.models import Segments, functional
from jaxllm.train import ObjectiveConfig, value_and_grad
from jaxllm.train.step.loss import token_logprobs
from jaxllm.train.step.objective import make_objective
from jaxllm.train.step.train_state import initial_params
from tests import tiny

VOCAB = 24
MODEL = tiny.decoder(vocab_size=VOCAB, embed_dim=8, heads=2, kv_heads=2, head_dim=4, mlp=8, layers=1, remat="full")
SMOOTH = 0.1


def drawn_pairs(rng: np.random.Generator, count: int, longest: int = 5) -> list[Any]:
    """(prompt, first completion, second completion) of random lengths."""
    return [
        tuple(rng.integers(0, VOCAB, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(3))
        for _ in range(count)
    ]


def packed(pairs: list[Any], rows: int, seq_len: int, signs: list[int] | None = None) -> Batch:
    """Rows with the pairs dealt out in turn, the completions of each in neighbouring segments."""
    arrays = [np.full((rows, seq_len), fill, np.int32) for fill in (0, -1, 0, 0)]
    advantages = np.zeros((rows, seq_len), np.float64)
    used, segments = [0] * rows, [0] * rows
    for number, (prompt, *completions) in enumerate(pairs):
        row = number % rows
        for side, completion in enumerate(completions):
            ids, begin = np.concatenate([prompt, completion]), used[row]
            length = len(ids) - 1
            here = slice(begin, begin + length)
            segments[row] += 1
            arrays[0][row, here], arrays[2][row, here] = ids[:-1], segments[row]
            arrays[3][row, here] = np.arange(length)
            trained = np.arange(1, length + 1) >= len(prompt)
            arrays[1][row, here] = np.where(trained, ids[1:], -1)
            if signs is not None and side == 0:
                advantages[row, here] = np.where(trained, signs[number], 0)
            used[row] += length
        assert used[row] <= seq_len
    return Batch(*arrays, advantages=None if signs is None else advantages)


def completion_logprobs(params: Any, pairs: list[Any]) -> list[Any]:
    """Log-probabilities of each completion's tokens and all logits of its sequence, which has a row of its own."""
    model = functional(MODEL)
    sequences = [(prompt, completion) for prompt, *both in pairs for completion in both]
    ids = np.zeros((len(sequences), max(len(p) + len(c) for p, c in sequences)), np.int32)
    for row, both in zip(ids, sequences, strict=True):
        row[: sum(map(len, both))] = np.concatenate(both)
    inputs = jnp.asarray(ids[:, :-1])
    hidden, _ = model.forward(params, inputs, jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape), Segments())
    logits = model.head(params, hidden)
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(ids[:, 1:, None]), axis=2)[..., 0]
    ends = [(len(p) - 1, len(p) + len(c) - 1) for p, c in sequences]
    return [(row[begin:end], own[:end]) for row, own, (begin, end) in zip(found, logits, ends, strict=True)]


def reference_loss(name: str, options: dict[str, Any], params: Any, frozen: Any, pairs: list[Any], signs: Any) -> Any:
    """Mean loss over pairs, by the formula of the method's paper, from each completion alone."""
    total, ratios, others = 0.0, [], []
    now, before = completion_logprobs(params, pairs), completion_logprobs(frozen, pairs)
    for number, (_, first, second) in enumerate(pairs):
        (one, logits_one), (two, logits_two) = now[2 * number : 2 * number + 2]
        (was_one, _), (was_two, _) = before[2 * number : 2 * number + 2]
        ratio_one, ratio_two = one.sum() - was_one.sum(), two.sum() - was_two.sum()
        beta: Any = options.get("beta")
        if name == "dpo":
            x, e = beta * (ratio_one - ratio_two), options["label_smoothing"]
            total += -(1 - e) * jnp.log(1 / (1 + jnp.exp(-x))) - e * jnp.log(1 / (1 + jnp.exp(x)))
        elif name == "ipo":
            total += (ratio_one / len(first) - ratio_two / len(second) - 1 / (2 * beta)) ** 2
        elif name == "orpo":
            p, q = jnp.exp(one.mean()), jnp.exp(two.mean())
            odds = (p / (1 - p)) / (q / (1 - q))
            total += -one.mean() + beta * jnp.log(1 + 1 / odds)
        elif name == "simpo":
            total += jnp.log(1 + jnp.exp(-(beta * (one.mean() - two.mean()) - options["gamma"])))
        elif name == "reward_model":
            a, b = logits_one[-1, options["reward_token"]], logits_two[-1, options["reward_token"]]
            total += jnp.log(1 + jnp.exp(b - a)) + options["center"] * (a + b) ** 2
        elif name == "kto":
            ratios.append(ratio_one)
            others.append(ratio_two)
    if name != "kto":
        return total / len(pairs)
    point = jax.lax.stop_gradient(jnp.maximum(sum(others) / len(others), 0.0))
    for ratio, sign in zip(ratios, signs, strict=True):
        weight = options["desirable"] if sign > 0 else options["undesirable"]
        total += weight * (1 - 1 / (1 + jnp.exp(-sign * beta * (ratio - point))))
    return total / len(pairs)


OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.7, "label_smoothing": SMOOTH},
    "ipo": {"beta": 0.3},
    "kto": {"beta": 0.6, "desirable": 1.0, "undesirable": 1.3},
    "orpo": {"beta": 0.4},
    "simpo": {"beta": 2.0, "gamma": 0.7},
    "reward_model": {"reward_token": 3, "center": 0.05},
}
"""Objective -> options that every formula feels."""


def reference_logprobs(frozen: Any, batch: Batch) -> Any:
    """Log-probabilities of a batch's targets under frozen parameters, 0 where there is none."""
    plain = jax.tree.map(jnp.asarray, Batch(*batch[:4]))
    return jax.jit(lambda params, batch: token_logprobs(functional(MODEL), params, batch)[0])(frozen, plain)


def spoilt(params: Any, seed: int) -> Any:
    """Parameters near others."""
    return _spoilt(params, jax.random.key(seed))


@jax.jit
def _spoilt(params: Any, key: Any) -> Any:
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([x + 0.3 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)])


def loss_and_grads(
    name: str, options: dict[str, Any], params: Any, frozen: Any, batch: Batch, accumulate: int = 1
) -> tuple[Any, Any, Any]:
    """Mean loss, gradients and metrics of a packed batch by the objective itself."""
    objective = make_objective(ObjectiveConfig(name, tuple(f"{key}={value}" for key, value in options.items())))
    if "reference_logprobs" in objective.required:
        batch = batch._replace(reference_logprobs=reference_logprobs(frozen, batch))
    run = value_and_grad(functional(MODEL), objective=objective, accumulate=accumulate)
    sums, grads = jax.jit(run)(params, jax.tree.map(jnp.asarray, batch))
    return sums.loss / sums.total, grads, sums.means()


def objective_error(name: str, rng: np.random.Generator, packings: tuple[int, ...] = (3, 6)) -> float:
    """Largest error of loss and gradients of random pairs against the formulas, packed in so many rows."""
    pairs, options = drawn_pairs(rng, 6), OPTIONS[name]
    signs = [int(x) for x in rng.choice([-1, 1], len(pairs))]
    params = jax.jit(lambda: initial_params(functional(MODEL), 0, None))()
    params, frozen = spoilt(params, int(rng.integers(1000))), spoilt(params, int(rng.integers(1000, 2000)))
    want, grads = jax.jit(jax.value_and_grad(lambda p: reference_loss(name, options, p, frozen, pairs, signs)))(params)
    worst = 0.0
    for rows in packings:
        batch = packed(pairs, rows, 2 * 18 * 6 // rows, signs if name == "kto" else None)
        loss, got, _ = loss_and_grads(name, options, params, frozen, batch)
        worst = max(worst, abs(float(loss / want) - 1), tiny.leaf_error(got, grads))
    return worst
