"""Reinforcement learning on the host: advantages, weights, resampling, failing rewards, batches, prompts, settings."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from jaxllm.config import ConfigError, from_dict, to_dict
from jaxllm.data import ByteTokenizer
from jaxllm.files import DataError
from jaxllm.posttrain.advantages import batch_whitened, group_centred, group_normalised, leave_one_out
from jaxllm.posttrain.algorithms import ALGORITHMS, overlong_penalty, resample_on_correct, token_weights
from jaxllm.posttrain.policy_config import PolicyRunConfig
from jaxllm.posttrain.policy_training import open_policy_data, train_policy, with_algorithm
from jaxllm.posttrain.prompts import Prompt, load_prompts
from jaxllm.posttrain.rewards import RewardTerm, find_rewards, judge
from jaxllm.posttrain.rollout_batch import Episode, Judgement, is_informative, judged_group, rollout_batch
from jaxllm.posttrain.rollout_queue import RolloutQueue
from jaxllm.posttrain.rollouts import Rollout, rollout_mesh
from jaxllm.text import ChatTemplate
from jaxllm.train.combinations import check_combinations
from sharding import MeshSpec
from tests.posttrain import tiny_policy
from tests.posttrain.tiny_policy import policy_run


def test_advantages_by_hand():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, math.nan, 4.0, 6.0], [3.0, 3.0, 3.0, 3.0]])
    centred = group_centred(rewards)
    assert centred.tolist() == [[0.5, -0.5, -0.5, 0.5], [-2.0, 0.0, 0.0, 2.0], [0.0] * 4]
    std = math.sqrt(4 * 0.25 / 3)
    assert group_normalised(rewards)[0] == pytest.approx(centred[0] / std, rel=1e-5)
    assert group_normalised(rewards)[1] == pytest.approx([-1, 0, 0, 1], rel=1e-5)
    assert group_normalised(rewards)[2].tolist() == [0.0] * 4
    assert leave_one_out(rewards)[0] == pytest.approx([1 - 1 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert leave_one_out(rewards)[1] == pytest.approx([2 - 5, 0, 0, 6 - 3])
    whitened = batch_whitened(rewards)
    given = rewards[np.isfinite(rewards)]
    assert whitened[np.isfinite(rewards)] == pytest.approx((given - given.mean()) / given.std(ddof=1), rel=1e-5)


def test_token_weights_give_the_means_that_they_are_named_for(rng):
    lengths = np.array([3.0, 7.0, 1.0])
    losses = [rng.normal(size=int(n)) for n in lengths]

    def loss(mean_over: str) -> float:
        weights = token_weights(lengths, mean_over, 10)
        return sum(w * x.sum() for w, x in zip(weights, losses, strict=True)) / lengths.sum()

    assert loss("tokens") == pytest.approx(np.concatenate(losses).mean())
    assert loss("sequences") == pytest.approx(np.mean([x.mean() for x in losses]))
    assert loss("longest") == pytest.approx(sum(x.sum() for x in losses) / 30)


def test_overlong_penalty():
    assert overlong_penalty(np.array([[1.0, 80.0, 90.0, 100.0]]), 100, 0.2).tolist() == [[0, 0, -0.5, -1]]
    assert (overlong_penalty(np.ones((1, 2)), 100, 0.0) == 0).all()


def test_resample_on_correct():
    """Half as many are kept, in proportion, the cleanest of the correct ones, two of each class."""
    rewards = np.array([1.0, 1, 1, 1, 0, 0, 0, 0])
    penalties = np.array([0.9, 0.1, 0.5, 0.2, 0, 0, 0, 0])
    kept = resample_on_correct(rewards, penalties, 4, np.random.default_rng(0))
    assert kept[:2] == [1, 3]
    assert len(kept) == 4
    assert resample_on_correct(np.ones(4), np.arange(4.0), 2, np.random.default_rng(0)) == [0, 1]
    few = resample_on_correct(np.array([1.0] + [0] * 7), np.zeros(8), 4, np.random.default_rng(0))
    assert few[0] == 0
    assert len(few) == 4
    drawn = {tuple(resample_on_correct(np.zeros(4), np.zeros(4), 2, np.random.default_rng(n))) for n in range(60)}
    assert len(drawn) == 6, "all pairs of four wrong ones occur"


def test_rewards_that_fail_are_named():
    def one(name: str, text: str = "abc", timeout: float = 0.0) -> Any:
        return judge(find_rewards((f"tests.posttrain.tiny_policy:{name}=2",)), "p", text, {}, timeout)

    assert one("small_bytes").reward == 2.0
    failed = one("raises")
    assert math.isnan(failed.reward)
    assert failed.failure == "tests.posttrain.tiny_policy:raises raised KeyError: 'no such answer'"
    assert "returned nan, which is not finite" in one("sometimes_nan", "four").failure
    never = RewardTerm("slow", lambda *_: tiny_policy.slow("", "", {}), 1.0)
    assert "slow took longer than rollout.reward_timeout = 0.02 s" in judge((never,), "", "", {}, 0.02).failure
    both = judge(find_rewards(("last_number", "exact_answer=0.5")), "1+1=", " 2", {"answer": 2}, 0.0)
    assert (both.reward, both.terms) == (1.5, {"last_number": 1.0, "exact_answer": 1.0})
    for spec, message in [
        ("exact_anser", "Did you mean 'exact_answer'"),
        ("exact_answer=x", "no number as its weight"),
        ("nowhere:f", "cannot be imported"),
        ("math:pi", "is a float, not a function"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_rewards((spec,))


def rollout(prompt: int, tokens: int, finish: str = "stop") -> Rollout:
    ids = tuple(range(100, 100 + tokens))
    logprobs = tuple(-0.1 * n for n in range(tokens))
    return Rollout(Prompt(tuple(range(prompt)), "p", {}), ids, logprobs, (0,) * tokens, "text", finish)


def test_rollouts_are_packed_whole():
    """Targets are the completions' tokens alone; a completion without a reward has no part."""
    lengths = [(3, 4), (2, 6), (5, 2), (1, 1)]
    episodes = [
        Episode(rollout(*both), Judgement(1.0, {}), math.nan if n == 1 else 1.0, n + 1.0)
        for n, both in enumerate(lengths)
    ]
    batch = rollout_batch(episodes, ALGORITHMS["grpo"], 3, 12, 8).batch
    assert batch.advantages is not None
    assert batch.old_logprobs is not None
    assert batch.weights is not None
    seen = {}
    for row in range(3):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            here = batch.segment_ids[row] == segment
            said = here & (batch.targets[row] >= 0)
            number = int(batch.advantages[row][said][0])
            seen[number] = said.sum()
            prompt, tokens = lengths[number - 1]
            assert batch.tokens[row][here].tolist() == [*range(prompt), *range(100, 100 + tokens)][:-1]
            assert batch.positions[row][here].tolist() == list(range(prompt + tokens - 1))
            assert batch.targets[row][said].tolist() == list(range(100, 100 + tokens))
            assert batch.old_logprobs[row][said] == pytest.approx([-0.1 * n for n in range(tokens)])
            assert batch.weights[row][said] == pytest.approx(7 / (3 * tokens))
    assert seen == {1: 4, 3: 2, 4: 1}
    assert (batch.segment_ids.max(axis=1) > 1).any()
    assert (rollout_batch([], ALGORITHMS["grpo"], 3, 12, 8).batch.targets == -1).all()
    with pytest.raises(DataError, match=r"take 3 rows of 12 tokens; data.batch_size = 1 is too small"):
        rollout_batch(episodes + episodes, ALGORITHMS["grpo"], 1, 12, 8)


def test_groups_of_equal_rewards_say_nothing():
    judged = [Judgement(x, {}) for x in (1.0, 1.0, math.nan)]
    group = judged_group([rollout(2, n) for n in (2, 3, 4)], judged, ALGORITHMS["grpo"], 3, 8, 0)
    assert not is_informative(group)
    other = judged_group([rollout(2, n) for n in (2, 3, 8)], judged[:1] * 3, ALGORITHMS["dapo"], 3, 8, 0)
    assert [one.reward for one in other] == pytest.approx([1.0, 1.0, 0.0], abs=1e-12), "one is too long"
    assert is_informative(other)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "x" * 30}], r"f.jsonl:1: the prompt has \d+ tokens.*leaves 20"),
        ([{"prompt": ""}], r"f.jsonl:1: the prompt is empty"),
        ([{"prompt": "a"}, {"answer": 1}], r"f.jsonl:2: a record is an object with 'prompt'"),
        ([{"prompt": [{"role": "user", "content": "x"}]}], r"f.jsonl:1: .*no chat template"),
        ([], r"contains no prompts"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path, rows, message):
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=message):
        load_prompts(str(file), NoBos(), None, 20)


class NoBos(ByteTokenizer):
    """Bytes without a token at the start."""

    adds_bos = False


def test_prompts():
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    found, line = load_prompts("arithmetic:1", NoBos(), None, 20)
    assert len({one.text for one in found}) == 100
    assert all(eval(one.text[:-1]) == int(one.row["answer"]) for one in found)
    assert "100 prompts" in line
    asked = load_prompts("arithmetic:3", NoBos(), template, 60)[0]
    assert len(asked) == 1000
    assert all(one.text.startswith("<What is ") and one.text.endswith(">!") for one in asked)
    with pytest.raises(DataError, match="1 to 6 digits"):
        load_prompts("arithmetic:0", NoBos(), None, 20)


def test_settings(tmp_path):
    config = policy_run(tmp_path)
    assert from_dict(PolicyRunConfig, json.loads(json.dumps(to_dict(config)))) == config

    def refusal(**fields: Any) -> str:
        with pytest.raises((ConfigError, ValueError)) as caught:
            open_policy_data(with_algorithm(policy_run(tmp_path, **fields)))
        return str(caught.value)

    assert "algorithm = 'gropo'; legal: grpo, " in refusal(algorithm="gropo")
    assert "rollout.group = 1, but grpo compares" in refusal(group=1)
    assert "leaves no room for a prompt" in refusal(max_tokens=32)
    assert "may take" in refusal(group=40)
    assert 'kl = 0.1 needs a reference model; set reference = "start"' in refusal(
        objective=dataclasses.replace(config.objective, options=("kl=0.1",))
    )
    assert "rewards is empty" in refusal(rewards=())
    own = dataclasses.replace(
        config, algorithm="dapo", objective=dataclasses.replace(config.objective, options=("clip_low=0.1",))
    )
    assert with_algorithm(own).objective.options == ("clip_high=0.28", "clip_low=0.1")
    source = open_policy_data(config)[0]
    steps = [prompt.text for step in range(2) for prompt in source.prompts_at(step)]
    assert sorted(steps[:4]) == sorted(steps[4:]) == sorted(["ab", "cde", "f", "ghij"])
    assert source.check_cursor(json.loads(json.dumps(source.cursor(7)))) == 7


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_rollouts_are_never_staler_than_the_bound(ahead):
    """Each batch is sampled once, in order, with weights that are at most so many steps behind; a failure is raised."""
    version, sampled = 0, []

    def swap(step: int) -> None:
        nonlocal version
        version += 1

    def sample(step: int) -> tuple[int, int]:
        sampled.append(step)
        if step == 9:
            raise RuntimeError("no reward")
        return step, version

    with RolloutQueue(swap, sample, ahead, 12) as queue:
        for step in range(4, 9 - ahead):
            batch = queue.next(step).batch
            assert batch[0] == step
            assert batch[1] == max(version - ahead, 1)
        assert sampled[: 5 - ahead] == list(range(4, 9 - ahead))
        with pytest.raises(RuntimeError, match="no reward"):
            list(map(queue.next, range(9 - ahead, 11)))
    assert len(sampled) == len(set(sampled))


def test_meshes_of_rollouts():
    """The run's own mesh, or its first devices; none for one device."""
    mesh = MeshSpec.parse("data=2,fsdp=4").build()
    assert rollout_mesh("", mesh) is mesh
    assert rollout_mesh("tensor=1", mesh) is None
    found = rollout_mesh("data=2,tensor=2", mesh)
    assert found is not None
    assert dict(found.shape) == {"data": 2, "tensor": 2}
    assert set(found.devices.flat) == set(mesh.devices.flat[:4])
    for text in ("tensor=16", "tensor=-1"):
        with pytest.raises(ConfigError, match=rf'rollout.mesh = "{text}" has -?\d+ devices, and the run has 8'):
            rollout_mesh(text, mesh)


@pytest.mark.drawn(0.3)
def test_a_policy_trains_in_a_pipeline(tmp_path):
    """Rollouts on one of its devices; their log-probabilities are those of the pipelined training step."""
    model = dataclasses.replace(tiny_policy.MODEL, layers=2, remat="none")
    run = policy_run(tmp_path, mesh="stage=2,data=4", rollout_mesh="data=1", model=model, accumulate=2, steps=2)
    directory = train_policy(run).directory
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(abs(row["mismatch"]) < 1e-5 < row["grad_norm"] for row in rows)


def test_pipelines_that_cannot_sample_or_value_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"give rollout\.mesh, such as data=1"):
        policy_run(tmp_path, mesh="stage=2,data=4")
    run = policy_run(tmp_path, mesh="stage=2", rollout_mesh="data=1", algorithm="ppo", accumulate=2)
    with pytest.raises(ConfigError, match=r'"actor_critic".*the values of a batch come from one forward pass'):
        check_combinations(with_algorithm(run), {"stage": 2})
