"""Policy training: rollouts, rewards and updates of one policy, in one process and on the same devices.

    step n   swap the policy's weights into the engine -> rollouts -> rewards -> advantages -> packed batch -> update

With ``rollout.updates = k`` the k - 1 steps that follow update once more with the same batch.

The update is the training step of ``jaxllm.train`` with the policy objective; checkpoints, resume, metrics and reports
are those of any run. What a step samples depends on the run's seed and the step alone, so that a resumed run gives the
same curve.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.data import Batch, Dataset
from jaxllm.data.loader import resolve_tokenizer
from jaxllm.models import Functional
from jaxllm.models.value_head import without_value_head
from jaxllm.observe.policy_phases import TIMELINE, PhaseLog
from jaxllm.peft.adapted_model import merge_adapters
from jaxllm.posttrain.algorithms import find_algorithm
from jaxllm.posttrain.environments.environment_table import find_environment
from jaxllm.posttrain.episode_log import EPISODES, EpisodeLog
from jaxllm.posttrain.gae import GaeConfig, with_values
from jaxllm.posttrain.multi_turn import EpisodeSampler
from jaxllm.posttrain.policy_config import PolicyRunConfig
from jaxllm.posttrain.prompts import Prompt, PromptSource, blank_batch, load_prompts, prompt_source
from jaxllm.posttrain.repeated_batch import RepeatedBatch
from jaxllm.posttrain.rewards import Judgement, RewardError, find_rewards, judge
from jaxllm.posttrain.rollout_batch import (
    Episode,
    PackedEpisodes,
    is_informative,
    judged_group,
    rollout_batch,
    rows_needed,
    with_advantages,
)
from jaxllm.posttrain.rollout_queue import QueuedBatch, RolloutQueue
from jaxllm.posttrain.rollouts import Rollout, RolloutEngine, Sampling, derived_seed, rollout_mesh, sampled
from jaxllm.text import ChatTemplate, Tokenizer
from jaxllm.train.init_from import open_initial_model
from jaxllm.train.loop import TrainResult, train
from jaxllm.train.objectives.policy_loss import PolicyObjective, check_policy_reference
from jaxllm.train.run import Run
from jaxllm.train.run_model import base_model
from jaxllm.train.step.loss import token_values
from jaxllm.train.step.objective import make_objective

MOST_FAILURES = 0.5
"""Share of a step's completions without a reward above which the run stops."""


def train_policy(config: PolicyRunConfig) -> TrainResult:
    """Trains a policy by reinforcement learning, or resumes its run.

    Raises:
        RewardError: most completions of a step have no reward. The run resumes from its last checkpoint.
        ConfigError, DataError: settings or prompts cannot be used; the message says why.
        ResumeError and others: as ``jaxllm.train.train``.
    """
    config = with_algorithm(config)
    feed = RolloutFeed(config, open_policy_data(config))
    return train(config, also=(feed.repeated,) if config.rollout.updates > 1 else (), data=feed.dataset, feed=feed)


def with_algorithm(config: PolicyRunConfig) -> PolicyRunConfig:
    """The run with its algorithm's options in the objective, before those that it sets itself.

    Raises:
        ConfigError: an option is unknown, or a KL term lacks its reference.
    """
    own = {option.partition("=")[0]: option for option in config.objective.options}
    defaults = {option.partition("=")[0]: option for option in find_algorithm(config.algorithm).options}
    options = tuple((defaults | own).values())
    name = find_algorithm(config.algorithm).objective
    config = replace(config, objective=replace(config.objective, name=name, options=options))
    objective = make_objective(config.objective, config.z_loss)
    assert isinstance(objective, PolicyObjective)
    check_policy_reference(objective, config.reference)
    return config


class PolicyData(NamedTuple):
    """Prompts of a run, with the tokenizer and the chat template of its model, and a line for a log."""

    source: PromptSource
    tokenizer: Tokenizer
    template: ChatTemplate | None
    summary: str


def open_policy_data(config: PolicyRunConfig) -> PolicyData:
    """Prompts of a run.

    Raises:
        ConfigError: a batch is too small for the completions of a step.
        DataError: the prompts cannot be used.
    """
    opened = open_initial_model(config.init_from, config.model) if config.init_from else None
    if config.data.tokenizer == "model" and opened is None:
        raise ConfigError("data.tokenizer is 'model', but the run starts from no model; set init_from, or name one.")
    given = opened is not None and config.data.tokenizer == "model"
    tokenizer = opened.tokenizer if given and opened else resolve_tokenizer(config.data.tokenizer, None)
    rollout, data = config.rollout, config.data
    room = data.seq_len + 1 - rollout.max_tokens
    template = opened.template if opened else None
    tools = find_environment(config.environment)().tools if config.environment else ()
    prompts, line = load_prompts(config.prompts, tokenizer, template, room, tools)
    fields: dict[str, Any] = {} if not config.environment else {"environment": config.environment}
    source = prompt_source(
        prompts,
        per_step=rollout.prompts,
        attempts=rollout.attempts if find_algorithm(config.algorithm).dynamic else 1,
        batch_size=data.batch_size,
        seq_len=data.seq_len,
        seed=config.seed,
        fields=fields | {"tokenizer": tokenizer.fingerprint, "group": rollout.group, "max_tokens": rollout.max_tokens},
        values=find_algorithm(config.algorithm).has_values,
    )
    needed = rows_needed(config.completions, source.longest + rollout.max_tokens, data.seq_len)
    if needed > data.batch_size:
        raise ConfigError(
            f"{config.completions} completions of up to {source.longest + rollout.max_tokens} tokens may take {needed} "
            f"rows of data.seq_len = {data.seq_len}; give data.batch_size = {needed} or more, longer rows, or "
            "a smaller rollout.prompts or rollout.group."
        )
    return PolicyData(source, tokenizer, template, line)


class StepRollouts(NamedTuple):
    """Rollouts of a step: packed rows, their episodes by prompt, and means for the log."""

    packed: PackedEpisodes
    groups: list[list[Episode]]
    metrics: dict[str, float]


class RolloutFeed:
    """Batches of rollouts for the training loop, each sampled with the weights of the step before (``BatchFeed``).

    Args:
        config: the run.
        data: its prompts.
    """

    def __init__(self, config: PolicyRunConfig, data: PolicyData):
        source, tokenizer = data.source, data.tokenizer
        self.config, self.source, self.tokenizer = config, source, tokenizer
        self.algorithm = find_algorithm(config.algorithm)
        self.rewards = find_rewards(config.rewards) if config.rewards else ()
        self.episodes = None if not config.environment else EpisodeSampler(
            find_environment(config.environment), tokenizer, data.template, max_tokens=config.rollout.max_tokens,
            max_turns=config.rollout.max_turns, timeout=config.rollout.reward_timeout,
        )  # fmt: skip
        # A cached property serves a protocol's property; the type checker does not see it.
        self.dataset = Dataset(config.data, source, None, tokenizer, data.summary)  # pyright: ignore[reportArgumentType]
        self.repeated = RepeatedBatch(
            blank_batch(config.data.batch_size, config.data.seq_len, self.algorithm.has_values)
        )
        self._metrics: dict[int, dict[str, float]] = {}
        self.engine: RolloutEngine | None = None

    @contextlib.contextmanager
    def batches(self, run: Run, first: int, params: Callable[[], Any]) -> Iterator[Iterator[tuple[int, Any]]]:
        """Context manager with an iterator over (step, batch on the devices), from step ``first`` on."""
        model = base_model(self.config)
        same = not self.config.adapter and model.config.dtype == model.config.param_dtype
        served = (lambda params: params) if same else jax.jit(weights_to_serve(self.config, run.model))

        def merge(params: Any) -> Any:
            return served(without_value_head(params))

        mesh = rollout_mesh(self.config.rollout.mesh, run.mesh)
        with jax.set_mesh(run.mesh):
            weights = merge(params())
        rollout = self.config.rollout
        self.engine = engine = RolloutEngine(
            model, weights, self.tokenizer, mesh, self.longest, rollout.max_sequences,
            batched_tokens=rollout.max_batched_tokens,
        )  # fmt: skip
        log, timeline = self.log_of(run, first), timeline_of(run)

        updates = self.config.rollout.updates

        def swap(number: int) -> None:
            with jax.set_mesh(run.mesh):
                engine.swap(merge(params()), number * updates + 1)

        def updated() -> None:
            jax.block_until_ready(params())

        ahead, last = self.config.rollout.max_staleness, -(-self.config.steps // updates)
        with RolloutQueue(swap, lambda number: engine.run(self.rollouts(number)), ahead, last, updated) as queue:
            yield self._each(run, first, queue, log, timeline, params)

    def _each(
        self,
        run: Run,
        first: int,
        queue: RolloutQueue,
        log: EpisodeLog,
        timeline: PhaseLog,
        params: Callable[[], Any],
    ) -> Iterator[tuple[int, Any]]:
        value = value_function(run) if self.algorithm.has_values else None
        for step in itertools.count(first):
            number, update = divmod(step, self.config.rollout.updates)
            if update == 0:
                found = queue.next(number)
                rollouts: StepRollouts = found.batch
                if value is not None:
                    rollouts = valued(rollouts, value(params(), rollouts.packed.batch), self.config.gae)
                self.repeated.batch = self.logged(step, rollouts, found, log, timeline)
            yield step, run.put_batch(self.repeated.batch)

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its completion."""
        return self.source.longest + self.config.rollout.max_tokens

    def log_of(self, run: Run, first: int) -> EpisodeLog:
        """Log of a run's episodes, from step ``first`` on."""
        file = run.directory.path / EPISODES if run.directory.writes else None
        return EpisodeLog(file, first, self.config.rollout.episodes)

    def logged(
        self, step: int, rollouts: StepRollouts, queued: QueuedBatch, log: EpisodeLog, timeline: PhaseLog
    ) -> Batch:
        """Batch of a step's rollouts, whose episodes, phases and metrics are logged."""
        log.write(step + 1, rollouts.groups)
        timeline.write(queued.phases)
        self._metrics[step + 1] = rollouts.metrics | {
            "swap_seconds": queued.seconds("swap"),
            "rollout_seconds": queued.seconds("rollout"),
            "rollout_wait": queued.waited,
        }
        return rollouts.packed.batch

    def metrics(self, step: int) -> dict[str, float]:
        """Metrics of the rollouts of step ``step``, counted from 1; given out once."""
        return self._metrics.pop(step, {})

    def rollouts(self, number: int) -> Sampling[StepRollouts]:
        """Samples and judges a batch of rollouts, and packs them.

        Args:
            number: of the batch, from 0; that of its step where each has one update.

        Raises:
            RewardError: most completions have no reward.
        """
        config, rollout = self.config, self.config.rollout
        groups: list[list[Episode]] = []
        dropped, seen = 0, []
        attempts = self.source.attempts
        for attempt in range(attempts):
            found = yield from self._groups(number, attempt)
            seen += [one for group in found for one in group]
            informative = [group for group in found if is_informative(group)]
            if not self.algorithm.dynamic:
                groups = found
                break
            dropped += len(found) - len(informative)
            groups = (groups + informative)[: rollout.prompts]
            if len(groups) == rollout.prompts:
                break
        step = number * rollout.updates
        self._check_failures(step, seen)
        if groups:
            groups = with_advantages(groups, self.algorithm)
        episodes = [one for group in groups for one in group]
        stale = [step + 1 - version for one in seen for version in one.rollout.versions]
        metrics = rollout_metrics(seen, groups) | {
            "dropped_groups": float(dropped),
            "staleness": float(np.mean(stale)) if stale else 0.0,
        }
        data, largest = config.data, rollout.max_tokens
        packed = rollout_batch(episodes, self.algorithm, data.batch_size, data.seq_len, largest)
        return StepRollouts(packed, groups, metrics)

    def _groups(self, number: int, attempt: int) -> Sampling[list[list[Episode]]]:
        """Episodes of the prompts of one attempt at a batch."""
        rollout, seed = self.config.rollout, derived_seed(self.config.seed, number, attempt)
        prompts: list[Prompt] = self.source.prompts_at(number, attempt)
        count = rollout.group * self.algorithm.oversample
        rollouts: list[list[Rollout]]
        if self.episodes is None:
            rollouts = yield from sampled(prompts, count, rollout.max_tokens, seed)
        else:
            rollouts = yield from self.episodes.sample(prompts, count, seed)
        found = []
        for place, group in enumerate(rollouts):
            judgements = [self._judge(one) for one in group]
            own = derived_seed(seed, place, 1)
            found.append(judged_group(group, judgements, self.algorithm, rollout.group, rollout.max_tokens, own))
        return found

    def _judge(self, rollout: Rollout) -> Judgement:
        """Judgement by the reward functions and the environment."""
        if rollout.failure:
            return Judgement(float("nan"), {}, rollout.failure)
        given = rollout.prompt.text, rollout.text, rollout.prompt.row
        found = judge(self.rewards, *given, self.config.rollout.reward_timeout)
        own = rollout.environment_reward
        if own is None:
            return found
        if not math.isfinite(own):
            return Judgement(float("nan"), found.terms, f"the environment's reward is {own}, which is not finite")
        return replace(found, reward=found.reward + own, terms=found.terms | {"environment": own})

    def _check_failures(self, step: int, episodes: list[Episode]) -> None:
        failed = [one for one in episodes if one.judgement.failure]
        if len(failed) > MOST_FAILURES * len(episodes):
            one = failed[0]
            raise RewardError(
                f"step {step + 1}: {len(failed)} of {len(episodes)} completions have no reward; the first: "
                f"{one.judgement.failure}. Prompt: {one.rollout.prompt.text[:200]!r}, completion: "
                f"{one.rollout.text[:200]!r}. Mend the reward function and start again: the run resumes from its last "
                "checkpoint."
            )


def weights_to_serve(config: PolicyRunConfig, model: Functional) -> Callable[[Any], Any]:
    """Function from the run's parameters to the engine's weights: adapters merged, matrices in compute dtype.

    Args:
        config: the run.
        model: its model, adapter included.
    """
    base = base_model(config)
    return lambda params: base.in_compute_dtype(merge_adapters(model, params) if config.adapter else params)


def timeline_of(run: Run) -> PhaseLog:
    """Log of the phases of a run's start."""
    return PhaseLog(run.directory.path / TIMELINE if run.directory.writes else None)


def value_function(run: Run) -> Callable[[Any, Batch], np.ndarray]:
    """Function ``(parameters, batch) -> values [B, S]`` of a run's value head, on the host of every process."""
    config = run.config

    def score(params: Any, batch: Batch) -> jax.Array:
        found = token_values(run.model, params, batch, accumulate=config.accumulate, layout=config.parallel.layout)
        return jax.sharding.reshard(found, jax.P())

    compiled = jax.jit(score)

    def values(params: Any, batch: Batch) -> np.ndarray:
        with jax.set_mesh(run.mesh):
            return np.asarray(compiled(params, run.put_batch(batch)))

    return values


def valued(rollouts: StepRollouts, values: np.ndarray, config: GaeConfig) -> StepRollouts:
    """Rollouts with the advantages of their tokens, by the values of their states before the step."""
    packed = rollouts.packed
    found = with_values(packed.batch, packed.places, [one.reward for one in packed.episodes], values, config)
    mean = {id(one): value for one, value in zip(packed.episodes, found.advantages, strict=True)}
    groups = [[replace(one, advantage=mean.get(id(one), 0.0)) for one in group] for group in rollouts.groups]
    return StepRollouts(packed._replace(batch=found.batch), groups, rollouts.metrics | found.metrics)


def rollout_metrics(seen: list[Episode], groups: list[list[Episode]]) -> dict[str, float]:
    """Means over the rollouts of a step.

    Args:
        seen: all of them.
        groups: those that the update uses.
    """
    rewards = [one.reward for one in seen if np.isfinite(one.reward)]
    lengths = [float(sum(one.rollout.is_written)) for one in seen]
    used = [one.advantage for group in groups for one in group]
    found = {
        "reward": float(np.mean(rewards)) if rewards else float("nan"),
        "reward_std": float(np.std(rewards)) if rewards else float("nan"),
        "completion_tokens": float(np.mean(lengths)) if lengths else 0.0,
        "cut_completions": float(np.mean([one.rollout.finish == "length" for one in seen])) if seen else 0.0,
        "failed_rewards": float(sum(bool(one.judgement.failure) for one in seen)),
        "equal_groups": float(sum(not is_informative(group) for group in groups)),
        "advantage_std": float(np.std(used)) if used else 0.0,
    }
    if any(one.rollout.environment_reward is not None for one in seen):
        calls = sum(one.rollout.calls for one in seen)
        found["turns"] = float(np.mean([one.rollout.turns for one in seen]))
        found["tool_calls"] = calls / len(seen)
        found["failed_tool_calls"] = sum(one.rollout.flaws for one in seen) / max(calls, 1)
    names = {name for one in seen for name in one.judgement.terms}
    for name in sorted(names):
        values = [one.judgement.terms[name] for one in seen if name in one.judgement.terms]
        found[f"reward/{name}"] = float(np.mean(values))
    return found
