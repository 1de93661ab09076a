"""One step on the device: a flat batch of prompts' pieces and decoded tokens, or several decoded tokens of each.

All that the host says to a step is one array of 32-bit numbers, all that it hears is one; in between, the tokens made
last stay on the device, so that the next step can begin before the host has seen them.

Legend: T rows of the flat batch, S requests of a step, R sequences (slots) there are, J columns of a page table, N
steps of the device's loop, V vocab, D embed, K likeliest tokens, U pieces of a mask.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.infer import sampler, shaping
from jaxllm.infer.layout import Layout
from jaxllm.infer.paged import POOL_AXES, LayerGroup, PagedCache
from jaxllm.models import Functional
from pallas_kernels.paged_attention.ragged import Ragged

STOPS = 8
"""Stop tokens of a request that the device looks for, to end its loop early; the host looks for all."""
SCORED = 64
"""Rows of a prompt whose logits are in memory at a time."""


@dataclass(frozen=True)
class Shape:
    """What a program is for.

    Attributes:
        tokens: T.
        requests: S, at most T.
        decode: T = S sequences that make ``loop`` tokens or fewer; otherwise pieces of any lengths, and one token each.
        full: with all of ``SamplingParams``; without, seed and temperature.
        slots: R.
        columns: J.
        groups: of layers.
        loop: N.
        top: K.
        real: dtype of log-probabilities.
    """

    tokens: int
    requests: int
    decode: bool
    full: bool
    slots: int
    columns: int
    groups: int
    loop: int
    top: int
    real: str

    @property
    def name(self) -> str:
        """Such as decode-16-plain."""
        return f"{'decode' if self.decode else 'prompt'}-{self.tokens}-{'full' if self.full else 'plain'}"

    @property
    def inputs(self) -> Layout:
        """What the host says.

        ``tokens`` are -1 where the device knows them; ``slots`` is R where there is no request; a ``copies`` beyond
        ``copied`` is not done; ``targets`` are the tokens to be scored, -1 for none.
        """
        s = self.requests
        fields = [
            ("tokens", (self.tokens,), "int32"),
            ("starts", (s + 1,), "int32"),
            ("kv_lens", (s,), "int32"),
            ("slots", (s,), "int32"),
            ("tables", (self.groups, s, self.columns), "int32"),
            ("copied", (self.groups,), "int32"),
            ("copies", (self.groups, s, 2), "int32"),
            ("seeds", (s,), "uint32"),
            ("temperature", (s,), "float32"),
        ]
        if self.decode:
            fields += [("steps", (), "int32"), ("stops", (s, STOPS), "int32")]
        if self.full:
            fields += [(name, (s,), "int32") for name in ("top_k", "kind", "earliest")]
            fields += [(name, (s,), "float32") for name in ("top_p", "min_p", "typical_p", *PENALTIES)]
        if self.full and not self.decode:
            fields += [("targets", (self.tokens,), "int32")]
        return Layout(tuple(fields))

    @property
    def outputs(self) -> Layout:
        """What the host hears."""
        n, s = (self.loop if self.decode else 1), self.requests
        fields = [("tokens", (n, s), "int32")]
        if self.full:
            top = (n, s, self.top)
            fields += [("logprobs", (n, s), self.real), ("top_ids", top, "int32"), ("top_logprobs", top, self.real)]
        if self.full and not self.decode:
            t, top = self.tokens, (self.tokens, self.top)
            fields += [("scores", (t,), self.real), ("ranks", (t,), "int32")]
            fields += [("prompt_ids", top, "int32"), ("prompt_top", top, self.real)]
        return Layout(tuple(fields))


Pools = tuple[Array, ...]
PENALTIES = ("repetition", "presence", "frequency")


@dataclass(frozen=True, eq=False)
class Step:
    """A step of one shape, as a pure function.

    Attributes:
        model: whose forward is run.
        groups: of its layers.
        shape: of the step.
        vocab_size: tokens from there on are never made.
        invariant: see ``PagedCache``.
    """

    model: Functional
    groups: tuple[LayerGroup, ...]
    shape: Shape
    vocab_size: int
    invariant: bool = False

    def __call__(
        self,
        params: Any,
        pools: Pools,
        last: Int[Array, " R"],
        packed: Int[Array, " numbers"],
        state: tuple[Array, ...] | None = None,
        masks: Int[Array, "S U"] | None = None,
    ) -> tuple[Any, ...]:
        """Pools and each slot's last token after the step, what the host hears, and of a full step the slots' state."""
        slots = None if state is None else shaping.State(*state)
        with sharding.use_rules(self.model.rules):
            x = self.shape.inputs.unpack(packed)
            pools = tuple(
                copied(pool, pairs, count) for pool, pairs, count in zip(pools, x["copies"], x["copied"], strict=True)
            )
            if self.shape.decode:
                return self._loop(params, pools, last, x, slots, masks)
            pools, hidden = self._forward(params, pools, self._known(last, x), x, x["kv_lens"])
            logits = self._logits(params, hidden, jnp.maximum(x["starts"][1:] - 1, 0))
            out, slots = self._choose(logits, x, x["kv_lens"], slots, masks)
            if self.shape.full:
                out |= self._scores(params, hidden, x["targets"])
            last = last.at[x["slots"]].set(out["tokens"], mode="drop")
            return self._after(pools, last, out, slots)

    def _after(self, pools: Pools, last: Array, out: dict[str, Array], state: shaping.State | None) -> tuple[Any, ...]:
        made = pools, last, self.shape.outputs.pack(out)
        return made if state is None else (*made, tuple(state))

    def _known(self, last: Int[Array, " R"], x: dict[str, Array]) -> Int[Array, " T"]:
        """The tokens of the flat batch: the host's, or each request's last one."""
        rows = jnp.arange(self.shape.tokens, dtype=jnp.int32)
        request = jnp.clip(jnp.searchsorted(x["starts"], rows, side="right") - 1, 0, self.shape.requests - 1)
        made = last[jnp.minimum(x["slots"][request], self.shape.slots - 1)]
        return jnp.where(x["tokens"] >= 0, x["tokens"], made)

    def _forward(
        self, params: Any, pools: Pools, tokens: Int[Array, " T"], x: dict[str, Array], kv_lens: Int[Array, " S"]
    ) -> tuple[Pools, Float[Array, "1 T D"]]:
        """The training forward over the flat batch."""
        tables = tuple(x["tables"])
        rows = Ragged(tables[0], x["starts"], kv_lens).tokens(self.shape.tokens)
        positions = jnp.where(rows.real, rows.position, 0)
        ctx = PagedCache(pools, tables, x["starts"], kv_lens, self.groups, self.shape.decode, self.invariant)
        hidden, ctx = self.model.forward(params, tokens[None], positions[None], ctx)
        assert isinstance(ctx, PagedCache)
        return ctx.pools, hidden

    def _logits(self, params: Any, hidden: Float[Array, "1 T D"], rows: Int[Array, " S"]) -> Float[Array, "S V"]:
        """Of some rows only."""
        found = sharding.take(hidden[0], rows[None], out=("batch", "seq", "act_embed"))
        return sharding.constrain(self.model.head(params, found)[0], None, None)

    def _choose(
        self,
        logits: Float[Array, "S V"],
        x: dict[str, Array],
        kv_lens: Int[Array, " S"],
        state: shaping.State | None,
        masks: Int[Array, "S U"] | None,
    ) -> tuple[dict[str, Array], shaping.State | None]:
        """The next token of each request, which fills the position after its last; the slots' state after it."""
        filters = (x[n] if self.shape.full else None for n in ("top_k", "top_p", "min_p", "typical_p"))
        rows = sampler.Rows(x["seeds"], kv_lens, x["temperature"], *filters)
        known = jnp.where(jnp.arange(logits.shape[1]) < self.vocab_size, logits, -jnp.inf)
        if state is None or masks is None:
            return {"tokens": sampler.sample(known, rows)}, None
        asked = shaping.Asked(x["slots"], x["kind"], kv_lens, x["earliest"], *(x[n] for n in PENALTIES))
        tokens = sampler.sample(shaping.shaped(known, state, asked, masks), rows)
        own, ids, top = sampler.logprobs(logits, tokens, self.shape.top)
        out = {"tokens": tokens, "logprobs": own, "top_ids": ids, "top_logprobs": top}
        return out, shaping.grown(state, asked, tokens)

    def _scores(self, params: Any, hidden: Float[Array, "1 T D"], targets: Int[Array, " T"]) -> dict[str, Array]:
        """Of the token after each row of a prompt log-probability and rank, and the likeliest there, if asked for."""
        t, top = targets.shape[0], self.shape.top
        size = math.gcd(SCORED, t)

        def some(i: Array) -> tuple[Array, ...]:
            rows = i * size + jnp.arange(size, dtype=jnp.int32)
            logits, wanted = self._logits(params, hidden, rows), jnp.maximum(targets[rows], 0)
            own, ids, best = sampler.logprobs(logits, wanted, top)
            return own.astype(self.shape.real), sampler.ranks(logits, wanted), ids, best.astype(self.shape.real)

        def compute() -> tuple[Array, ...]:
            found = jax.lax.map(some, jnp.arange(t // size, dtype=jnp.int32))
            return tuple(x.reshape(t, *x.shape[2:]) for x in found)

        def nothing() -> tuple[Array, ...]:
            real, ids = jnp.zeros((t, top), self.shape.real), jnp.zeros((t, top), jnp.int32)
            return real[:, 0], ids[:, 0], ids, real

        found = jax.lax.cond(jnp.any(targets >= 0), compute, nothing)
        return dict(zip(("scores", "ranks", "prompt_ids", "prompt_top"), found, strict=True))

    def _loop(
        self,
        params: Any,
        pools: Pools,
        last: Int[Array, " R"],
        x: dict[str, Array],
        state: shaping.State | None,
        masks: Int[Array, "S U"] | None,
    ) -> tuple[Any, ...]:
        """``steps`` tokens of each request, fewer if all have made one of their stop tokens."""
        last = last.at[x["slots"]].set(self._known(last, x), mode="drop")
        there = x["slots"] < self.shape.slots

        def go_on(carry: Any) -> Array:
            i, done = carry[0], carry[1]
            return (i < x["steps"]) & ~jnp.all(done)

        def one(carry: Any) -> Any:
            i, done, pools, last, state, made = carry
            tokens = last[jnp.minimum(x["slots"], self.shape.slots - 1)]
            kv_lens = jnp.where(there, x["kv_lens"] + i, 0)
            pools, hidden = self._forward(params, pools, tokens, x, kv_lens)
            logits = self._logits(params, hidden, jnp.arange(self.shape.tokens))
            out, state = self._choose(logits, x, kv_lens, state, masks)
            made = {name: made[name].at[i].set(out[name].astype(made[name].dtype)) for name in made}
            last = last.at[x["slots"]].set(out["tokens"], mode="drop")
            done = done | jnp.any(out["tokens"][:, None] == x["stops"], axis=1)
            return i + 1, done, pools, last, state, made

        made = {name: jnp.zeros(shape, dtype) for name, shape, dtype in self.shape.outputs.fields}
        carry = jnp.int32(0), ~there, pools, last, state, made
        _, _, pools, last, state, made = jax.lax.while_loop(go_on, one, carry)
        return self._after(pools, last, made, state)


def copied(
    pool: Float[Array, "L P K C W"], pairs: Int[Array, "S 2"], count: Int[Array, ""]
) -> Float[Array, "L P K C W"]:
    """The pool with ``count`` pages copied, from the first of each pair to the second, in place."""

    def one(i: Array, pool: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(pool, pairs[i, 0], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, pairs[i, 1], axis=1)

    return jax.lax.fori_loop(0, count, one, pool)


def read_pages(pool: Float[Array, "L P K C W"], pages: Int[Array, " M"]) -> Float[Array, "L M K C W"]:
    """Some pages, to be taken to the host."""
    return pool[:, jnp.minimum(pages, pool.shape[1] - 1)]


def write_pages(
    pool: Float[Array, "L P K C W"], pages: Int[Array, " M"], held: Float[Array, "L M K C W"]
) -> Float[Array, "L P K C W"]:
    """The pool with some pages as the host had them; a page that is not there is written nowhere."""
    return pool.at[:, pages].set(held, mode="drop")


def empty_pools(
    groups: tuple[LayerGroup, ...], counts: tuple[int, ...], page_size: int, dtype: str
) -> tuple[Float[Array, "..."], ...]:
    """Pools that hold nothing yet, placed by the rules in force."""
    shards = sharding.axis_size("attn_kv_heads")
    out = []
    for group, count in zip(groups, counts, strict=True):
        form = group.format(shards)
        zeros = jnp.zeros((len(group.layers), count, form.kv_heads, page_size, form.width), jnp.dtype(dtype))
        out.append(sharding.constrain(zeros, *POOL_AXES, what="pool of pages"))
    return tuple(out)


def serving_model(model: Functional) -> Functional:
    """The model with a flat batch that no mesh axis splits, and nothing kept for a backward pass."""
    from jaxllm.models import functional

    rules = model.rules.override(batch=(), seq=(), residual_seq=(), attn_seq=(), attn_kv_seq=())
    return functional(dataclasses.replace(model.config, remat="none"), rules)
