"""Rollouts: completions by the engine, each token with its log-probability under the policy that sampled it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxllm.files import cache_root
from jaxllm.infer.engine import sequence as engine_sequence
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.sampling_params import SEEDS, SamplingParams
from jaxllm.models import Functional
from jaxllm.posttrain.prompts import Prompt
from jaxllm.text import Tokenizer


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
    """

    def __init__(
        self, model: Functional, params: Any, tokenizer: Tokenizer, mesh: Any, longest: int, max_sequences: int
    ):
        page = 32
        budget = max(64, max_sequences)
        sizes = EngineConfig(
            max_sequences=max_sequences,
            max_batched_tokens=budget,
            max_len=-(-(longest + 1) // page) * page,
            page_size=page,
            buckets=(budget,),
            samplers=("full",),
            pages=max_sequences * -(-(longest + 1) // page) + 1,
            top_logprobs=1,
        )
        kept = cache_root("") / "engine"
        self.engine = Engine.of(model, params, sizes, tokenizer=tokenizer, mesh=mesh, manifest=kept, strict=True)

    def swap(self, params: Any) -> None:
        """Replaces the weights; nothing is compiled."""
        self.engine.swap(params)

    def sample(self, prompts: list[Prompt], count: int, max_tokens: int, seed: int) -> list[list[Rollout]]:
        """``count`` rollouts of each prompt.

        Args:
            prompts: of a step.
            count: completions of each.
            max_tokens: largest length of a completion.
            seed: RNG seed of the step; each completion has its own, which depends on the seed and its place alone.
        """
        requests = [
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
            for prompt, sequences in zip(prompts, self.complete(requests), strict=True)
        ]

    def complete(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> list[list[engine_sequence.Sequence]]:
        """Completions of prompts, each with its own parameters, once all have ended."""
        running = [self.engine.submit(ids, params) for ids, params in requests]
        while any(sequence.finish is None for request in running for sequence in request.sequences):
            self.engine.step()
        return [list(request.outputs) for request in running]


def derived_seed(*parts: int) -> int:
    """RNG seed that depends on numbers alone, in the range that the engine takes."""
    return zlib.crc32(np.asarray(parts, np.int64).tobytes()) % SEEDS


def one_device(mesh: jax.sharding.Mesh) -> bool:
    """Whether a mesh has one device, on which an engine needs no mesh."""
    return mesh.size == 1
