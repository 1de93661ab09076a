"""What an engine is built for: how many sequences, how many tokens a step, how much memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Sampler = Literal["plain", "full"]
KvDtype = Literal["auto", "bfloat16", "int8", "fp8"]


@dataclass(frozen=True)
class EngineConfig:
    """An engine's sizes. Every program is compiled before the first request, for these and no others.

    Attributes:
        sequences: how many are worked on at a time; more wait.
        budget: tokens of a step: one of each sequence that writes, the rest for prompts.
        max_len: tokens of a sequence, prompt included; None: what the model was trained to read.
        page_size: positions of a page; None: a page holds a whole sequence, whose keys and values then lie in one
            piece, for few and long sequences (the case of vAttention, arXiv:2405.04437).
        pages: of the pool of layers without a window; None: what the device's memory has room for, see ``Engine``.
        buckets: numbers of tokens that steps with prompts are padded to; the largest is the budget. None: four times as
            many as the one before.
        loop: tokens a sequence makes on the device before the host looks, while nobody waits.
        prefix_cache: requests that begin alike share what was computed.
        preemption: what happens to a sequence that gives way: "recompute" it later, or "swap" it to the host.
        batch_invariant: the same bits for a request whatever its neighbours: one program for all steps, prompts cut at
            fixed places.
        samplers: which are compiled: "plain" (temperature, seed), "full" (filters and log-probabilities too).
        top_logprobs: the largest ``SamplingParams.logprobs``.
        kv_dtype: of keys and values in pages: "auto": what the model computes in; "bfloat16"; "int8" or "fp8"
            (float8_e4m3fn) with a float32 scale for each token's key and one for its value, of each kv head.
    """

    sequences: int = 16
    budget: int = 256
    max_len: int | None = None
    page_size: int | None = 32
    pages: int | None = None
    buckets: tuple[int, ...] | None = None
    loop: int = 8
    prefix_cache: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    batch_invariant: bool = False
    samplers: tuple[Sampler, ...] = ("plain", "full")
    top_logprobs: int = 5
    kv_dtype: KvDtype = "auto"

    def __post_init__(self) -> None:
        for name in ("sequences", "budget", "max_len", "page_size", "pages", "loop"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"engine: {name} = {value}; give 1 or more.")
        if self.budget < self.sequences:
            raise ValueError(
                f"engine: budget = {self.budget} tokens a step do not serve {self.sequences} sequences; every one of "
                "them makes a token a step."
            )
        if self.top_logprobs < 1:
            raise ValueError(f"engine: top_logprobs = {self.top_logprobs}; give 1 or more.")
        if not self.samplers or not set(self.samplers) <= {"plain", "full"}:
            raise ValueError(f"engine: samplers = {self.samplers}; choose of ('plain', 'full').")
        if self.preemption not in ("recompute", "swap"):
            raise ValueError(f"engine: preemption = {self.preemption!r}; choose 'recompute' or 'swap'.")
        if self.kv_dtype not in get_args(KvDtype):
            raise ValueError(f"engine: kv_dtype = {self.kv_dtype!r}; choose of {get_args(KvDtype)}.")
        if self.buckets is not None and (
            list(self.buckets) != sorted(set(self.buckets)) or not self.buckets or self.buckets[-1] != self.budget
            or self.buckets[0] < 1
        ):  # fmt: skip
            raise ValueError(
                f"engine: buckets = {self.buckets}; give numbers of tokens, rising, the last of them the budget "
                f"({self.budget})."
            )
        if self.batch_invariant:
            self._check_invariant()

    def _check_invariant(self) -> None:
        if self.preemption != "swap":
            raise ValueError(
                "engine: batch_invariant needs preemption = 'swap': what is computed again differs in bits."
            )
        if self.samplers != ("full",):
            raise ValueError("engine: batch_invariant needs samplers = ('full',): one program for all.")
        if self.buckets not in (None, (self.budget,)) or self.loop != 1:
            raise ValueError("engine: batch_invariant needs loop = 1 and no buckets: one program for all.")
        if self.piece is not None and self.piece < 1:
            raise ValueError(
                f"engine: batch_invariant with {self.sequences} sequences needs a budget of {self.sequences} and a "
                f"page ({self.page_size or 1} tokens) or more, not {self.budget}."
            )

    @property
    def piece(self) -> int | None:
        """Where prompts are cut in batch-invariant mode: at multiples of this. None: wherever it suits."""
        if not self.batch_invariant:
            return None
        size = self.page_size or 1
        return (self.budget - self.sequences) // size * size

    @property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Tokens of the programs for steps with prompts."""
        if self.batch_invariant:
            return (self.budget,)
        if self.buckets is not None:
            return self.buckets
        sizes = [self.budget]
        while sizes[0] > 64:
            sizes.insert(0, max(16, -(-sizes[0] // 4)))
        return tuple(sizes)

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Sequences of the programs for steps that only decode."""
        if self.batch_invariant:
            return ()
        sizes = [1]
        while sizes[-1] < self.sequences:
            sizes.append(min(2 * sizes[-1], self.sequences))
        return tuple(sizes)
