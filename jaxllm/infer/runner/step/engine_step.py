"""Engine step on the device: one program for a flat batch of prefill chunks and decode tokens.

Decode-only steps run a loop that decodes several tokens of each sequence.

The host sends one packed array of 32-bit elements per step and gets one back. The last token of each slot stays on the
device, so that the next step can start before the host has read the result of this one.

If a mesh has data-parallel replicas, each has its own packed array, requests and slots, and all run the same program.

Legend: B replicas, T rows of the flat batch, S requests of a step, R slots (running sequences), J columns of a page
table, N decode steps per call, V vocab, D embed, K top log-probabilities, U 32-bit words of a token mask, E of a tree
mask, G last rows of a request; pools as in
``paged_cache``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.infer.runner import logits_processors, sampler
from jaxllm.infer.runner.adapted_weight import with_rows
from jaxllm.infer.runner.kv_span import span_axes
from jaxllm.infer.runner.page_programs import Pools, clear_fresh_pages, copy_pages, keep_branch
from jaxllm.infer.runner.paged_cache import PER_REQUEST, POOL_AXES, TABLES, LayerGroup, PagedCache
from jaxllm.infer.runner.retention.eviction import RETAINING_HEADS, evict_entries
from jaxllm.infer.runner.step.step_halves import forward_in_halves
from jaxllm.infer.runner.step.step_shape import PENALTIES, StepShape
from jaxllm.infer.runner.step.verification import last_rows, likeliest, sample_proposed, sample_tree
from jaxllm.models import Functional
from jaxllm.models.retaining_heads import RetainingHeads
from pallas_kernels.paged_attention import Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch
from pallas_kernels.paged_attention.tree_mask import TreeMask

SCORED_ROWS = 64
"""Rows of a prompt whose logits are in memory at a time, for prompt log-probabilities."""


class StepBatch(NamedTuple):
    """Inputs of the forward pass.

    Attributes:
        tokens, positions: token ids and positions of the flat batch.
        starts, kv_lens: see ``PagedCache``.
        tables: page table of each group of layers.
        columns: see ``PagedCache``.
        adapters: arguments of ``with_rows``; None in an engine without adapters.
        rings, tree, shared, prompts: see ``PagedCache``.
    """

    tokens: Int[Array, "*B T"]
    positions: Int[Array, "*B T"]
    starts: Int[Array, "*B S1"]
    kv_lens: Int[Array, "*B S"]
    tables: tuple[Int[Array, "*B S J"], ...]
    columns: tuple[Int[Array, "*B S"] | None, ...] | None = None
    adapters: tuple[Array, ...] | None = None
    rings: tuple[Int[Array, "*B S"], Int[Array, "*B S"]] | None = None
    tree: tuple[Int[Array, "*B T E"], Int[Array, "*B S"]] | None = None
    shared: tuple[Int[Array, "*B S"], ...] | None = None
    prompts: Int[Array, "*B S"] | None = None


@dataclass(frozen=True, eq=False)
class EngineStep:
    """Engine step of one shape, as a pure function.

    Attributes:
        model: served model; its head computes the logits.
        forward_model: the same model, for the forward pass; its rules may shard the step's tokens.
        groups: groups of the model's layers.
        shape: shape of the step.
        vocab_size: tokens from here on are never sampled.
        invariant: see ``PagedCache``.
    """

    model: Functional
    forward_model: Functional
    groups: tuple[LayerGroup, ...]
    shape: StepShape
    vocab_size: int
    invariant: bool = False

    def __call__(
        self,
        params: Any,
        pools: Pools,
        last: Int[Array, "B R"],
        packed: Int[Array, "B elements"],
        state: tuple[Array, ...] | None = None,
        masks: Int[Array, "B S U"] | None = None,
    ) -> tuple[Any, ...]:
        """Runs the step.

        Returns:
            the pools, each slot's last token, the packed outputs; with the full sampler its slot state too.
        """
        slots = None if state is None else logits_processors.LogitsState(*state)
        with sharding.use_rules(self.model.rules):
            run = self._decode_loop if self.shape.decode else self._prefill_step
            pools, features = (pools[:-1], pools[-1].data) if self.shape.features else (pools, None)
            pools, evictions = self.prepare_pages(pools, packed)
            pools, last, out, slots, features = run(params, pools, last, packed, slots, masks, evictions, features)
            pools = pools if features is None else (*pools, Slots(features))
            # Replicated on every device: the host reads it from one of them.
            outputs = pools, last, sharding.constrain(out, None, None)
        return outputs if slots is None else (*outputs, tuple(slots))

    def prepare_pages(self, pools: Pools, packed: Int[Array, "B elements"]) -> tuple[Pools, dict[str, Array]]:
        """Copies the shared pages that the step is going to write to (copy-on-write), empties new ones, and evicts.

        Returns:
            the pools, and what has been evicted, as an output of the step; nothing without a rule by scores.
        """
        tables = tuple(i for i, group in enumerate(self.groups) for _ in range(group.parts))

        def pairs(packed: Array) -> tuple[Array, Array]:
            x = self.shape.inputs.unpack(packed)
            return x["copies"], x["copied"]

        every, counts = sharding.per_shard(pairs, "batch")(packed)
        copy = functools.partial(copy_pages, span=span_axes())
        run = sharding.shard_map(copy, (POOL_AXES, TABLES, ("batch",)), POOL_AXES, check=False)
        pools = tuple(
            jax.tree.map(lambda x, one=one: run(x, every[:, one], counts[:, one]), pool.in_pages())._replace(
                recent=pool.recent
            )
            for one, pool in zip(map(tables.index, range(len(pools))), pools, strict=True)
        )
        if not self.shape.retained:
            return pools, {}
        pools = clear_fresh_pages(pools, packed, self.shape, tables)
        return evict_entries(pools, packed, self.shape, self.groups) if self.shape.evicts else (pools, {})

    def _prefill_step(
        self,
        params: Any,
        pools: Pools,
        last: Array,
        packed: Array,
        state: logits_processors.LogitsState | None,
        masks: Array | None,
        evictions: dict[str, Array],
        features: Float[Array, "R L D"] | None,
    ) -> tuple[Pools, Array, Array, logits_processors.LogitsState | None, Array | None]:
        """Runs prefill chunks and decode tokens as one flat batch; samples after the last row, or rows, of each."""
        batch = self.flat_batch(packed, last)
        pools, hidden = self._forward(params, pools, batch)
        features = self._keep_features(features, packed, batch, hidden)
        last, out, state, branch = self.sample_rows(params, hidden, last, packed, state, masks, evictions)
        return self.keep_branches(pools, packed, branch), last, out, state, features

    def flat_batch(self, packed: Int[Array, "B elements"], last: Int[Array, "B R"]) -> StepBatch:
        """Inputs of the forward pass of a step with prefill."""

        def read(packed: Array, last: Array) -> StepBatch:
            x = self.shape.inputs.unpack(packed)
            return self._step_batch(x, self._input_tokens(last, x), x["kv_lens"])

        return sharding.per_shard(read, "batch")(packed, last)

    def sample_rows(
        self,
        params: Any,
        hidden: Float[Array, "B T D"],
        last: Int[Array, "B R"],
        packed: Int[Array, "B elements"],
        state: logits_processors.LogitsState | None,
        masks: Int[Array, "B S U"] | None,
        evictions: dict[str, Array],
    ) -> tuple[Array, Array, logits_processors.LogitsState | None, Array | None]:
        """Samples after the last row, or rows, of each request of a step with prefill.

        Args:
            hidden: results of the forward pass.
            evictions: further outputs of the step, see ``prepare_pages``.

        Returns:
            each slot's last token, the packed outputs, the slot state of the full sampler, and the accepted branches,
            see ``keep_branches``.
        """
        inputs, each = self.shape.inputs, lambda fn: sharding.per_shard(fn, "batch")

        def sampled(packed: Array, hidden: Array) -> Array:
            return last_rows(hidden, inputs.unpack(packed)["starts"][1:], self.shape.rows)

        def choose(packed: Array, logits: Array, last: Array, state: Any, masks: Any, scores: dict[str, Array]) -> Any:
            x, branch = inputs.unpack(packed), None
            with jax.named_scope("sample"):
                if self.shape.branches:
                    known = jnp.where(jnp.arange(logits.shape[1]) < self.vocab_size, logits, -jnp.inf)
                    out, tokens = likeliest(known, self.shape)
                elif self.shape.tree_words:
                    out, tokens, state, branch = sample_tree(self._sample, self.shape.rows, logits, x, state, masks)
                elif self.shape.verifies:
                    out, tokens, state = sample_proposed(
                        self._sample, self.shape.rows, logits, x, state, masks, every_row=self.shape.every_row
                    )
                else:
                    out, state = self._sample(logits, x, x["kv_lens"], state, masks)
                    tokens = out["tokens"]
            last = last.at[x["slots"]].set(tokens, mode="drop")
            return last, self.shape.outputs.pack(out | scores), state, branch

        logits = self._logits(params, each(sampled)(packed, hidden))
        scores = (self._prompt_scores(params, hidden, packed) if self.shape.full else {}) | evictions
        return each(choose)(packed, logits, last, state, masks, scores)

    def _keep_features(
        self, features: Float[Array, "R L D"] | None, packed: Array, batch: StepBatch, hidden: Float[Array, "B T D"]
    ) -> Float[Array, "R L D"] | None:
        """Writes the hidden states of a step's tokens to their slots, of one replica; None: none are kept."""
        if features is None:
            return None
        x = self.shape.inputs.unpack(packed[0])
        rows = RaggedBatch(batch.tables[0][0], batch.starts[0], batch.kv_lens[0]).tokens(hidden.shape[1])
        slots = jnp.where(rows.real & (rows.position >= 0), x["slots"][rows.request], features.shape[0])
        return features.at[slots, rows.position].set(hidden[0].astype(features.dtype), mode="drop")

    def keep_branches(
        self, pools: Pools, packed: Int[Array, "B elements"], branch: Int[Array, "B S G"] | None
    ) -> Pools:
        """Moves the keys and values of the accepted branches to where plain decoding has them; None: there are none."""
        if branch is None:
            return pools

        def read(packed: Array) -> tuple[Array, Array]:
            x = self.shape.inputs.unpack(packed)
            return x["tables"], x["tree_first"] - 1

        tables, first = sharding.per_shard(read, "batch")(packed)

        def moved(pool: Array, table: Array, axis: int) -> Array:
            axes = POOL_AXES, TABLES, PER_REQUEST, TABLES
            run = sharding.shard_map(functools.partial(keep_branch, axis=axis), axes, POOL_AXES, check=False)
            return run(pool, table, first, branch)

        return tuple(
            Slots(
                moved(pool.data, tables[:, i], 3), None if pool.scales is None else moved(pool.scales, tables[:, i], 4)
            )
            for i, pool in enumerate(pools)
        )

    def _input_tokens(self, last: Int[Array, " R"], x: dict[str, Array]) -> Int[Array, " T"]:
        """Token ids of the flat batch: from the host, or the last token of the request's slot."""
        rows = jnp.arange(self.shape.tokens, dtype=jnp.int32)
        request = jnp.clip(jnp.searchsorted(x["starts"], rows, side="right") - 1, 0, self.shape.requests - 1)
        latest = last[jnp.minimum(x["slots"][request], self.shape.slots - 1)]
        return jnp.where(x["tokens"] >= 0, x["tokens"], latest)

    def _step_batch(self, x: dict[str, Array], tokens: Int[Array, " T"], kv_lens: Int[Array, " S"]) -> StepBatch:
        tables, shape = tuple(x["tables"]), self.shape
        columns = None
        if shape.retained:
            columns = tuple(
                x["fresh"][shape.retained.index(g), :, 1] if g in shape.retained else None for g in range(shape.groups)
            )
        rows = RaggedBatch(tables[0], x["starts"], kv_lens).tokens(self.shape.tokens)
        adapters = None
        if shape.adapters is not None:
            slots = jnp.where(rows.real, x["adapters"][rows.request], -1)
            adapters = slots, x["adapter_tables"], x["adapter_scales"]
        positions, tree = rows.position, None
        if shape.tree_words:
            tree = TreeMask(x["hidden"], x["tree_first"])
            positions = positions - tree.behind
        positions = jnp.where(rows.real, positions, 0)
        rings = (x["slots"], x["found"]) if shape.residual else None
        shared = tuple(x["shared"]) if shape.shares else None
        prompts = x["prompts"] if shape.slices else None
        return StepBatch(
            tokens, positions, x["starts"], kv_lens, tables, columns, adapters, rings, tree, shared, prompts
        )

    def context(self, pools: Pools, batch: StepBatch, heads: RetainingHeads | None = None) -> PagedCache:
        """Attention context of a forward pass."""
        return PagedCache(
            pools, batch.tables, batch.starts, batch.kv_lens, self.groups, self.shape.decode, self.invariant,
            batch.columns, batch.rings, heads, batch.tree, batch.shared, batch.prompts,
        )  # fmt: skip

    def _forward(self, params: Any, pools: Pools, batch: StepBatch) -> tuple[Pools, Float[Array, "B T D"]]:
        """Runs the training forward over the flat batches, with the paged KV cache as its attention context."""
        heads = None
        if RETAINING_HEADS in params:
            heads, params = params[RETAINING_HEADS], {n: x for n, x in params.items() if n != RETAINING_HEADS}
        with sharding.use_rules(self.forward_model.rules):
            tokens, positions = (sharding.constrain(x, "batch", "seq") for x in (batch.tokens, batch.positions))
            if batch.adapters is not None:
                params = with_rows(params, *batch.adapters)
        forward = (
            functools.partial(forward_in_halves, self.forward_model)
            if self.shape.halves
            else (self.forward_model.forward)
        )
        hidden, ctx = forward(params, tokens, positions, self.context(pools, batch, heads))
        assert isinstance(ctx, PagedCache)
        return ctx.pools, sharding.constrain(hidden, "batch", "residual_seq", "act_embed")

    def _logits(self, params: Any, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Logits of a replica's rows, replicated on its devices."""
        return self.model.head(params, hidden, whole=True)

    def _sample(
        self,
        logits: Float[Array, "S V"],
        x: dict[str, Array],
        kv_lens: Int[Array, " S"],
        state: logits_processors.LogitsState | None,
        masks: Int[Array, "S U"] | None,
    ) -> tuple[dict[str, Array], logits_processors.LogitsState | None]:
        """Samples the next token of each request; returns the outputs and the updated slot state."""
        filters = (x[n] if self.shape.full else None for n in ("top_k", "top_p", "min_p", "typical_p"))
        rows = sampler.SamplerRows(x["seeds"], kv_lens, x["temperature"], *filters)
        known = jnp.where(jnp.arange(logits.shape[1]) < self.vocab_size, logits, -jnp.inf)
        if state is None or masks is None:
            return {"tokens": sampler.sample(known, rows)}, None
        params = logits_processors.LogitsParams(
            x["slots"], x["kind"], kv_lens, x["earliest"], *(x[n] for n in PENALTIES)
        )
        tokens = sampler.sample(logits_processors.process_logits(known, state, params, masks), rows)
        own, ids, top = sampler.logprobs(logits, tokens, self.shape.top_logprobs)
        out = {"tokens": tokens, "logprobs": own, "top_ids": ids, "top_logprobs": top}
        return out, logits_processors.record_tokens(state, params, tokens)

    def _prompt_scores(
        self, params: Any, hidden: Float[Array, "B T D"], packed: Int[Array, "B elements"]
    ) -> dict[str, Array]:
        """Log-probability and rank of each next prompt token, and the top tokens there, if requested."""
        t, top, dtype = self.shape.tokens, self.shape.top_logprobs, self.shape.logprob_dtype
        size = math.gcd(SCORED_ROWS, t)

        def score(logits: Array, wanted: Array) -> tuple[Array, ...]:
            wanted = jnp.maximum(wanted, 0)
            own, ids, best = sampler.logprobs(logits, wanted, top)
            return own.astype(dtype), sampler.ranks(logits, wanted), ids, best.astype(dtype)

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
                likely, ids = jnp.zeros((t, top), dtype), jnp.zeros((t, top), jnp.int32)
                return likely[:, 0], ids[:, 0], ids, likely

            return sharding.per_shard(zeros, "batch")(targets)

        targets = sharding.per_shard(lambda packed: self.shape.inputs.unpack(packed)["targets"], "batch")(packed)
        # All replicas or none: the logits of all are computed together.
        found = jax.lax.cond(jnp.any(targets >= 0), compute, nothing)
        return dict(zip(("scores", "ranks", "prompt_ids", "prompt_top"), found, strict=True))

    def _decode_loop(
        self,
        params: Any,
        pools: Pools,
        last: Array,
        packed: Array,
        state: logits_processors.LogitsState | None,
        masks: Array | None,
        evictions: dict[str, Array],
        features: Float[Array, "R L D"] | None,
    ) -> tuple[Pools, Array, Array, logits_processors.LogitsState | None, Array | None]:
        """Decodes ``steps`` tokens of each request; ends early when all of a replica have sampled a stop token."""
        inputs, each = self.shape.inputs, lambda fn: sharding.per_shard(fn, "batch")
        slots, several = self.shape.slots, sharding.axis_size("batch") > 1

        def begin(packed: Array, last: Array) -> Any:
            x = inputs.unpack(packed)
            last = last.at[x["slots"]].set(self._input_tokens(last, x), mode="drop")
            fields = [field for field in self.shape.outputs.fields if field[0] not in evictions]
            outputs = {name: jnp.zeros(shape, dtype) for name, shape, dtype in fields}
            return (jnp.int32(0), x["slots"] >= slots), last, outputs

        def read(packed: Array, last: Array, turn: Any) -> StepBatch:
            (i, done), x = turn, inputs.unpack(packed)
            if several:  # a replica that has ended writes nothing while others go on
                x["starts"] = jnp.where(active(x, i, done), x["starts"], 0)
            active_rows = (x["slots"] < slots) & active(x, i, done)
            return self._step_batch(
                x, last[jnp.minimum(x["slots"], slots - 1)], jnp.where(active_rows, x["kv_lens"] + i, 0)
            )

        def active(x: dict[str, Array], i: Array, done: Array) -> Array:
            return (i < x["steps"]) & ~jnp.all(done)

        def choose(packed: Array, logits: Array, last: Array, turn: Any, outputs: Any, state: Any, masks: Any) -> Any:
            (i, done), x = turn, inputs.unpack(packed)
            active_now = active(x, i, done)
            places = jnp.where(active_now, x["slots"], slots)
            kv_lens = jnp.where(places < slots, x["kv_lens"] + i, 0)
            with jax.named_scope("sample"):
                out, state = self._sample(logits, x | {"slots": places}, kv_lens, state, masks)
            at = jnp.where(active_now, i, self.shape.decode_steps)
            outputs = {
                name: outputs[name].at[at].set(out[name].astype(outputs[name].dtype), mode="drop") for name in outputs
            }
            last = last.at[places].set(out["tokens"], mode="drop")
            done = done | jnp.any(out["tokens"][:, None] == x["stops"], axis=1)
            return (i + 1, done), last, outputs, state

        def continues(carry: Any) -> Array:
            return jnp.any(each(lambda packed, turn: active(inputs.unpack(packed), *turn))(packed, carry[0]))

        def one(carry: Any) -> Any:
            turn, pools, last, outputs, state, features = carry
            batch = each(read)(packed, last, turn)
            pools, hidden = self._forward(params, pools, batch)
            features = self._keep_features(features, packed, batch, hidden)
            logits = self._logits(params, hidden)
            turn, last, outputs, state = each(choose)(packed, logits, last, turn, outputs, state, masks)
            return turn, pools, last, outputs, state, features

        turn, last, outputs = each(begin)(packed, last)
        begin_with = turn, pools, last, outputs, state, features
        _, pools, last, outputs, state, features = jax.lax.while_loop(continues, one, begin_with)
        return pools, last, each(self.shape.outputs.pack)(outputs | evictions), state, features
