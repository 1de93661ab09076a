"""Configuration of a run of reinforcement learning: a training run with prompts, rewards, rollouts and an algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jaxllm.config import runtime_only
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.posttrain.algorithms import ALGORITHMS, find_algorithm
from jaxllm.posttrain.environments.environment_table import find_environment
from jaxllm.posttrain.gae import GaeConfig
from jaxllm.posttrain.rewards import find_rewards
from jaxllm.train.config import EngineBeside, RunConfig
from jaxllm.train.step.objective import ObjectiveConfig
from sharding import MeshSpec

PAGE = 32
"""Tokens of a page of the KV cache of the engine that samples."""


@dataclass(frozen=True)
class RolloutConfig:
    """Rollouts: completions that the policy samples before it is updated.

    They are drawn from the model's own distribution, at temperature 1 without filters, as the loss assumes.

    Attributes:
        prompts: prompts of each batch of rollouts.
        group: completions of each prompt that an update uses.
        max_tokens: largest length of a completion in tokens; with an environment that of an episode, observations
            included.
        max_turns: with an environment: most turns of the policy in an episode.
        mesh: mesh to sample on, such as ``tensor=2``: the first devices of the run's; empty: the run's own mesh, if it
            has no stages.
        max_sequences: completions that the engine decodes at a time, on each replica of a mesh.
        max_batched_tokens: tokens of an engine's step at most, prompts included; 0: as many as sequences, at least 64.
        updates: updates with each batch of rollouts, each a step of the run; from the second on ratios differ from 1.
        max_staleness: batches of rollouts by which the weights that sample one are behind those that its first update
            changes. 0: on-policy. Otherwise rollouts are sampled in a thread while the training step runs.
        attempts: most times that prompts are drawn for one step where the algorithm replaces groups of equal rewards.
        reward_timeout: seconds that a reward function may take for one completion, and an environment for one turn; 0:
            any.
        episodes: episodes of each step that are written to episodes.jsonl; 0: all.
    """

    prompts: int = 8
    group: int = 8
    max_tokens: int = 128
    max_turns: int = 8
    mesh: str = runtime_only("")
    max_sequences: int = runtime_only(32)
    max_batched_tokens: int = runtime_only(0)
    updates: int = 1
    max_staleness: int = 0
    attempts: int = 3
    reward_timeout: float = 60.0
    episodes: int = runtime_only(0)

    def __post_init__(self) -> None:
        least = {"prompts": 1, "group": 1, "max_tokens": 1, "max_turns": 1, "max_sequences": 1, "attempts": 1}
        least |= {"updates": 1, "max_staleness": 0, "episodes": 0, "max_batched_tokens": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"rollout.{name} = {getattr(self, name)}; give {value} or more.")
        if 0 < self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"rollout.max_batched_tokens = {self.max_batched_tokens}, and each of rollout.max_sequences = "
                f"{self.max_sequences} decodes a token in a step; give as many or more, or 0 for the default."
            )
        if self.reward_timeout < 0:
            raise ValueError(f"rollout.reward_timeout = {self.reward_timeout}; give seconds, or 0 for any time.")


@dataclass(frozen=True)
class PolicyRunConfig(RunConfig):
    """Configuration of a run of reinforcement learning.

    Attributes:
        algorithm: row of ``jaxllm.posttrain.ALGORITHMS``; ``objective.options`` replace its options.
        prompts: ``arithmetic:DIGITS`` (sums of numbers, with answers), ``gym:TASK,TASK:SIZE`` (reasoning-gym's), or a
            JSONL file of records with ``prompt``, a text or messages, and whatever fields the rewards read.
        rewards: reward functions: ``NAME``, ``module:function``, each with ``=WEIGHT`` if other than 1; they are given
            all that follows the prompt. With an environment, whose own rewards are added, there may be none.
        environment: what answers the policy's turns: ``calculator``, ``python``, ``tools:module:function,...`` or
            ``module:factory``; empty: completions have one turn.
        rollout: how completions are sampled.
        gae: discount and lambda of advantages, for an algorithm with a value head (ppo).
    """

    algorithm: str = "grpo"
    prompts: str = "arithmetic:1"
    rewards: tuple[str, ...] = ("exact_answer",)
    environment: str = ""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gae: GaeConfig = field(default_factory=GaeConfig)
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig("policy"))

    loop: ClassVar[str] = "jaxllm.posttrain.policy_training:train_policy"
    loop_together: ClassVar[str] = "jaxllm.posttrain.policies_together:train_policies_together"
    own_together: ClassVar[tuple[str, ...]] = ("algorithm", "prompts", "rewards", "environment")

    def __post_init__(self) -> None:
        super().__post_init__()
        algorithm = find_algorithm(self.algorithm)
        if self.environment:
            find_environment(self.environment)
        if self.adapter and ADAPTER_METHODS[self.adapter.kind].needs_gradients:
            raise ValueError(
                f'adapter.kind = "{self.adapter.kind}" starts from the gradient of the first batch, which a policy has '
                'not before its first rollouts; choose another adapter, such as "lora".'
            )
        if dict(MeshSpec.parse(self.mesh).axes).get("stage", 1) != 1 and not self.rollout.mesh:
            raise ValueError(
                f"mesh = {self.mesh!r} has stages, over which an engine does not sample; give rollout.mesh, such as "
                "data=1 or tensor=2, over the first devices of the run."
            )
        if self.rewards or not self.environment:
            find_rewards(self.rewards)
        rollout, data = self.rollout, self.data
        if self.objective.name not in ("policy", algorithm.objective):
            raise ValueError(
                f'objective.name = "{self.objective.name}"; algorithm = "{self.algorithm}" has the objective '
                f'"{algorithm.objective}": leave the name out.'
            )
        if self.gae != GaeConfig() and not algorithm.has_values:
            able = ", ".join(name for name, one in ALGORITHMS.items() if one.has_values)
            raise ValueError(
                f"gae.gamma = {self.gae.gamma}, gae.lam = {self.gae.lam}: advantages of {self.algorithm} come from "
                f"rewards alone. Leave them out, or choose an algorithm with a value head: {able}."
            )
        if rollout.group * algorithm.oversample < 2 and algorithm.grouped:
            raise ValueError(
                f"rollout.group = 1, but {self.algorithm} compares completions of a group; give 2 or more."
            )
        if rollout.max_tokens >= data.seq_len:
            raise ValueError(
                f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a prompt in rows of data.seq_len = "
                f"{data.seq_len}; give fewer, or longer rows."
            )

    @property
    def engine_beside(self) -> EngineBeside:
        """The engine that samples rollouts: a prompt and its completion are at most a row and the token after it."""
        rollout = self.rollout
        return EngineBeside(rollout.mesh, rollout.max_sequences, self.data.seq_len + 2, PAGE)

    @property
    def completions(self) -> int:
        """Completions that one update uses."""
        return self.rollout.prompts * self.rollout.group
