"""Drafts of a draft head (EAGLE): one layer over the served model's features, one token after the other.

The served model's steps keep the hidden state of every token on the device (``EngineConfig.draft_features``), by slot
and position. A call of the head reads the tokens that it has not seen, each with the feature of the token before it,
and then drafts from its own features. It samples with the seed and position of the served model's token, as a draft
model does. Its KV cache is contiguous: a row for each slot of the batch, for one layer.

Tokens that were found in the prefix cache have not been computed and have no features: the head reads zeros there. A
module for multi-token prediction was trained on pairs of a feature and the token after it: it does not read a
sequence's first token, and its positions are those of the features.

Legend: R slots, T tokens read at once, L positions of a slot, D embed, N drafted tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxllm.infer.engine.sequence import Sequence
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.length_limits import choose_max_len
from jaxllm.infer.runner import sampler
from jaxllm.infer.runner.dense_cache import DenseCache, empty_cache
from jaxllm.infer.runner.program_cache import EngineProgram, ProgramCache, config_key, describe
from jaxllm.infer.speculate.draft_head import (
    DraftHead,
    check_head,
    head_forward,
    head_model,
    output_params,
    read_features,
)
from jaxllm.infer.speculate.draft_model import HeldTokens, ServedModel, until_stop
from jaxllm.models import Functional

READ_TOKENS = (16, 64, 256)
"""Tokens of a sequence that a call reads at once; the smallest that suffices is taken."""


class HeadProposer:
    """Draft head of an engine, for all sequences of a step together; see ``BatchProposer``.

    Args:
        head: draft head.
        served: served model; its configuration has ``draft_features``.

    Raises:
        ValueError: the head is not one of the served model, or does not go with how it is served.
    """

    def __init__(self, head: DraftHead, served: ServedModel):
        config = served.config
        if served.mesh is not None and served.mesh.size > 1:
            raise ValueError("speculate: a draft head is served on one device; on a mesh give draft:MODEL or ngram.")
        if served.model.config.virtual_tokens:
            raise ValueError("speculate: a draft head does not go with virtual tokens (prefix, prompt tuning).")
        check_head(head, served.model, served.params)
        self.model, _ = head_model(served.model, served.params)
        self._kind, self._vocab, self._steps = head.fusion, served.vocab_size, config.verify_tokens
        self._max_len = choose_max_len(served.model.config, config.max_len, served.longest)
        self._slots = config.max_sequences
        # Drafted tokens may be behind the longest sequence; the last place takes what belongs to no token.
        self._scratch = self._max_len + self._steps
        dtype = jnp.dtype(self.model.config.dtype)
        self._head = _stored(self.model, head.weights)
        self._params = jax.tree.map(lambda x: x.addressable_data(0), served.params)
        cache = empty_cache(self.model.config, self._slots, self._scratch + 1)
        self._cache = cache.k, cache.v  # as the program cache can name them
        self._held: dict[int, HeldTokens] = {}
        self._runner: Any = None
        self._sizes = sorted({min(size, self._max_len) for size in READ_TOKENS})
        shape = self._slots, self._max_len, self.model.config.embed_dim
        device = next(iter(jax.tree.leaves(self._params)[0].devices()))
        key = [
            "draft head",
            *config_key(self.model.config),
            self._kind,
            describe(self._params),
            self._vocab,
            self._steps,
        ]
        self.program_cache = ProgramCache(served.manifest, key, [device], served.strict)
        place = jax.sharding.SingleDeviceSharding(device)
        abstract = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place))
        programs = [
            EngineProgram(
                f"head-{size}",
                self._draft,
                {
                    "params": abstract(self._params), "head": abstract(self._head), "cache": abstract(self._cache),
                    "features": jax.ShapeDtypeStruct(shape, dtype, sharding=place),
                    "tokens": jax.ShapeDtypeStruct((self._slots, size), jnp.int32, sharding=place),
                    "numbers": jax.ShapeDtypeStruct((self._slots, 4), jnp.int32, sharding=place),
                    "temperature": jax.ShapeDtypeStruct((self._slots,), jnp.float32, sharding=place),
                },
                donated=("cache",),
            )
            for size in self._sizes
        ]  # fmt: skip
        self._programs = self.program_cache.compile_all(programs)
        self._place = place

    @property
    def device_bytes(self) -> int:
        """Bytes of the head and its KV cache on the device."""
        return sum(x.nbytes for x in jax.tree.leaves((self._head, self._cache)))

    def attach(self, runner: Any) -> None:
        """Takes the runner of the served model, whose features the head reads."""
        self._runner = runner
        self.swap(runner.params)

    def swap(self, params: Any) -> None:
        """Takes new weights of the served model; the head's own stay."""
        self._params = params
        self._held.clear()

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> Many[list[int] | None]:
        """Proposes up to so many tokens for each sequence; None for those that it has not read to their end yet."""
        known = {one: self._known(one) for one, _ in wanted}
        most = max(len(one.tokens) - place for one, place in known.items())
        size = next((size for size in self._sizes if size >= most), self._sizes[-1])
        tokens, numbers = np.zeros((self._slots, size), np.int32), np.zeros((self._slots, 4), np.int32)
        temperature = np.zeros(self._slots, np.float32)
        for one, place in known.items():
            some = one.tokens[place : place + size]
            tokens[one.slot, : len(some)] = some
            numbers[one.slot] = place, len(some), one.found, np.uint32(one.seed).view(np.int32)
            temperature[one.slot] = one.request.params.temperature
            self._held[one.slot] = HeldTokens(one, place + len(some))
        given = (jax.device_put(x, self._place) for x in (tokens, numbers, temperature))
        program = self._programs[f"head-{size}"]
        drafts, self._cache = program(self._params, self._head, self._cache, self._runner.features, *given)
        found = np.asarray(drafts)
        return [
            until_stop(one, found[one.slot, :count].tolist()) if len(one.tokens) - known[one] <= size else None
            for one, count in wanted
        ]

    def _known(self, one: Sequence) -> int:
        held = self._held.get(one.slot)
        return 0 if held is None else held.known(one)

    def _draft(
        self,
        params: Any,
        head: Any,
        held: tuple[Array, Array | None],
        features: Float[Array, "R L D"],
        tokens: Int[Array, "R T"],
        numbers: Int[Array, "R 4"],
        temperature: Float[Array, " R"],
    ) -> tuple[Int[Array, "R N"], tuple[Array, Array | None]]:
        """Reads tokens of each slot, and drafts after the last; ``numbers``: first position, tokens, found, seed."""
        start, count, known_from, seeds = numbers.T
        seeds: UInt[Array, " R"] = jax.lax.bitcast_convert_type(seeds, jnp.uint32)
        own = DraftHead(self._kind, head)
        rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        there = rows < count[:, None]
        position = start[:, None] + rows
        last_known = position - 1
        before = jnp.take_along_axis(features, jnp.clip(last_known, 0, features.shape[1] - 1)[..., None], axis=1)
        has_feature = there & (last_known >= jnp.maximum(known_from, 0)[:, None])
        before = jnp.where(has_feature[..., None], read_features(self.model, params, own, before), 0)
        first = int(own.kind.is_module)
        positions = jnp.where(there & (position >= first), position - first, self._scratch)
        hidden, cache = head_forward(self.model, params, own, before, tokens, positions, DenseCache(*held))
        feature = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        outputs = output_params(params, own)

        def one(carry: Any, number: Array) -> Any:
            feature, cache = carry
            logits = self.model.head(outputs, feature)[:, 0]
            logits = jnp.where(jnp.arange(logits.shape[1]) < self._vocab, logits, -jnp.inf)
            at = jnp.where(count > 0, start + count + number, self._scratch)
            token = sampler.sample(logits, sampler.SamplerRows(seeds, at, temperature))
            place = jnp.minimum(at, self._scratch)[:, None] - first
            feature = read_features(self.model, outputs, own, feature)
            feature, cache = head_forward(self.model, params, own, feature, token[:, None], place, cache)
            return (feature, cache), token

        (_, cache), drafts = jax.lax.scan(one, (feature, cache), jnp.arange(self._steps, dtype=jnp.int32))
        assert isinstance(cache, DenseCache)
        return drafts.T, (cache.k, cache.v)


def _stored(model: Functional, weights: Any) -> Any:
    """Weights of a head in compute dtype; those of the layer that a model in any dtype has wider stay so."""
    dtype, usual = jnp.dtype(model.config.dtype), jnp.dtype(model.config.param_dtype)
    kept = jax.tree.map(lambda x: dtype if x.dtype == usual else x.dtype, model.abstract()["segments"])
    segments = jax.tree.map(jnp.asarray, weights["segments"], kept)
    rest = {name: value for name, value in weights.items() if name != "segments"}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), rest) | {"segments": segments}


def with_features(config: EngineConfig, argument: Any) -> EngineConfig:
    """Configuration of an engine that keeps the features that a head reads."""
    return replace(config, draft_features=True)
