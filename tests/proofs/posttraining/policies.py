"""Policies: losses against numpy and TRL, meshes, advantages, resampling, rollouts on-policy, resume, learning."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.posttrain import train_policy
from jaxllm.posttrain.advantages import group_centred, group_normalised, leave_one_out
from jaxllm.posttrain.algorithms import ALGORITHMS, resample_on_correct
from jaxllm.posttrain.policy_training import open_policy_data, with_algorithm
from jaxllm.posttrain.rewards import RewardError
from jaxllm.train import ObjectiveConfig, value_and_grad
from jaxllm.train import loop as training_loop
from jaxllm.train.records.run_directory import RunDirectory
from sharding import MeshSpec, abstract_params, shardings_of
from tests import tiny
from tests.posttrain.checked_feed import CheckedFeed
from tests.posttrain.policy_losses import (
    LARGEST,
    drawn_params,
    drawn_rollouts,
    model_of,
    objective_of,
    options_of,
    policy_loss_and_grads,
    reference_policy_loss,
    rollout_rows,
)
from tests.posttrain.shuffled_rewards import shuffle_rewards
from tests.posttrain.tiny_policy import policy_run
from tests.proofs.harness import proof
from tests.train import runs


@proof(
    "posttraining",
    cases=list(itertools.product(ALGORITHMS, ("", "kl"))),
    sample=1,
    float64=True,
    bound=1e-10,
)
def policy_losses(case: tuple[str, str]) -> float:
    """Loss and gradients of random rollouts against the formulas, completion by completion."""
    algorithm, kl = case[0], bool(case[1])
    rng, params = np.random.default_rng([*algorithm.encode(), kl]), drawn_params(3, algorithm)
    pairs, values = drawn_rollouts(rng)
    want, grads = jax.jit(jax.value_and_grad(lambda p: reference_policy_loss(algorithm, p, pairs, values, kl=kl)))(
        params
    )
    batch = rollout_rows(pairs, values, algorithm, 2, kl=kl)
    loss, got, metrics = policy_loss_and_grads(algorithm, params, batch)
    assert 0 < float(metrics["clipped"]) < 1, "some ratios are clipped, and some are not"
    if ALGORITHMS[algorithm].has_values:
        assert 0 < float(metrics["value_clipped"]) < 1, "some values are clipped, and some are not"
    return max(abs(float(loss / want) - 1), tiny.leaf_error(got, grads))


@proof("posttraining", cases=["grpo", "dr_grpo", "dapo", "gspo"], sample=1, float64=True, bound=1e-6)
def policy_losses_of_trl(algorithm: str) -> float:
    """Loss of random log-probabilities by TRL's ``GRPOTrainer``, with a KL term."""
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer

    from tests.proofs.posttraining.preferences import trainer

    rng = np.random.default_rng([*algorithm.encode()])
    pairs, values = drawn_rollouts(rng)
    params, options = drawn_params(4, algorithm), options_of(algorithm, kl=True)
    batch = rollout_rows(pairs, values, algorithm, 2, kl=True)
    ours, _, _ = policy_loss_and_grads(algorithm, params, batch)
    from tests.posttrain.pairs import completion_logprobs

    now = [np.asarray(x) for x, _ in completion_logprobs(params, pairs)]
    count, width = len(now), int(values["lengths"].max())

    def rows(parts: list[np.ndarray]) -> Any:
        found = torch.zeros(count, width, dtype=torch.float64)
        for row, part in zip(found, parts, strict=True):
            row[: len(part)] = torch.tensor(part)
        return found

    mask = (torch.arange(width)[None] < torch.tensor(values["lengths"])[:, None]).double()
    loss_type = {"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "gspo": "grpo"}[algorithm]
    own = trainer(
        beta=options["kl"], loss_type=loss_type, epsilon_low=options["clip_low"], epsilon_high=options["clip_high"],
        importance_sampling_level="sequence" if algorithm == "gspo" else "token", top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=False, max_completion_length=LARGEST, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, use_adaptive_entropy=False,
        args=type("Args", (), {"delta": None, "use_bias_correction_kl": False})(),
        _get_per_token_logps_and_entropies=lambda *a, **k: (rows(now), torch.zeros(count, width).double(), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.ones(count, 1), "prompt_mask": torch.ones(count, 1),
        "completion_ids": torch.ones(count, width), "completion_mask": mask,
        "advantages": torch.tensor(values["advantages"]),
        "old_per_token_logps": rows(values["old"]), "ref_per_token_logps": rows(values["reference"]),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    want = float(GRPOTrainer._compute_loss(own, None, inputs))
    return abs(float(ours) / want - 1)


MESHED = [
    (name, way)
    for name in ("grpo", "gspo", "rloo", "ppo")
    for way in ("fsdp=4,data=2", "fsdp=2,tensor=2,context=2", "micro-batches")
]


@proof("posttraining", cases=MESHED, sample=1, float64=True, bound=1e-10)
def rollouts_on_meshes(case: tuple[str, str]) -> float:
    """Loss and gradients on several devices, or in four micro-batches, against one device at once."""
    algorithm, way = case
    pairs, values = drawn_rollouts(np.random.default_rng(5), 16)
    params, batch = drawn_params(6, algorithm), rollout_rows(pairs, values, algorithm, 8, kl=True)
    want, grads, _ = policy_loss_and_grads(algorithm, params, batch)
    if way == "micro-batches":
        loss, got, _ = policy_loss_and_grads(algorithm, params, batch, 4)
        return max(abs(float(loss / want) - 1), tiny.leaf_error(got, grads))
    model, built = model_of(algorithm), MeshSpec.parse(way).build(jax.devices())
    with jax.set_mesh(built):
        there = shardings_of(abstract_params(model.abstract(), model.logical_axes(), built, model.rules))
        places = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
        run = jax.jit(value_and_grad(model, objective=objective_of(algorithm, kl=True)))
        sums, got = run(jax.tree.map(jax.device_put, params, there), jax.device_put(batch, places))
    return max(abs(float(sums.loss / sums.total / want) - 1), tiny.leaf_error(jax.device_get(got), grads))


REWARDS = st.lists(
    st.lists(st.one_of(st.floats(-5, 5), st.just(float("nan"))), min_size=4, max_size=4), min_size=1, max_size=5
)


@proof("posttraining", count=300, sample=50, strategy=REWARDS, bound=1e-12)
def group_advantages(drawn: list[list[float]]) -> float:
    """Sum of each group's advantages; their order is that of the rewards, their scale is the group's."""
    rewards, worst = np.array(drawn), 0.0
    for function in (group_centred, group_normalised, leave_one_out):
        found = function(rewards)
        assert np.isfinite(found).all()
        assert (found[~np.isfinite(rewards)] == 0).all()
        worst = max(worst, float(np.abs(found.mean(axis=1)).max()) / (1 + float(np.abs(found).max())))
        for row, own in zip(rewards, found, strict=True):
            given = np.isfinite(row)
            if given.sum() > 1 and np.ptp(row[given]) > 1e-3:
                order = np.argsort(row[given], kind="stable")
                assert (np.diff(own[given][order]) >= -1e-12).all()
                if function is group_normalised:
                    assert 0.9 < own[given].std(ddof=1) < 1.0001
    return worst


@proof("posttraining", count=300, sample=50)
def roc_keeps_what_it_says(seed: int) -> None:
    """Number of each class, the cleanest of the correct ones; over many draws each wrong one equally often."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 17))
    keep = int(rng.integers(1, size + 1))
    rewards, penalties = rng.integers(0, 2, size).astype(float), rng.random(size)
    kept = resample_on_correct(rewards, penalties, keep, rng)
    right, wrong = np.flatnonzero(rewards > 0), np.flatnonzero(rewards == 0)
    own = [n for n in kept if rewards[n] > 0]
    assert len(kept) == len(set(kept)) == keep
    share = keep * len(right) / size
    floor, ceiling = max(keep - len(wrong), 0), min(len(right), keep)
    if keep >= 4 and min(len(right), len(wrong)) >= 2:
        floor, ceiling = max(floor, 2), min(ceiling, keep - 2)
        assert abs(len(own) - min(max(share, floor), ceiling)) <= 0.5
    assert floor <= len(own) <= ceiling
    assert set(own) == set(right[np.argsort(penalties[right])][: len(own)].tolist())
    if seed % 50 == 0 and len(wrong) > keep - len(own) > 0:
        counts = Counter(
            n for _ in range(2000) for n in resample_on_correct(rewards, penalties, keep, rng) if rewards[n] == 0
        )
        expected = 2000 * (keep - len(own)) / len(wrong)
        assert all(abs(counts[int(n)] - expected) < 6 * np.sqrt(expected) for n in wrong)


@proof(
    "posttraining", cases=["dp", "data=2,fsdp=2,tensor=2", "adapter", "one device", "two devices"], sample=1, bound=1e-5
)
def rollouts_are_on_policy(case: str) -> float:
    """Largest difference at any token over 6 steps with a swap each; nothing is compiled after the first rollout.

    The adapter is trained beside a frozen base, which is the reference of its KL term.
    """
    with tempfile.TemporaryDirectory() as name:
        if case == "adapter":
            base = train_policy(policy_run(Path(name), name="base", steps=1)).directory
            config = policy_run(
                Path(name), steps=6, init_from=str(base), reference="start",
                adapter=AdapterConfig("lora", rank=4, targets=("attention", "mlp")),
                objective=ObjectiveConfig("policy", ("kl=0.1",)),
            )  # fmt: skip
        elif "device" in case:  # rollouts on some of the run's
            config = policy_run(Path(name), steps=6)
            mesh = {"one device": "data=1", "two devices": "data=2"}[case]
            config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, mesh=mesh))
        else:
            config = policy_run(Path(name), steps=6, mesh=case)
        config = with_algorithm(config)
        feed = CheckedFeed(config, open_policy_data(config))
        directory = training_loop.train(config, data=feed.dataset, feed=feed).directory
        assert len(feed.gaps) == 6
        if case == "adapter":
            kl = [row["kl"] for row in rows_of(directory)]
            assert abs(kl[0]) < 1e-6 < kl[-1], "the adapter starts as its base, and leaves it"
        return feed.worst


@proof("posttraining", cases=["grpo", "dapo", "ppo"], sample=1)
def policies_resume(algorithm: str) -> None:
    """A run that a signal stops, and one that runs through."""
    with tempfile.TemporaryDirectory() as name:
        whole = policy_run(Path(name), algorithm=algorithm, steps=6)
        train_policy(whole)
        parts = dataclasses.replace(whole, name="parts")
        with pytest.MonkeyPatch.context() as monkeypatch:
            runs.signal_at(monkeypatch, 3)
            assert not train_policy(parts).complete
        assert train_policy(parts).complete
        one, other = (Path(name) / "runs" / run for run in ("policy", "parts"))
        assert (one / "episodes.jsonl").read_bytes() == (other / "episodes.jsonl").read_bytes()
        assert [curve(row) for row in rows_of(one)] == [curve(row) for row in rows_of(other)]
        assert len(rows_of(one)) == 6


@proof("posttraining", cases=[1, 2], sample=1)
def staleness_is_bounded(bound: int) -> None:
    """Versions of the weights that sampled every completion of an asynchronous run, which resumes in between."""
    with tempfile.TemporaryDirectory() as name:
        config = policy_run(Path(name), steps=6, max_staleness=bound)
        with pytest.MonkeyPatch.context() as monkeypatch:
            runs.signal_at(monkeypatch, 3)
            assert not train_policy(config).complete
        directory = train_policy(config).directory
        rows = [json.loads(line) for line in (directory / "episodes.jsonl").read_text().splitlines()]
        behind = {row["step"] - version for row in rows for version in row["versions"]}
        assert behind <= set(range(bound + 1))
        assert max(behind) == bound
        assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, 7), 16), (
            "no completion is lost or doubled"
        )


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """Training rows of a run's metrics."""
    return [row for row in RunDirectory(directory).read_metrics() if "reward" in row]


def curve(row: dict[str, Any]) -> dict[str, Any]:
    """A row without clocks and memory."""
    return {
        k: v for k, v in row.items() if not any(x in k for x in ("seconds", "second", "wait", "memory", "versions"))
    }


@proof("posttraining", cases=[0, 1, 2, "shuffled", "ppo"], sample=1, bound=0.0)
def a_policy_learns(case: int | str) -> float:
    """By how much the mean reward of the last steps falls short of its claim, or, shuffled, exceeds it."""
    shuffled = case == "shuffled"
    with tempfile.TemporaryDirectory() as name:
        config = policy_run(Path(name), steps=30, seed=case if isinstance(case, int) else 0, group=8)
        config = dataclasses.replace(config, algorithm="ppo" if case == "ppo" else config.algorithm)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=16))
        with pytest.MonkeyPatch.context() as monkeypatch:
            if shuffled:
                shuffle_rewards(monkeypatch)
            result = train_policy(config)
        rewards = [row["reward"] for row in rows_of(result.directory)]
        gain = float(np.mean(rewards[-5:]) - np.mean(rewards[:5]))
        print(f"reward +{gain:.3f}")
        return max(abs(gain) - 0.1, 0.0) if shuffled else max(0.2 - gain, 0.0)


@proof("posttraining", cases=[0, 1, 2, "shuffled"], sample=1, bound=0.0)
def a_policy_learns_in_an_environment(case: int | str) -> float:
    """By how much the reward of episodes of two turns falls short of its claim, or, shuffled, exceeds it."""
    shuffled = case == "shuffled"
    with tempfile.TemporaryDirectory() as name:
        config = policy_run(
            Path(name), steps=30, seed=0 if shuffled else case, group=8, max_tokens=20, rewards=(),
            environment="tests.posttrain.environments:Short",
        )  # fmt: skip
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=32))
        with pytest.MonkeyPatch.context() as monkeypatch:
            if shuffled:
                shuffle_rewards(monkeypatch)
            result = train_policy(config)
        rows = rows_of(result.directory)
        assert max(row["mismatch"] for row in rows) < 1e-5, "both turns are on-policy"
        assert any(row["turns"] > 1 for row in rows)
        rewards = [row["reward"] for row in rows]
        gain = float(np.mean(rewards[-5:]) - np.mean(rewards[:5]))
        return max(abs(gain) - 0.15, 0.0) if shuffled else max(0.2 - gain, 0.0)


@proof("posttraining", cases=["raises", "nan", "slow"], sample=1)
def failing_rewards(case: str) -> None:
    """A reward function that always fails stops the run, named; one that sometimes fails does not."""
    with tempfile.TemporaryDirectory() as name:
        folder, module = Path(name), "tests.posttrain.tiny_policy:"
        if case == "nan":
            result = train_policy(policy_run(folder, rewards=(f"{module}sometimes_nan",)))
            rows = rows_of(result.directory)
            assert result.complete
            assert sum(row["failed_rewards"] for row in rows) > 0
            lines = [json.loads(x) for x in (result.directory / "episodes.jsonl").read_text().splitlines()]
            assert any("not finite" in line.get("failure", "") and line["reward"] is None for line in lines)
            return
        timeout = {"reward_timeout": 0.01} if case == "slow" else {}
        with pytest.raises(RewardError, match=r"completions have no reward; the first: .*(KeyError|took longer)"):
            train_policy(policy_run(folder, rewards=(f"{module}{case}",), **timeout))
