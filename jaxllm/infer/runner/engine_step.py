"""One step on the device: a flat batch of prompts' pieces and decoded tokens, or several decoded tokens of each.

All that the host says to a step is one array of 32-bit numbers, all that it hears is one; in between, the tokens made
last stay on the device, so that the next step can begin before the host has seen them.

Where a mesh has replicas, each has its own array of numbers, requests and slots, and all run one program.

Legend: B replicas, T rows of the flat batch, S requests of a step, R sequences (slots) there are, J columns of a page
table, N steps of the device's loop, V vocab, D embed, K likeliest tokens, U pieces of a mask; of pools as in ``paged``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

import sharding
from jaxllm.infer.runner import logits_processors, sampler
from jaxllm.infer.runner.packed_buffer import Layout
from jaxllm.infer.runner.paged_cache import HELD_AXES, NUMBERS, POOL_AXES, TABLES, LayerGroup, PagedCache
from jaxllm.models import Functional
from pallas_kernels.paged_attention import Slots
from pallas_kernels.paged_attention.pages import empty_slots
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


Pools = tuple[Slots, ...]
PENALTIES = ("repetition", "presence", "frequency")


class Batch(NamedTuple):
    """What the forward pass is told.

    Attributes:
        tokens, positions: of the flat batch.
        starts, kv_lens: see ``PagedCache``.
        tables: of each group.
    """

    tokens: Int[Array, "*B T"]
    positions: Int[Array, "*B T"]
    starts: Int[Array, "*B S1"]
    kv_lens: Int[Array, "*B S"]
    tables: tuple[Int[Array, "*B S J"], ...]


@dataclass(frozen=True, eq=False)
class Step:
    """A step of one shape, as a pure function.

    Attributes:
        model: whose parameters these are, and whose head is run.
        reader: the same model, whose forward is run; its rules may split the tokens of the step.
        groups: of its layers.
        shape: of the step.
        vocab_size: tokens from there on are never made.
        invariant: see ``PagedCache``.
    """

    model: Functional
    reader: Functional
    groups: tuple[LayerGroup, ...]
    shape: Shape
    vocab_size: int
    invariant: bool = False

    def __call__(
        self,
        params: Any,
        pools: Pools,
        last: Int[Array, "B R"],
        packed: Int[Array, "B numbers"],
        state: tuple[Array, ...] | None = None,
        masks: Int[Array, "B S U"] | None = None,
    ) -> tuple[Any, ...]:
        """Pools and each slot's last token after the step, what the host hears, and of a full step the slots' state."""
        slots = None if state is None else logits_processors.State(*state)
        with sharding.use_rules(self.model.rules):
            run = self._loop if self.shape.decode else self._once
            pools, last, out, slots = run(params, self._copied(pools, packed), last, packed, slots, masks)
            # Whole on every device: the host asks one of them.
            made = pools, last, sharding.constrain(out, None, None)
        return made if slots is None else (*made, tuple(slots))

    def _copied(self, pools: Pools, packed: Int[Array, "B numbers"]) -> Pools:
        """The pools with the pages copied that are to be written to and have other readers."""

        def pairs(packed: Array) -> tuple[Array, Array]:
            x = self.shape.inputs.unpack(packed)
            return x["copies"], x["copied"]

        every, counts = sharding.per_shard(pairs, "batch")(packed)
        run = sharding.shard_map(copied, (POOL_AXES, TABLES, ("batch",)), POOL_AXES, check=False)
        return tuple(
            jax.tree.map(lambda x, group=group: run(x, every[:, group], counts[:, group]), pool)
            for group, pool in enumerate(pools)
        )

    def _once(
        self,
        params: Any,
        pools: Pools,
        last: Array,
        packed: Array,
        state: logits_processors.State | None,
        masks: Array | None,
    ) -> tuple[Pools, Array, Array, logits_processors.State | None]:
        """Pieces of prompts and decoded tokens, and the token after each."""
        inputs, each = self.shape.inputs, lambda fn: sharding.per_shard(fn, "batch")

        def read(packed: Array, last: Array) -> Batch:
            x = inputs.unpack(packed)
            return self._batch(x, self._known(last, x), x["kv_lens"])

        def sampled(packed: Array, hidden: Array) -> Array:
            return hidden[jnp.maximum(inputs.unpack(packed)["starts"][1:] - 1, 0)]

        def choose(packed: Array, logits: Array, last: Array, state: Any, masks: Any, scores: dict[str, Array]) -> Any:
            x = inputs.unpack(packed)
            out, state = self._choose(logits, x, x["kv_lens"], state, masks)
            last = last.at[x["slots"]].set(out["tokens"], mode="drop")
            return last, self.shape.outputs.pack(out | scores), state

        pools, hidden = self._forward(params, pools, each(read)(packed, last))
        logits = self._logits(params, each(sampled)(packed, hidden))
        scores = self._scores(params, hidden, packed) if self.shape.full else {}
        last, out, state = each(choose)(packed, logits, last, state, masks, scores)
        return pools, last, out, state

    def _known(self, last: Int[Array, " R"], x: dict[str, Array]) -> Int[Array, " T"]:
        """The tokens of the flat batch: the host's, or each request's last one."""
        rows = jnp.arange(self.shape.tokens, dtype=jnp.int32)
        request = jnp.clip(jnp.searchsorted(x["starts"], rows, side="right") - 1, 0, self.shape.requests - 1)
        made = last[jnp.minimum(x["slots"][request], self.shape.slots - 1)]
        return jnp.where(x["tokens"] >= 0, x["tokens"], made)

    def _batch(self, x: dict[str, Array], tokens: Int[Array, " T"], kv_lens: Int[Array, " S"]) -> Batch:
        tables = tuple(x["tables"])
        rows = Ragged(tables[0], x["starts"], kv_lens).tokens(self.shape.tokens)
        return Batch(tokens, jnp.where(rows.real, rows.position, 0), x["starts"], kv_lens, tables)

    def _forward(self, params: Any, pools: Pools, batch: Batch) -> tuple[Pools, Float[Array, "B T D"]]:
        """The training forward over the flat batches."""
        tables, starts, kv_lens = batch.tables, batch.starts, batch.kv_lens
        ctx = PagedCache(pools, tables, starts, kv_lens, self.groups, self.shape.decode, self.invariant)
        with sharding.use_rules(self.reader.rules):
            tokens, positions = (sharding.constrain(x, "batch", "seq") for x in (batch.tokens, batch.positions))
        hidden, ctx = self.reader.forward(params, tokens, positions, ctx)
        assert isinstance(ctx, PagedCache)
        return ctx.pools, sharding.constrain(hidden, "batch", "residual_seq", "act_embed")

    def _logits(self, params: Any, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Of a replica's rows, all on each of its devices."""
        return sharding.constrain(self.model.head(params, hidden), "batch", None, None)

    def _choose(
        self,
        logits: Float[Array, "S V"],
        x: dict[str, Array],
        kv_lens: Int[Array, " S"],
        state: logits_processors.State | None,
        masks: Int[Array, "S U"] | None,
    ) -> tuple[dict[str, Array], logits_processors.State | None]:
        """The next token of each request, which fills the position after its last; the slots' state after it."""
        filters = (x[n] if self.shape.full else None for n in ("top_k", "top_p", "min_p", "typical_p"))
        rows = sampler.Rows(x["seeds"], kv_lens, x["temperature"], *filters)
        known = jnp.where(jnp.arange(logits.shape[1]) < self.vocab_size, logits, -jnp.inf)
        if state is None or masks is None:
            return {"tokens": sampler.sample(known, rows)}, None
        asked = logits_processors.Asked(x["slots"], x["kind"], kv_lens, x["earliest"], *(x[n] for n in PENALTIES))
        tokens = sampler.sample(logits_processors.shaped(known, state, asked, masks), rows)
        own, ids, top = sampler.logprobs(logits, tokens, self.shape.top)
        out = {"tokens": tokens, "logprobs": own, "top_ids": ids, "top_logprobs": top}
        return out, logits_processors.grown(state, asked, tokens)

    def _scores(self, params: Any, hidden: Float[Array, "B T D"], packed: Int[Array, "B numbers"]) -> dict[str, Array]:
        """Of the token after each row of a prompt log-probability and rank, and the likeliest there, if asked for."""
        t, top, real = self.shape.tokens, self.shape.top, self.shape.real
        size = math.gcd(SCORED, t)

        def score(logits: Array, wanted: Array) -> tuple[Array, ...]:
            wanted = jnp.maximum(wanted, 0)
            own, ids, best = sampler.logprobs(logits, wanted, top)
            return own.astype(real), sampler.ranks(logits, wanted), ids, best.astype(real)

        def some(i: Array) -> tuple[Array, ...]:
            rows, wanted = (jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1) for x in (hidden, targets))
            return sharding.per_shard(score, "batch")(self._logits(params, rows), wanted)

        def compute() -> tuple[Array, ...]:
            found = jax.lax.map(some, jnp.arange(t // size, dtype=jnp.int32))
            return sharding.per_shard(joined, "batch")(tuple(jnp.swapaxes(x, 0, 1) for x in found))

        def joined(found: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(x.reshape(t, *x.shape[2:]) for x in found)

        def nothing() -> tuple[Array, ...]:
            def zeros(targets: Array) -> tuple[Array, ...]:
                likely, ids = jnp.zeros((t, top), real), jnp.zeros((t, top), jnp.int32)
                return likely[:, 0], ids[:, 0], ids, likely

            return sharding.per_shard(zeros, "batch")(targets)

        targets = sharding.per_shard(lambda packed: self.shape.inputs.unpack(packed)["targets"], "batch")(packed)
        # All replicas, or none: their logits are computed together.
        found = jax.lax.cond(jnp.any(targets >= 0), compute, nothing)
        return dict(zip(("scores", "ranks", "prompt_ids", "prompt_top"), found, strict=True))

    def _loop(
        self,
        params: Any,
        pools: Pools,
        last: Array,
        packed: Array,
        state: logits_processors.State | None,
        masks: Array | None,
    ) -> tuple[Pools, Array, Array, logits_processors.State | None]:
        """``steps`` tokens of each request, fewer if all of its replica have made one of their stop tokens."""
        inputs, each = self.shape.inputs, lambda fn: sharding.per_shard(fn, "batch")
        real, slots = self.shape, self.shape.slots

        def begin(packed: Array, last: Array) -> Any:
            x = inputs.unpack(packed)
            last = last.at[x["slots"]].set(self._known(last, x), mode="drop")
            made = {name: jnp.zeros(shape, dtype) for name, shape, dtype in real.outputs.fields}
            return (jnp.int32(0), x["slots"] >= slots), last, made

        def read(packed: Array, last: Array, turn: Any) -> Batch:
            (i, done), x = turn, inputs.unpack(packed)
            there = (x["slots"] < slots) & going(x, i, done)
            return self._batch(x, last[jnp.minimum(x["slots"], slots - 1)], jnp.where(there, x["kv_lens"] + i, 0))

        def going(x: dict[str, Array], i: Array, done: Array) -> Array:
            return (i < x["steps"]) & ~jnp.all(done)

        def choose(packed: Array, logits: Array, last: Array, turn: Any, made: Any, state: Any, masks: Any) -> Any:
            (i, done), x = turn, inputs.unpack(packed)
            here = going(x, i, done)
            places = jnp.where(here, x["slots"], slots)
            kv_lens = jnp.where(places < slots, x["kv_lens"] + i, 0)
            out, state = self._choose(logits, x | {"slots": places}, kv_lens, state, masks)
            at = jnp.where(here, i, real.loop)
            made = {name: made[name].at[at].set(out[name].astype(made[name].dtype), mode="drop") for name in made}
            last = last.at[places].set(out["tokens"], mode="drop")
            done = done | jnp.any(out["tokens"][:, None] == x["stops"], axis=1)
            return (i + 1, done), last, made, state

        def go_on(carry: Any) -> Array:
            return jnp.any(each(lambda packed, turn: going(inputs.unpack(packed), *turn))(packed, carry[0]))

        def one(carry: Any) -> Any:
            turn, pools, last, made, state = carry
            pools, hidden = self._forward(params, pools, each(read)(packed, last, turn))
            logits = self._logits(params, hidden)
            turn, last, made, state = each(choose)(packed, logits, last, turn, made, state, masks)
            return turn, pools, last, made, state

        turn, last, made = each(begin)(packed, last)
        _, pools, last, made, state = jax.lax.while_loop(go_on, one, (turn, pools, last, made, state))
        return pools, last, each(self.shape.outputs.pack)(made), state


def copied(
    pool: Shaped[Array, "L P K _ _"], pairs: Int[Array, "1 S 2"], count: Int[Array, " 1"]
) -> Shaped[Array, "L P K _ _"]:
    """A replica's pool with ``count`` pages copied, from the first of each pair to the second, in place."""

    def one(i: Array, pool: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(pool, pairs[0, i, 0], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, pairs[0, i, 1], axis=1)

    return jax.lax.fori_loop(0, count[0], one, pool)


def read_pages(rules: sharding.Rules, pool: Slots, pages: Int[Array, "B M"]) -> Slots:
    """Some pages of one replica, to be taken to the host; the others are told of pages that are not there."""

    def local(pool: Array, pages: Array) -> Array:
        here = (pages[0] < pool.shape[1])[:, None, None, None]
        found = jnp.where(here, pool[:, jnp.minimum(pages[0], pool.shape[1] - 1)], 0)
        return jax.lax.psum(found, replicas) if replicas else found

    with sharding.use_rules(rules):
        replicas = sharding.axis_names("batch")
        run = sharding.shard_map(local, (POOL_AXES, NUMBERS), HELD_AXES)
        return jax.tree.map(lambda x: sharding.constrain(run(x, pages), *(None,) * 5), pool)


def write_pages(rules: sharding.Rules, pool: Slots, pages: Int[Array, "B M"], held: Slots) -> Slots:
    """The pool with some pages as the host had them; a page that is not there is written nowhere."""

    def local(pool: Array, pages: Array, held: Array) -> Array:
        return pool.at[:, pages[0]].set(held, mode="drop")

    with sharding.use_rules(rules):
        run = sharding.shard_map(local, (POOL_AXES, NUMBERS, HELD_AXES), POOL_AXES)
        return jax.tree.map(lambda x, more: run(x, pages, more), pool, held)


def seat(rules: sharding.Rules, state: tuple[Array, ...], packed: Int[Array, "B numbers"]) -> tuple[Array, ...]:
    """``shaping.seat`` in each replica; a slot that is not there is left out."""
    with sharding.use_rules(rules):
        return sharding.per_shard(logits_processors.seat, "batch")(state, packed)


def empty_pools(
    rules: sharding.Rules, groups: tuple[LayerGroup, ...], counts: tuple[int, ...], page_size: int
) -> Pools:
    """Pools that hold nothing yet, placed by the rules; ``counts`` are of a replica."""
    with sharding.use_rules(rules):
        shards, replicas = sharding.axis_size("attn_kv_heads"), sharding.axis_size("batch")
        pools = (
            empty_slots(
                group.format(shards), layers=len(group.layers), pages=replicas * count, page_size=page_size,
                dtype=group.plain,
            )
            for group, count in zip(groups, counts, strict=True)
        )  # fmt: skip
        return jax.tree.map(lambda x: sharding.constrain(x, *POOL_AXES, what="pool of pages"), tuple(pools))
