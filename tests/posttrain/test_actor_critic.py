"""PPO: generalised advantages against loops, the value loss, a run with its resume, adapters, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.config import ConfigError
from jaxllm.convert.convert import convert
from jaxllm.convert.load import load_model
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.posttrain import train_policies_together, train_policy
from jaxllm.posttrain.gae import GaeConfig, TokenPlaces, generalised_advantages, whitened, with_values
from jaxllm.posttrain.policy_training import with_algorithm
from jaxllm.posttrain.prompts import blank_batch
from jaxllm.train import ObjectiveConfig, RunConfig
from jaxllm.train.records.run_directory import RunDirectory
from jaxllm.train.run_model import run_model, trained_params
from tests import tiny
from tests.posttrain.policy_losses import drawn_params, drawn_rollouts, policy_loss_and_grads, reference_policy_loss
from tests.posttrain.policy_losses import rollout_rows as packed_rollouts
from tests.posttrain.tiny_policy import policy_run
from tests.train import runs


def looped(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Advantages by the sum of the paper, token by token."""
    found = []
    for t in range(len(values)):
        total = 0.0
        for k in range(t, len(values)):
            after = values[k + 1] if k + 1 < len(values) else 0.0
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * after - values[k])
        found.append(total)
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_generalised_advantages_of_packed_rows(rng, gamma, lam):
    """Each completion's tokens, with gaps where an environment spoke, as if it were alone."""
    batch = blank_batch(2, 16, True)
    places = [
        TokenPlaces(0, np.array([1, 2, 3])),
        TokenPlaces(0, np.array([7, 8, 11, 12, 13])),  # two turns
        TokenPlaces(1, np.array([4])),
    ]
    rewards, values = [1.5, -0.5, 2.0], rng.normal(size=(2, 16))
    found = with_values(batch, places, rewards, values, GaeConfig(gamma, lam))
    batch: Any = found.batch
    want = []
    for place, reward in zip(places, rewards, strict=True):
        own = values[place.row, place.columns].tolist()
        want.append(looped([0.0] * (len(own) - 1) + [reward], own, gamma, lam))
    flat = np.concatenate(want)
    for place, own in zip(places, want, strict=True):
        scaled = (np.array(own) - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8)
        assert batch.advantages[place.row, place.columns] == pytest.approx(scaled, abs=1e-6)
        assert batch.old_values[place.row, place.columns] == pytest.approx(values[place.row, place.columns], abs=1e-6)
        assert batch.returns[place.row, place.columns] == pytest.approx(
            own + values[place.row, place.columns], abs=1e-6
        )
    assert (batch.advantages != 0).sum() == (batch.returns != 0).sum() == 9
    assert found.advantages[2] == pytest.approx(float(batch.advantages[1, 4]), abs=1e-6)
    assert found.metrics["advantage_std"] == pytest.approx(flat.std())


def test_generalised_advantages_by_hand():
    rewards, values = np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.25, 0.75]])
    assert generalised_advantages(rewards, values, 1.0, 1.0)[0] == pytest.approx([0.5, 0.75, 0.25])
    assert generalised_advantages(rewards, values, 1.0, 0.0)[0] == pytest.approx([-0.25, 0.5, 0.25])
    assert (whitened(np.ones((1, 3)), np.ones((1, 3), bool)) == 0).all()
    empty = with_values(blank_batch(1, 4, True), [], [], np.zeros((1, 4)), GaeConfig())
    assert (empty.batch.returns == 0).all()
    assert empty.metrics == {"advantage_std": 0.0, "explained_variance": 0.0}


@pytest.mark.drawn(0.5)
@pytest.mark.usefixtures("float64")
def test_loss_and_gradients_by_hand(rng):
    pairs, values = drawn_rollouts(rng)
    params = drawn_params(3, "ppo")
    reference = jax.jit(jax.value_and_grad(lambda p: reference_policy_loss("ppo", p, pairs, values, kl=False)))
    want, grads = reference(params)
    loss, got, metrics = policy_loss_and_grads("ppo", params, packed_rollouts(pairs, values, "ppo", 2, kl=False))
    assert abs(float(loss / want) - 1) < 1e-10
    assert tiny.leaf_error(got, grads) < 1e-10
    assert float(np.abs(got["head"]["value"]).max()) > 1e-3
    assert 0 < float(metrics["value_clipped"]) < 1
    parts = policy_loss_and_grads("ppo", params, packed_rollouts(pairs, values, "ppo", 2, kl=False), 2)
    assert tiny.leaf_error(parts[1], grads) < 1e-10
    assert float(parts[2]["value_loss"]) == pytest.approx(float(metrics["value_loss"]), rel=1e-10)


def curves(directory: Any) -> list[Any]:
    """Rows without clocks."""
    rows = [row for row in RunDirectory(directory).read_metrics() if "reward" in row]
    return [{k: v for k, v in row.items() if not any(x in k for x in ("second", "wait", "memory"))} for row in rows]


@pytest.mark.drawn(0.3)
def test_a_run_resumes_bitwise_with_its_value_head(tmp_path, monkeypatch):
    whole = policy_run(tmp_path, algorithm="ppo", steps=4, group=2)
    result = train_policy(whole)
    parts = dataclasses.replace(whole, name="parts")
    with monkeypatch.context() as patched:
        runs.signal_at(patched, 2)
        assert not train_policy(parts).complete
    again = train_policy(parts)
    assert again.complete
    assert curves(result.directory) == curves(again.directory)
    assert (result.directory / "episodes.jsonl").read_bytes() == (again.directory / "episodes.jsonl").read_bytes()
    rows = curves(result.directory)
    assert rows[0]["value"] == 0, "the head starts at zero"
    assert rows[-1]["value"] != 0
    assert max(row["mismatch"] for row in rows) < 1e-5
    assert all(row["explained_variance"] <= 1 for row in rows)
    with Checkpointer(result.directory / "checkpoints", read_only=True) as checkpoints:
        assert "params/head/value" in checkpoints.manifest(None).leaves
    assert "value" not in load_model(result.directory).params["head"], "what is served has no head"
    converted = convert(str(result.directory), tmp_path / "hf", to="hf")
    assert "value" not in load_model(tmp_path / "hf").params["head"], str(converted)
    episodes = [json.loads(line) for line in (result.directory / "episodes.jsonl").read_text().splitlines()]
    assert any(row["advantage"] != 0 for row in episodes)


@pytest.mark.drawn(0.2)
def test_adapters_and_meshes(tmp_path):
    """The head of an adapter's run is trained beside it, on a mesh and in micro-batches; the reference is its base."""
    base = train_policy(policy_run(tmp_path, name="base", steps=1)).directory
    fields: dict[str, Any] = {
        "algorithm": "ppo", "steps": 3, "init_from": str(base), "reference": "start", "accumulate": 2,
        "objective": ObjectiveConfig("policy", ("kl=0.1", "value_coefficient=0.5")),
    }  # fmt: skip
    adapter = AdapterConfig("lora", rank=4, targets=("attention", "mlp"))
    config = policy_run(tmp_path, name="lora", adapter=adapter, mesh="data=2,tensor=2,context=2", **fields)
    mask = trained_params(with_algorithm(config), run_model(with_algorithm(config)))
    assert mask["head"]["value"]
    assert not mask["head"]["norm"]["gain"]
    rows = curves(train_policy(config).directory)
    assert abs(rows[0]["kl"]) < 1e-6 < rows[-1]["kl"]
    assert rows[-1]["value"] != 0
    whole = curves(train_policy(policy_run(tmp_path, name="whole", mesh="fsdp=4,tensor=2", **fields)).directory)
    assert whole[-1]["value"] != 0, "a run that starts from a model without a head"


def test_refusals(tmp_path):
    def refusal(run: Any) -> str:
        with pytest.raises((ConfigError, ValueError)) as caught:
            run()
        return str(caught.value)

    def of(**fields: Any) -> str:
        return refusal(lambda: with_algorithm(policy_run(tmp_path, **fields)))

    assert "choose an algorithm with a value head: ppo" in of(gae=GaeConfig(lam=0.5))
    assert "gae.lam = 1.5; give a number from 0 to 1" in refusal(lambda: GaeConfig(lam=1.5))
    assert "leave the name out" in of(objective=ObjectiveConfig("actor_critic"))
    assert "value_clip" in of(objective=ObjectiveConfig("policy", ("value_clip=0.1",)))
    off = ObjectiveConfig("policy", ("value_coefficient=0",))
    assert "values are learned by their loss" in of(algorithm="ppo", objective=off)
    assert with_algorithm(policy_run(tmp_path, algorithm="ppo", group=1)).objective.name == "actor_critic"
    lora = AdapterConfig("lora", rank=4, targets=("attention",))
    several = [policy_run(tmp_path, name=n, algorithm="ppo", adapter=lora, init_from="x") for n in "ab"]
    assert "a value head, which is trained for one run at a time" in refusal(lambda: train_policies_together(several))
    plain = RunConfig(model=policy_run(tmp_path).model, objective=ObjectiveConfig("actor_critic"))
    assert "takes data.content" in refusal(lambda: runs.train(plain))
