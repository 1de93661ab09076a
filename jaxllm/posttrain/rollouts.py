"""Rollouts: completions by the engine, each token with its log-probability under the policy that sampled it.

What a policy samples in a step is a generator that yields requests and is sent their completions, so that one engine
can serve those of several policies at once, each with an adapter of its own, without threads.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.files import cache_root
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.sampling_params import SEEDS, SamplingParams
from jaxllm.infer.scheduling import sequence as engine_sequence
from jaxllm.models import Functional
from jaxllm.peft.adapter import Adapter
from jaxllm.posttrain.policy_config import PAGE
from jaxllm.posttrain.prompts import Prompt
from jaxllm.text import Tokenizer
from sharding import MeshSpec

Requests = Sequence[tuple[Sequence[int], SamplingParams]]
"""Prompts, each with its sampling parameters."""
Completions = list[list[engine_sequence.Sequence]]
"""Completions of each prompt of ``Requests``, all ended."""
Found = TypeVar("Found")
Sampling = Generator[Requests, Completions, Found]
"""Sampling of a policy: yields the requests that it needs next, is sent their completions, returns what it found."""


@dataclass(frozen=True)
class Rollout:
    """Completion of a prompt, or an episode of several turns with an environment.

    Attributes:
        prompt: what it completes.
        tokens: tokens after the prompt: generated ones, the one that ended it included, and an environment's.
        logprobs: log-probability of each; 0 for those of an environment.
        versions: version of the weights that sampled each: the step, counted from 1, that they were sampled for.
        text: the completion as text, without the end-of-text token.
        finish: "stop" or "length"; of an episode also "turns", it had as many as it may, or "error".
        written: whether the policy wrote each token; empty: all.
        turns: turns of the policy.
        calls, flaws: tool calls, and how many of them failed.
        environment_reward: sum of the environment's rewards; None: there was no environment.
        failure: why the environment failed; empty: it did not.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish: str
    written: tuple[bool, ...] = ()
    turns: int = 1
    calls: int = 0
    flaws: int = 0
    environment_reward: float | None = None
    failure: str = ""

    @property
    def is_written(self) -> tuple[bool, ...]:
        """Whether the policy wrote each token."""
        return self.written or (True,) * len(self.tokens)


class RolloutEngine:
    """Engine that samples rollouts with the weights of the policy; compiled once, before the first rollout.

    Args:
        model, params: architecture and weights, without adapters.
        tokenizer: of the model.
        mesh: mesh to sample on; None: one device.
        longest: most tokens of a prompt and its completion.
        max_sequences: completions at a time.
        adapters: number of policies that are adapters of the weights; 0: the weights are the policy.
        rank: largest rank of these.
        batched_tokens: see ``rollout_engine_config``.
    """

    def __init__(
        self,
        model: Functional,
        params: Any,
        tokenizer: Tokenizer,
        mesh: Any,
        longest: int,
        max_sequences: int,
        *,
        adapters: int = 0,
        rank: int = 1,
        batched_tokens: int = 0,
    ):
        sizes = rollout_engine_config(max_sequences, longest + 1, adapters, rank, batched_tokens)
        kept = cache_root("") / "engine"
        self.engine = Engine.of(model, params, sizes, tokenizer=tokenizer, mesh=mesh, manifest=kept, strict=True)

    def swap(self, params: Any, version: int) -> None:
        """Replaces the weights by those that sample for step ``version``, counted from 1; nothing is compiled."""
        self.engine.swap(params)
        self.engine.version = version

    def swap_adapters(self, adapters: Mapping[str, Adapter], version: int) -> None:
        """Replaces the adapters of policies, by name; the weights stay, and nothing is compiled."""
        self.engine.swap(adapter=adapters)
        self.engine.version = version

    def run(self, sampling: Sampling[Found]) -> Found:
        """Result of a policy's sampling, with the weights as they are."""
        return self.run_together({None: sampling})[None]

    def run_together(self, samplings: Mapping[str | None, Sampling[Found]]) -> dict[str | None, Found]:
        """Result of each policy's sampling; their requests share the engine's steps.

        Which requests share a step depends on the requests alone, and not on how long rewards or environments take.

        Args:
            samplings: by the name of the policy's adapter; None: the weights as they are.
        """
        found: dict[str | None, Found] = {}
        running: dict[str | None, list[engine_sequence.Request]] = {}

        def go_on(name: str | None, completions: Completions | None) -> None:
            """Gives a policy the completions that it waits for, and submits what it asks for next."""
            sampling = samplings[name]
            try:
                requests = next(sampling) if completions is None else sampling.send(completions)
            except StopIteration as end:
                found[name] = end.value
                return
            running[name] = [self.engine.submit(ids, params, adapter=name) for ids, params in requests]

        for name in samplings:
            go_on(name, None)
        while running:
            ended = [name for name, requests in running.items() if all(map(_has_ended, requests))]
            for name in ended:
                go_on(name, [list(request.outputs) for request in running.pop(name)])
            if not ended:
                self.engine.step()
        return found


def sampled(prompts: list[Prompt], count: int, max_tokens: int, seed: int) -> Sampling[list[list[Rollout]]]:
    """``count`` rollouts of each prompt, of one turn.

    Args:
        prompts: of a step.
        count: completions of each.
        max_tokens: largest length of a completion.
        seed: RNG seed of the step; each completion has its own, which depends on the seed and its place alone.
    """
    completions = yield [
        (prompt.ids, SamplingParams(max_tokens=max_tokens, logprobs=0, n=count, seed=derived_seed(seed, place)))
        for place, prompt in enumerate(prompts)
    ]
    return [
        [
            Rollout(
                prompt,
                tuple(sequence.tokens[len(prompt.ids) :]),
                tuple(sequence.logprobs),
                tuple(sequence.versions),
                sequence.text,
                str(sequence.finish),
            )
            for sequence in sequences
        ]
        for prompt, sequences in zip(prompts, completions, strict=True)
    ]


def _has_ended(request: engine_sequence.Request) -> bool:
    return all(sequence.finish is not None for sequence in request.sequences)


def derived_seed(*parts: int) -> int:
    """RNG seed that depends on numbers alone, in the range that the engine takes."""
    return zlib.crc32(np.asarray(parts, np.int64).tobytes()) % SEEDS


def rollout_engine_config(
    sequences: int, tokens: int, adapters: int = 0, rank: int = 1, batched_tokens: int = 0
) -> EngineConfig:
    """Sizes of an engine for rollouts: all sequences may have their largest length, and its programs are few.

    Args:
        sequences: sequences of a replica at a time.
        tokens: most tokens of a sequence, and one more.
        adapters: number of policies that are adapters; 0: none.
        rank: largest rank of these.
        batched_tokens: tokens of a step at most; 0: see ``RolloutConfig.max_batched_tokens``.
    """
    columns, budget = -(-tokens // PAGE), batched_tokens or max(64, sequences)
    return EngineConfig(
        max_sequences=sequences,
        max_batched_tokens=budget,
        max_len=columns * PAGE,
        page_size=PAGE,
        buckets=(budget,),
        samplers=("full",),
        pages=sequences * columns + 1,
        top_logprobs=1,
        adapter_slots=adapters,
        adapter_rank=rank,
    )


def rollout_mesh(text: str, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh | None:
    """Mesh that rollouts are sampled on; None for one device, on which an engine needs no mesh.

    Args:
        text: axes such as ``tensor=2``, over the first devices of ``mesh``; empty: ``mesh`` itself.
        mesh: of the training step.

    Raises:
        ConfigError: it has more devices than ``mesh``.
        ShardingError: it cannot be parsed, or leaves a size open that does not divide.
    """
    if not text:
        return None if mesh.size == 1 else mesh
    spec = MeshSpec.parse(text)
    count = math.prod(size for _, size in spec.axes)
    if not 0 < count <= mesh.size:
        raise ConfigError(
            f'rollout.mesh = "{text}" has {count} devices, and the run has {mesh.size}: rollouts are sampled on the '
            "devices of the run, or on some of them; give every axis a size, and fewer devices."
        )
    return None if count == 1 else spec.build(list(mesh.devices.flat[:count]))
