"""Drafts of a draft head (EAGLE): one layer over the served model's features, one token after the other.

The served model's steps keep the hidden state of every token on the device (``EngineConfig.draft_features``), by slot
and position. A call of the head reads the tokens that it has not seen, each with the feature of the token before it,
and then drafts from its own features, as ``slot_draft`` says. Its KV cache is of one layer.

Tokens that were found in the prefix cache have not been computed and have no features: the head reads zeros there. A
module for multi-token prediction was trained on pairs of a feature and the token after it: it does not read a
sequence's first token, and its positions are those of the features.

Legend: R slots, L positions of a slot, D embed, N drafted tokens.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.dense_cache import DenseCache, empty_cache
from jaxllm.infer.speculate.draft_head import (
    DraftHead,
    check_head,
    head_forward,
    head_model,
    output_params,
    read_features,
)
from jaxllm.infer.speculate.draft_model import ServedModel
from jaxllm.infer.speculate.slot_draft import SlotDraftProposer, SlotTokens
from jaxllm.models import Functional


class HeadProposer(SlotDraftProposer):
    """Draft head of an engine, for all sequences of a step together; see ``BatchProposer``.

    Args:
        head: draft head.
        served: served model; its configuration has ``draft_features``.

    Raises:
        ValueError: the head is not one of the served model, or does not go with how it is served.
    """

    def __init__(self, head: DraftHead, served: ServedModel):
        if served.mesh is not None and served.mesh.size > 1:
            raise ValueError("speculate: a draft head is served on one device; on a mesh give draft:MODEL or ngram.")
        if served.model.config.virtual_tokens:
            raise ValueError("speculate: a draft head does not go with virtual tokens (prefix, prompt tuning).")
        check_head(head, served.model, served.params)
        super().__init__(head_model(served.model, served.params)[0], served)
        self._kind, self._runner = head.fusion, None
        self._head = _stored(self.model, head.weights)
        self._params = jax.tree.map(lambda x: x.addressable_data(0), served.params)
        place = jax.sharding.SingleDeviceSharding(next(iter(jax.tree.leaves(self._params)[0].devices())))
        abstract = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place))
        shape, dtype = (self._slots, self._max_len, self.model.config.embed_dim), jnp.dtype(self.model.config.dtype)
        features = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        weights = {"params": abstract(self._params), "head": abstract(self._head), "features": features}
        cache = empty_cache(self.model.config, self._slots, self._scratch + 1)
        # As the program cache can name it.
        self.compile(weights, jax.device_put((cache.k, cache.v), place), place, ["draft head", self._kind])

    @property
    def device_bytes(self) -> int:
        """Bytes of the head and its KV cache on the device."""
        return super().device_bytes + sum(x.nbytes for x in jax.tree.leaves(self._head))

    def attach(self, runner: Any) -> None:
        """Takes the runner of the served model, whose features the head reads."""
        self._runner = runner
        self.swap(runner.params)

    def swap(self, params: Any) -> None:
        """Takes new weights of the served model; the head's own stay."""
        self._params = params
        super().swap(params)

    def weights(self) -> tuple[Any, ...]:
        """Weights of the served model and of the head, and the features."""
        assert self._runner is not None
        return self._params, self._head, self._runner.features

    def draft(
        self,
        params: Any,
        head: Any,
        features: Float[Array, "R L D"],
        held: tuple[Array, Array | None],
        given: SlotTokens,
    ) -> tuple[Int[Array, "R N"], tuple[Array, Array | None]]:
        """Reads tokens of each slot with the features before them, and drafts after the last; see ``draft_head``."""
        own = DraftHead(self._kind, head)
        last_known = given.position - 1
        before = jnp.take_along_axis(features, jnp.clip(last_known, 0, features.shape[1] - 1)[..., None], axis=1)
        has_feature = given.there & (last_known >= jnp.maximum(given.found, 0)[:, None])
        before = jnp.where(has_feature[..., None], read_features(self.model, params, own, before), 0)
        first = int(own.kind.is_module)
        positions = jnp.where(given.there & (given.position >= first), given.position - first, self._scratch)
        hidden, cache = head_forward(self.model, params, own, before, given.tokens, positions, DenseCache(*held))
        outputs = output_params(params, own)

        def one(carry: Any, number: Array) -> Any:
            feature, cache = carry
            token = self.sample(self.model.head(outputs, feature)[:, 0], given, number)
            place = self.place_of(given, number)[:, None] - first
            feature = read_features(self.model, outputs, own, feature)
            feature, cache = head_forward(self.model, params, own, feature, token[:, None], place, cache)
            return (feature, cache), token

        start = given.last(hidden), cache
        (_, cache), drafts = jax.lax.scan(one, start, jnp.arange(self._steps, dtype=jnp.int32))
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
