"""Head clusters (CHAI, arXiv:2403.08058): of kv heads whose attention is alike, one's keys and scores serve all.

In the paper each layer has a number of clusters, and which heads are in them is decided for each sequence by its first
five tokens (its variant CHAI-static decides once). Programs here have static shapes and pages are shared by sequences,
so this is CHAI-static with clusters of one size: when the engine starts, heads are clustered by the correlation of
their attention on a text, and the weights are folded into a model with fewer queries and keys
(``ClusteredAttentionConfig``). It runs with every page format and kernel that takes its head dims.

A kv head is clustered together with its query heads. A token then has, of C clusters of M kv heads, C (H + M V)
numbers in a layer instead of C M (H + V).

Legend: L layers, B batch, S sequence, D embed, N query heads, K = C M kv heads, G = N / K, H head dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.config import ConfigError
from jaxllm.models.attention_context import AttentionParams, LayerIndex, Segments
from jaxllm.models.channel_order import block_places, weighted_blocks
from jaxllm.models.functional import Functional, Params, functional
from jaxllm.models.params import at_least_f32
from jaxllm.text import Tokenizer

ROWS, ROW_TOKENS = 4, 48
"""Rows and tokens of the text that heads are compared on."""
TEXT = """The ship had left the harbour before dawn, and by noon the coast was a thin grey line behind them. Anna
counted the barrels again: twelve of water, four of salted meat, and one that nobody had ordered. "Whose is this?" she
asked, but the captain only shrugged. In 1848 a letter took three months from one port to the next; a barrel could take
longer. They opened it in the evening. Inside, wrapped in oilcloth, were a clock without hands, a list of names, and
two maps of the same island, which did not agree. If the first map was right, the spring lay north of the hill; if the
second one was right, there was no hill at all. for i in range(10): print(i * i) would have been as much use to them."""
"""Text for models with a tokenizer, where the caller gives no tokens."""


class HeadClusters:
    """Clusters of a model's heads.

    Args:
        model: model whose attention layers are grouped-query attention of the same heads.
        params: its weights, stacked, in plain arrays.
        size: kv heads of a cluster (M); divides the kv heads.
        tokens: Int[np.ndarray, "B S"], text that the heads are compared on.

    Attributes:
        model: the model with clustered heads.
        members: of each block, Int[np.ndarray, "L C M"]: kv heads of each cluster, its representative first.

    Raises:
        ValueError: the size does not divide the kv heads, or the model has layers or weights of another kind.
    """

    def __init__(self, model: Functional, params: Params, size: int, tokens: np.ndarray):
        self.model = self._clustered(model, params, size)
        alike, self._config = correlations(model, params, tokens), model.config
        self.members: list[np.ndarray] = []
        first = 0
        for group, repeats in model.config.segments:
            layers = first + np.arange(len(group) * repeats).reshape(repeats, len(group))
            first += layers.size
            self.members += [np.stack([clusters(alike[layer], size) for layer in own]) for own in layers.T]

    def fold(self, params: Params) -> Params:
        """The weights of the clustered model; those of other layers are shared, not copied."""
        segments: dict[str, Any] = {name: dict(groups) for name, groups in params["segments"].items()}
        for (segment, number), (block, group), members in zip(
            block_places(self._config), weighted_blocks(self._config, params), self.members, strict=True
        ):
            attention, config = dict(group["attention"]), block.attention
            per_kv = config.heads // config.kv_heads
            chosen = members[:, :, 0]  # L C
            queries = (chosen[..., None] * per_kv + np.arange(per_kv)).reshape(len(members), -1)
            for names, heads in ((("k", "k_bias", "prefix_keys"), chosen), (("q", "q_bias", "sinks"), queries)):
                for name in names:
                    if name in attention:
                        axis = -1 if name == "sinks" else -2
                        attention[name] = _take(attention[name], heads, axis)
            layers, many, size = members.shape
            for name in ("v", "v_bias", "prefix_values"):
                if name in attention:
                    values = _take(attention[name], members.reshape(layers, -1), -2)
                    attention[name] = values.reshape(*values.shape[:-2], many, size * values.shape[-1])
            rows = members[:, :, None] * per_kv + np.arange(per_kv)[:, None]  # L C G M
            out = _take(attention["o"], rows.reshape(layers, -1), 1)
            attention["o"] = out.reshape(layers, many * per_kv, size * out.shape[2], out.shape[3])
            segments[segment][number] = {**group, "attention": attention}
        return {**params, "segments": segments}

    @staticmethod
    def _clustered(model: Functional, params: Params, size: int) -> Functional:
        """The model with clustered attention; see the class for the errors."""
        config = model.config
        apart = any(isinstance(segment, tuple) for segment in params["segments"].values())
        groups = [] if apart else [group["attention"] for _, group in weighted_blocks(config, params)]
        try:
            pattern, prefix = (
                tuple(dataclasses.replace(block, attention=block.attention.clustered(size)) for block in blocks)
                for blocks in (config.pattern, config.prefix)
            )
        except ValueError as error:
            raise ConfigError(f"engine: head_clusters = {size} (chai): {error}; or use corm.") from None
        wrong = {
            "layers of different numbers of heads": len(
                {(b.attention.heads, b.attention.kv_heads) for b in config.blocks}
            )
            > 1,
            "adapted or packed weights (packed ones are unpacked with --weights plain)": model.adapt is not None
            or not all(hasattr(group.get(name), "at") for group in groups for name in "qkvo"),
            "layers apart": apart,
        }
        for what in (what for what, is_so in wrong.items() if is_so):
            raise ConfigError(f"engine: head_clusters = {size} (chai) folds heads, and the model has {what}; use corm.")
        folded = functional(dataclasses.replace(config, pattern=pattern, prefix=prefix), model.rules)
        return dataclasses.replace(folded, training_context=model.training_context, text_context=model.text_context)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionLikeness:
    """Attention context that compares the kv heads of each layer while the model runs.

    Attributes:
        found: Float[Array, "L K K"], correlation of the attention weights of each pair of kv heads, over queries and
            keys and, one by one, over the query heads of both.
    """

    found: Any

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N H"], AttentionLikeness]:
        """Attention output of ``Segments``; the context with the layer's correlations."""
        out, _ = Segments().attend(layer, q, k, v, positions, params, sinks)
        (b, s, _, h), heads = q.shape, k.shape[2]
        scores = jnp.einsum("btkgh,bskh->kgbts", q.reshape(b, s, heads, -1, h), k).astype(at_least_f32(q.dtype))
        scores = scores * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        behind = jnp.arange(s)[:, None] - jnp.arange(s)
        seen = (behind >= 0) & (behind < (params.window or s))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        apart = jnp.where(seen, weights - 1 / jnp.sum(seen, axis=-1, keepdims=True), 0.0).reshape(heads, -1)
        products = apart @ apart.T
        sizes = jnp.sqrt(jnp.maximum(jnp.diagonal(products), jnp.finfo(products.dtype).tiny))
        return out, AttentionLikeness(self.found.at[layer].set(products / sizes[:, None] / sizes))


def correlations(model: Functional, params: Params, tokens: np.ndarray) -> Float[np.ndarray, "L K K"]:
    """Correlations of each layer's kv heads on rows of tokens, see ``AttentionLikeness``."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    heads = model.config.blocks[0].attention.kv_heads
    empty = jnp.zeros((model.config.layers, heads, heads), at_least_f32(jnp.dtype(model.config.dtype)))

    def run(params: Params, tokens: Array) -> Array:
        _, context = model.forward(params, tokens, positions, AttentionLikeness(empty))  # pyright: ignore[reportArgumentType]
        return context.found  # pyright: ignore[reportAttributeAccessIssue]

    return np.asarray(jax.jit(run)(params, jnp.asarray(tokens, jnp.int32)))


def clusters(alike: Float[np.ndarray, "K K"], size: int) -> Int[np.ndarray, "C M"]:
    """Clusters of so many heads each, by their correlations: the two most alike, then who is most alike to them.

    The representative, the first of a cluster, is the head that is most alike to the others.
    """
    left, found = list(range(len(alike))), []
    alike = np.where(np.eye(len(alike), dtype=bool), -np.inf, alike)
    while left:
        among = alike[np.ix_(left, left)]
        own = [left[i] for i in np.unravel_index(np.argmax(among), among.shape)] if len(left) > 1 else list(left)
        while len(own) < size:
            rest = [head for head in left if head not in own]
            own.append(rest[int(np.argmax([alike[head, own].mean() for head in rest]))])
        likeness = [alike[head, [other for other in own if other != head]].mean() for head in own]
        first = own[int(np.argmax(likeness))]
        found.append([first, *sorted(head for head in own if head != first)])
        left = [head for head in left if head not in own]
    return np.asarray(sorted(found))


def calibration_tokens(vocab_size: int, tokenizer: Tokenizer | None) -> Int[np.ndarray, "B S"]:
    """Rows of ``TEXT`` for models with a tokenizer; of tokens drawn with a fixed seed for others."""
    shape = ROWS, ROW_TOKENS
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, vocab_size, shape)
    return np.resize(np.asarray(tokenizer.encode(TEXT), np.int32), shape)


def _take(x: Array, heads: Int[np.ndarray, "L I"], axis: int) -> Array:
    """Heads of a weight along an axis, others in each layer."""
    axis %= x.ndim
    places = heads.reshape(len(heads), *(heads.shape[1] if i == axis else 1 for i in range(1, x.ndim)))
    return jnp.take_along_axis(x, jnp.asarray(places), axis=axis)
