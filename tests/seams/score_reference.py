"""Plain reference of a retention rule that chooses by scores: a whole sequence, one interval after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.retention import ScoreRule, observes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScoreReference:
    """Attention context of one sequence.

    Attributes:
        rules: rule of each layer without a sliding window, by its number; the same for all if there is one.
        heads: retaining heads whose scores entries begin with; None: zeros.
    """

    rules: tuple[Any, ...] = field(metadata={"static": True})
    heads: Any = None
    is_kv_cache: ClassVar[bool] = True

    def attend(
        self, layer: Any, q: Any, k: Any, v: Any, positions: Any, params: Any, sinks: Any = None
    ) -> tuple[Any, ScoreReference]:
        begin = None if self.heads is None else self.heads.score(layer, q, k, v)[0].T
        if len(self.rules) == 1 or params.window is not None:
            return attend(self.rules[0], q, k, v, params, sinks, begin), self
        each = [lambda rule=rule: attend(rule, q, k, v, params, sinks, begin) for rule in self.rules]
        return jax.lax.switch(layer, each), self

    def is_fresh_prefill(self, positions: Any) -> None:
        return None


def attend(rule: ScoreRule, q: Any, k: Any, v: Any, params: Any, sinks: Any, begin: Any = None) -> Any:
    """Attention output of a layer; queries of an interval find the entries that the evictions before it have left."""
    (_, s, n, h), kv = q.shape, k.shape[2]
    scored, grouped = params.window is None, q[0].reshape(s, kv, n // kv, h)
    values = k[0, ..., : params.latent] if v is None else v[0]
    entries = jnp.arange(s)
    there, marks = jnp.ones((kv, s), bool), jnp.zeros((kv, s), jnp.float32)
    marks = marks if begin is None else begin.astype(jnp.float32)
    out = []
    for first in range(0, s, rule.interval):
        query = jnp.arange(first, min(first + rule.interval, s))
        if scored and first:
            used = there & (entries < first)
            stays = used & rule.choose(marks, jnp.broadcast_to(entries, used.shape), used, jnp.int32(first))
            there = stays | (entries >= first)
            marks = jnp.zeros_like(marks) if rule.forgets else marks
        seen = there[:, None] & (entries <= query[:, None])
        if not scored:
            seen &= entries > query[:, None] - params.window
        scores = jnp.einsum("qkgh,skh->kgqs", grouped[first : first + rule.interval], k[0]) * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.reshape(kv, -1, 1, 1), (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, sink], axis=3)
        weights = jax.nn.softmax(scores, axis=-1)[..., :s]
        out.append(jnp.einsum("kgqs,skv->qkgv", weights, values).reshape(len(query), n, -1))
        if not rule.observed:
            continue
        found = rule.observe(weights, query[:, None])
        found = jnp.where((observes(rule, query)[:, None]) & seen[:, None], found, 0.0)
        found = found.reshape(kv, -1, s)
        if rule.reduce == "max":
            marks = jnp.maximum(marks, found.max(1).astype(jnp.float32))
        else:
            marks = marks + found.sum(1).astype(jnp.float32)
    return jnp.concatenate(out)[None]
