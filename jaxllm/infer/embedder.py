"""Text embeddings: the model's last hidden states, pooled over tokens and normalised to length 1."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.infer.runner.serving_mesh import serving_model
from jaxllm.models import Functional, Segments

Pooling = Literal["mean", "last"]
_SHORTEST = 16


class Embedder:
    """Computes embeddings, one text at a time. Lengths are padded to powers of two; each is compiled at its first use.

    Args:
        model, params: model and its parameters.
        max_len: maximum length of a text in tokens.
        mesh: mesh of the parameters; None for one device.

    Attributes:
        dim: elements of an embedding.
    """

    def __init__(self, model: Functional, params: Any, max_len: int, mesh: jax.sharding.Mesh | None = None):
        self._params, self._max_len, self._mesh = params, max_len, mesh
        self.dim, self._virtual = model.config.embed_dim, model.config.virtual_tokens
        self._pool = jax.jit(functools.partial(_pooled, serving_model(model)), static_argnames="pooling")
        self._reward = jax.jit(functools.partial(_rewarded, serving_model(model)))
        self._lock = threading.Lock()  # one text at a time, because the engine uses the same device

    def __call__(self, ids: Sequence[int], pooling: Pooling) -> np.ndarray:
        """Embedding of a text's token ids, float32 [D] of norm 1."""
        tokens = self._padded(ids)
        with self._lock, contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            return np.asarray(self._pool(self._params, tokens, np.int32(len(ids)), pooling=pooling))

    def reward(self, ids: Sequence[int], token: int) -> float:
        """Reward of a text's token ids by a reward model: the last hidden state times its score head.

        The head is the output matrix's row of ``token``.
        """
        tokens = self._padded(ids)
        with self._lock, contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            return float(self._reward(self._params, tokens, np.int32(len(ids)), np.int32(token)))

    def _padded(self, ids: Sequence[int]) -> np.ndarray:
        size = _SHORTEST
        while size < self._virtual + len(ids):
            size *= 2
        tokens = np.zeros((1, size), np.int32)
        tokens[0, self._virtual : self._virtual + len(ids)] = ids
        return tokens


def _states(
    model: Functional, params: Any, tokens: Int[Array, "1 S"]
) -> tuple[Float[Array, "S D"], Float[Array, "V D"]]:
    """(last hidden states after the final norm, output matrix) of a text."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    with sharding.use_rules(model.rules):  # every replica of the mesh computes the same row
        rows, axes = (sharding.axis_size("batch"), tokens.shape[1]), ("batch", None)
        every, places = (sharding.constrain(jnp.broadcast_to(x, rows), *axes) for x in (tokens, positions))
        # Padding comes last, so causal attention of the real tokens never sees it.
        hidden, _ = model.forward(params, every, places, Segments())
        hidden = sharding.constrain(hidden, None, None, None)[:1]
        normed, head = model.unembed(params, hidden)
        return normed[0].astype(jnp.float32), sharding.constrain(head, None, None)


def _rewarded(
    model: Functional, params: Any, tokens: Int[Array, "1 S"], count: Int[Array, ""], token: Int[Array, ""]
) -> Float[Array, ""]:
    states, head = _states(model, params, tokens)
    return states[model.config.virtual_tokens + count - 1] @ head[token].astype(jnp.float32)


def _pooled(
    model: Functional, params: Any, tokens: Int[Array, "1 S"], count: Int[Array, ""], pooling: Pooling
) -> Float[Array, " D"]:
    states, _ = _states(model, params, tokens)
    first = model.config.virtual_tokens
    if pooling == "last":
        vector = states[first + count - 1]
    else:
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[:, None]
        vector = jnp.where((at >= first) & (at < first + count), states, 0).sum(0) / count
    return vector / jnp.maximum(jnp.linalg.norm(vector), 1e-12)
