"""Preference objectives: their papers' formulas, TRL's losses, meshes and micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import functional
from jaxllm.train import ObjectiveConfig, value_and_grad
from jaxllm.train.objectives.preference_losses import CompletionScores
from jaxllm.train.step.objective import make_objective
from jaxllm.train.step.train_state import initial_params
from sharding import MeshSpec, abstract_params, shardings_of
from tests import tiny
from tests.posttrain.pairs import (
    MODEL,
    OPTIONS,
    drawn_pairs,
    loss_and_grads,
    objective_error,
    packed,
    reference_logprobs,
    spoilt,
)
from tests.proofs.harness import proof


@proof("posttraining", count=60, sample=1, float64=True, bound=1e-10)
def preference_losses(seed: int) -> float:
    """Loss and gradients of random pairs against the formulas in float64, packed in two ways."""
    return objective_error(list(OPTIONS)[seed % len(OPTIONS)], np.random.default_rng(seed))


def two_params() -> tuple[Any, Any]:
    """Parameters of a policy and of its reference."""
    params = jax.jit(lambda: initial_params(functional(MODEL), 0, None))()
    return spoilt(params, 1), spoilt(params, 2)


MICRO_BATCHED = [name for name in OPTIONS if name != "kto"]
"""All but the one whose reference point is estimated from a micro-batch."""


@proof("posttraining", cases=MICRO_BATCHED, sample=1, float64=True, bound=1e-10)
def pairs_in_micro_batches(name: str) -> float:
    """Loss, gradients and metrics of four micro-batches, one of them without a pair, against the batch at once."""
    batch = packed(drawn_pairs(np.random.default_rng([*name.encode()]), 3), 4, 40)
    whole, parts = (loss_and_grads(name, OPTIONS[name], *two_params(), batch, accumulate) for accumulate in (1, 4))
    errors = [abs(float(parts[2][key]) - float(value)) for key, value in whole[2].items()]
    return max(abs(float(parts[0] / whole[0]) - 1), tiny.leaf_error(parts[1], whole[1]), *errors)


SHARDED = [
    (name, mesh) for name in OPTIONS for mesh in ("fsdp=8", "data=2,fsdp=2,tensor=2", "fsdp=2,tensor=2,context=2")
]


@proof("posttraining", cases=SHARDED, sample=1, float64=True, bound=1e-10)
def pairs_on_meshes(case: tuple[str, str]) -> float:
    """Loss and gradients on several devices against one."""
    name, mesh = case
    rng, (params, frozen) = np.random.default_rng([*name.encode()]), two_params()
    signs = [int(x) for x in rng.choice([-1, 1], 10)] if name == "kto" else None
    batch = packed(drawn_pairs(rng, 10), 8, 40, signs)
    want, grads, _ = loss_and_grads(name, OPTIONS[name], params, frozen, batch)
    objective = make_objective(ObjectiveConfig(name, tuple(f"{key}={value}" for key, value in OPTIONS[name].items())))
    if "reference_logprobs" in objective.required:
        batch = batch._replace(reference_logprobs=np.asarray(reference_logprobs(frozen, batch)))
    model, built = functional(MODEL), MeshSpec.parse(mesh).build(jax.devices())
    with jax.set_mesh(built):
        there = shardings_of(abstract_params(model.abstract(), model.logical_axes(), built, model.rules))
        rows = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
        run = jax.jit(value_and_grad(model, objective=objective))
        sums, got = run(jax.tree.map(jax.device_put, params, there), jax.device_put(batch, rows))
    return max(abs(float(sums.loss / sums.total / want) - 1), tiny.leaf_error(jax.device_get(got), grads))


@proof("posttraining", cases=["dpo", "ipo", "orpo", "simpo", "kto"], sample=1, float64=True, bound=1e-6)
def losses_of_trl(name: str) -> float:
    """Loss of each pair's log-probabilities, by this package and by TRL's own function."""
    import os

    import torch

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    rng = np.random.default_rng([*name.encode()])
    lengths = rng.integers(1, 9, (2, 16))
    logprobs, reference = (-rng.uniform(0.1, 4, (2, 16)) * lengths for _ in range(2))
    scores = [
        CompletionScores(jnp.asarray(p), jnp.asarray(p - q), jnp.asarray(n, jnp.float64))
        for p, q, n in zip(logprobs, reference, lengths, strict=True)
    ]
    if name == "kto":
        return kto_error(logprobs, reference, lengths)
    options = {key: value for key, value in OPTIONS[name].items() if key != "label_smoothing"}
    objective: Any = make_objective(ObjectiveConfig(name, tuple(f"{key}={value}" for key, value in options.items())))
    ours = np.asarray(objective.pair_losses(*scores))
    beta = options["beta"]
    means: list[Any] = [torch.tensor(p / n) for p, n in zip(logprobs, lengths, strict=True)]
    if name == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        own: Any = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device="cpu"))
        losses, *_ = ORPOTrainer.odds_ratio_loss(own, *means)
        want = (-means[0] - losses).numpy()
    elif name == "simpo":
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        own = SimpleNamespace(
            beta=beta, simpo_gamma=options["gamma"], loss_type="simpo", label_smoothing=0.0, alpha=0.0,
            accelerator=SimpleNamespace(device="cpu"),
        )  # fmt: skip
        want = CPOTrainer.cpo_loss(own, *means)[0].numpy()
    else:
        want = dpo_trainer_losses(name, beta, logprobs, reference, lengths)
        return float(np.abs(ours.mean() / want - 1))
    return float(np.abs(ours / want - 1).max())


def trainer(**fields: Any) -> Any:
    """Stand-in for a trainer of TRL in evaluation, with the fields that its loss reads."""
    from collections import defaultdict

    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x, num_processes=1)
    accelerator.reduce = lambda x, reduction: x
    shared = {
        "model": SimpleNamespace(training=False), "accelerator": accelerator, "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**(shared | fields))


def forward(logprobs: np.ndarray, lengths: np.ndarray) -> Any:
    """Forward pass of TRL's collated rows: each completion's log-probability on its first token."""
    import torch

    width = int(lengths.max())
    rows = torch.zeros(lengths.size, width, dtype=torch.float64)
    rows[:, 0] = torch.tensor(logprobs.reshape(-1))
    blank = torch.zeros_like(rows)
    found = SimpleNamespace(log_probs=rows, entropy=blank, mean_logits=blank, token_accuracy=blank, is_top1=blank > 0)
    return lambda **given: found


def masks(lengths: np.ndarray) -> Any:
    """Completion mask of rows of one prompt token and a completion."""
    import torch

    places = torch.arange(int(lengths.max()) + 1)[None]
    return ((places > 0) & (places <= torch.tensor(lengths.reshape(-1, 1)))).long()


def dpo_trainer_losses(name: str, beta: float, logprobs: np.ndarray, reference: np.ndarray, lengths: np.ndarray) -> Any:
    """Mean loss of TRL's ``DPOTrainer``."""
    import torch
    from trl.trainer.dpo_trainer import DPOTrainer

    own = trainer(
        beta=beta, loss_types=["sigmoid" if name == "dpo" else name], loss_weights=[1.0], ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False, label_smoothing=0.0,
    )  # fmt: skip
    mask = masks(lengths)
    inputs = {
        "input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "ref_chosen_logps": torch.tensor(reference[0]), "ref_rejected_logps": torch.tensor(reference[1]),
    }  # fmt: skip
    return float(DPOTrainer._compute_loss(own, forward(logprobs, lengths), inputs, False))


def kto_error(logprobs: np.ndarray, reference: np.ndarray, lengths: np.ndarray) -> float:
    """Difference of KTO's mean loss from that of TRL's ``KTOTrainer``; the second side is of other prompts."""
    import torch
    from trl.trainer.kto_trainer import KTOTrainer

    options, count = OPTIONS["kto"], lengths.shape[1]
    signs = np.where(np.arange(count) % 3, 1, -1)
    own = trainer(
        beta=options["beta"], desirable_weight=options["desirable"], undesirable_weight=options["undesirable"],
        loss_type="kto", precompute_ref_logps=True, calculate_KL=True,
        _compute_kl_logps=lambda model, batch: torch.tensor(logprobs[1]),
    )  # fmt: skip
    mask = masks(lengths[:1])
    inputs = {
        "input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "label": torch.tensor(signs > 0), "ref_logps": torch.tensor(reference[0]),
        "ref_KL_logps": torch.tensor(reference[1]),
    }  # fmt: skip
    want = float(KTOTrainer._compute_loss(own, forward(logprobs[0], lengths[:1]), inputs, False))
    # One token a completion: a batch of tokens is then one of completions.
    ours = kto_loss(options, logprobs - reference, signs)
    return abs(ours / want - 1)


def kto_loss(options: dict[str, Any], ratios: np.ndarray, signs: np.ndarray) -> float:
    """Mean loss of the objective itself, on a model of two tokens whose logits give the ratios."""
    from jaxllm.data import Batch

    count, shape = ratios.shape[1], (ratios.shape[1], 2)
    hidden = jnp.stack([jnp.asarray(ratios.T), jnp.zeros(shape)], axis=-1)
    head = jnp.eye(2)
    logprobs = jax.nn.log_softmax(hidden @ head.T)[..., 0]
    segments = jnp.broadcast_to(jnp.array([1, 2], jnp.int32), shape)
    zeros = jnp.zeros(shape, jnp.int32)
    advantages = jnp.stack([jnp.asarray(signs, jnp.float64), jnp.zeros(count)], axis=1)
    batch = Batch(zeros, zeros, segments, zeros, None, advantages, None, logprobs - jnp.asarray(ratios.T))  # type: ignore[arg-type]
    objective: Any = make_objective(ObjectiveConfig("kto", tuple(f"{key}={value}" for key, value in options.items())))
    return float(objective.sums(functional(MODEL), hidden, head, batch).loss) / count
