"""Baselines of eviction: as many entries as a rule keeps, chosen at random or the most recent, and what they cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import corpus
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.infer.kv_cache_options import with_kv_cache
from jaxllm.infer.runner.paged_cache import RETENTION_RULES, retention_rule
from jaxllm.infer.runner.retention.pyramid import Pyramid
from tests import environment

ROW, CHUNK = 512, 64
"""Tokens of a text, and of an interval, after each of which entries leave."""


@dataclass(frozen=True)
class SameNumber:
    """Keeps as many entries as a rule of fixed budgets in each layer and kv head, the most recent ones among them.

    Attributes:
        rule: the other rule.
        seed: of the random choice; None: the most recent entries are kept.
    """

    rule: Any
    seed: int | None = None

    @classmethod
    def of(cls, argument: str) -> SameNumber:
        """Rule of ``random:SEED:RULE`` or ``recent:RULE``, without the name."""
        first, _, rest = argument.partition(":")
        return cls(retention_rule(rest), int(first)) if first.isdecimal() else cls(retention_rule(argument))

    interval = property(lambda self: self.rule.interval)
    observed = property(lambda self: self.rule.observed)
    reduce = property(lambda self: self.rule.reduce)
    forgets = property(lambda self: self.rule.forgets)

    def of_part(self, part: int, parts: int) -> SameNumber:
        """The baseline of the other rule's rule for a part."""
        return SameNumber(self.rule.of_part(part, parts), self.seed) if hasattr(self.rule, "of_part") else self

    def keep(self, entries: Any, query: Any) -> Any:
        return self.rule.keep(entries, query)

    def capacity(self, length: int) -> int:
        return self.rule.capacity(length)

    def observe(self, weights: Any, queries: Any) -> Any:
        return self.rule.observe(weights, queries)

    def choose(self, scores: Any, entries: Any, used: Any, length: Any) -> Any:
        count = jnp.sum(used & self.rule.choose(scores, entries, used, length), axis=1, keepdims=True)
        order = entries.astype(jnp.float32)
        if self.seed is not None:
            # Layers have other scores, and so other random numbers.
            salt = jax.lax.bitcast_convert_type(jnp.sum(scores, dtype=jnp.float32), jnp.uint32)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), salt), length)
            order = jnp.where(entries >= length - self.rule.recent, 2.0, jax.random.uniform(key, entries.shape))
        order = jnp.where(used, order, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-order, axis=1, stable=True), axis=1)
        return rank < count


@dataclass(frozen=True)
class Uniform(Pyramid):
    """Pyramid whose layers all keep the same share."""

    slope: float = 0.0


RETENTION_RULES["uniform"] = Uniform()
RETENTION_RULES["random"] = RETENTION_RULES["recent"] = SameNumber(RETENTION_RULES["pyramid"])


@dataclass(frozen=True)
class Quality:
    """What a rule costs: mean NLL behind the second interval, and the most bytes of pages that a text held."""

    nll: float
    bytes: int


@functools.cache
def engine_of(keep: str) -> LLM:
    """SmolLM2 with a KV cache of a rule."""
    sizes = EngineConfig(
        max_sequences=1, max_batched_tokens=CHUNK, max_len=ROW + 32, page_size=16, buckets=(CHUNK,), samplers=("full",),
        decode_steps=1, prefix_cache=False,
    )  # fmt: skip
    return LLM(
        "smollm2", with_kv_cache(sizes, "auto", keep), manifest=environment.ROOT / ".cache" / "jaxllm" / "engine"
    )


@functools.cache
def quality(keep: str, seed: int) -> Quality:
    """Quality of a rule on a text of the held-out plays, another one for each seed."""
    llm = engine_of(keep)
    ids = llm.ids(corpus.path("heldout").read_text("utf-8")[: 8 * ROW * (seed + 1)])
    text = ids[seed * ROW : (seed + 1) * ROW]
    assert len(text) == ROW
    spec, scheduler, held = llm.engine.runner.spec, llm.engine.scheduler, 0
    request = llm.engine.submit(text, SamplingParams(max_tokens=1, prompt_logprobs=0))
    while llm.engine.busy:
        llm.engine.step()
        for sequence in scheduler.running:
            pages = zip(spec.tables, sequence.pages, strict=True)
            held = max(held, sum(len(own) * spec.groups[group].page_bytes(spec.page_size) for group, own in pages))
    return Quality(-float(np.mean([score for score, _ in request.text_scores[2 * CHUNK :]])), held)
