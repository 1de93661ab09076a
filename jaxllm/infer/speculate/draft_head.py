"""Draft head: one decoder layer over a model's features that guesses its next tokens (EAGLE, arXiv:2401.15077).

The head reads, for each token, the feature of the token before it (the model's hidden state there, before the final
norm) and the token's own embedding, and makes the token's feature; the model's output head turns that into the
distribution of the next token. After the last known feature it goes on with its own. Embedding and output head are the
model's, and the layer begins as a copy of the model's last one.

A fusion makes one vector of feature and embedding, a row of ``FUSIONS``. Both are first divided by their root mean
square, since their sizes differ by orders of magnitude; the papers use them as they are. ``MODULE`` is the fusion of
the modules for multi-token prediction that some models are published with (``mtp_module``).

Legend: B batch, S sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.hub.safetensors import open_file, write_file
from jaxllm.infer.speculate.self_draft import with_layers
from jaxllm.models import Functional
from jaxllm.models.attention_context import AttentionContext
from jaxllm.models.layers.norm import rms_normalize

HEAD_FILE = "head.safetensors"
"""Name of the file of a draft head in its directory."""
HOW = "`jaxllm train eagle_smollm2` writes one."


@dataclass(frozen=True)
class Fusion:
    """Fusion of a feature and an embedding.

    Attributes:
        start: embed dim -> weights before training; with them the fusion is the mean of the two.
        fuse: (weights, feature, embedding, epsilon of the model's norms) -> their fusion.
        is_module: the head has a final norm of its own and reads features after a final norm, the model's or its own;
            it reads no token that has no token before it.
    """

    start: Callable[[int], dict[str, np.ndarray]]
    fuse: Callable[[dict[str, Array], Array, Array, float], Array]
    is_module: bool = False


def _concat(weights: dict[str, Array], feature: Array, embedded: Array, _: float) -> Array:
    both = jnp.concatenate([normalised(feature), normalised(embedded)], axis=-1)
    return both @ weights["both"] + weights["bias"]


def _gated(weights: dict[str, Array], feature: Array, embedded: Array, _: float) -> Array:
    feature, embedded = normalised(feature) @ weights["feature"], normalised(embedded) @ weights["embedding"]
    gate = jax.nn.sigmoid(jnp.concatenate([feature, embedded], axis=-1) @ weights["gate"] + weights["bias"])
    return gate * feature + (1 - gate) * embedded


def _module(weights: dict[str, Array], feature: Array, embedded: Array, eps: float) -> Array:
    parts = ((embedded, weights["embedding_norm"]), (feature, weights["feature_norm"]))
    return jnp.concatenate([rms_normalize(x, gain, eps) for x, gain in parts], axis=-1) @ weights["both"]


FUSIONS: dict[str, Fusion] = {
    "concat": Fusion(lambda d: {"both": 0.5 * np.tile(np.eye(d), (2, 1)), "bias": np.zeros(d)}, _concat),
    "gated": Fusion(
        lambda d: {"feature": np.eye(d), "embedding": np.eye(d), "gate": np.zeros((2 * d, d)), "bias": np.zeros(d)},
        _gated,
    ),
}
"""Fusions by name. concat: a linear map of both, one after the other (EAGLE, section 3.1). gated: a gate for each
element, between linear maps of the two, that depends on both (dynamic gating fusion of Dovetail, arXiv:2412.18934)."""
MODULE = "mtp"
KINDS = FUSIONS | {
    MODULE: Fusion(
        lambda d: {
            "both": 0.5 * np.tile(np.eye(d), (2, 1)), "embedding_norm": np.ones(d), "feature_norm": np.ones(d)
        },
        _module,
        is_module=True,
    )
}  # fmt: skip
"""Fusions by name, those that no recipe trains too."""


@dataclass(frozen=True)
class DraftHead:
    """Draft head of a model.

    Attributes:
        fusion: row of ``FUSIONS``, or ``MODULE``.
        weights: {"fusion": weights of the fusion, "segments": the layer's, as a model of one layer has them}; of a
            ``MODULE`` also {"norm": its final norm's}.
    """

    fusion: str
    weights: Any

    @property
    def kind(self) -> Fusion:
        """Its fusion."""
        return KINDS[self.fusion]


def head_model(model: Functional, params: Any) -> tuple[Functional, Any]:
    """Model of the last layer alone, whose architecture a draft head has, and its weights.

    Args:
        model, params: model that the head drafts for.
    """
    return with_layers(model, params, [model.config.layers - 1])


def new_head(model: Functional, params: Any, fusion: str, dtype: Any = jnp.float32) -> DraftHead:
    """Draft head before training: a copy of the model's last layer behind the mean of feature and embedding.

    Raises:
        ValueError: the model's weights are packed.
    """
    _, own = head_model(model, params)
    layer = own["segments"]["0"]
    layer = jax.tree.map(lambda x: x[None], layer[0]) if isinstance(layer, tuple) else layer
    packed = any(
        not isinstance(x, jax.Array) for x in jax.tree.leaves(layer, is_leaf=lambda x: not isinstance(x, dict))
    )
    if packed:
        raise ValueError("head: a draft head is trained beside a model whose weights are not packed; load it so.")
    start = FUSIONS[fusion].start(model.config.embed_dim)
    weights = {"fusion": start, "segments": {"0": layer}}
    return DraftHead(fusion, jax.tree.map(lambda x: jnp.asarray(x, dtype), weights))


def head_forward(
    model: Functional,
    params: Any,
    head: DraftHead,
    before: Float[Array, "B S D"],
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    ctx: AttentionContext,
) -> tuple[Float[Array, "B S D"], AttentionContext]:
    """Features of tokens by a draft head, and the updated context.

    Args:
        model: of ``head_model``.
        params: weights of the model that the head drafts for.
        before: feature of the token before each, as ``read_features`` gives it; zeros where there is none.
        tokens, positions, ctx: see ``Functional.forward``.
    """
    dtype = jnp.dtype(model.config.dtype)
    weights = jax.tree.map(lambda x: x.astype(dtype), head.weights["fusion"])
    embedded = model.embed(params, tokens, positions)
    fused = head.kind.fuse(weights, before.astype(dtype), embedded, model.config.norm_eps)
    return model.blocks(params | {"segments": head.weights["segments"]}, fused, positions, ctx)


def output_params(params: Any, head: DraftHead) -> Any:
    """Weights with which ``Functional.head`` turns features of a draft head into logits.

    Args:
        params: weights of the model that the head drafts for.
    """
    return params | {"head": params["head"] | {"norm": head.weights["norm"]}} if head.kind.is_module else params


def read_features(model: Functional, params: Any, head: DraftHead, features: Float[Array, "B S D"]) -> Array:
    """Features as a draft head reads them: a module reads them after the final norm.

    Args:
        params: the model's weights for features of the model, those of ``output_params`` for the head's own.
    """
    return model.unembed(params, features)[0] if head.kind.is_module else features


def normalised(x: Array) -> Array:
    """Vectors divided by their root mean square."""
    square = jnp.mean(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)


def save_head(head: DraftHead, directory: Path) -> None:
    """Writes a draft head to ``HEAD_FILE`` of a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    flat = jax.tree_util.tree_leaves_with_path({head.fusion: head.weights})
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat)
    write_file(directory / HEAD_FILE, {n: np.asarray(x, np.float32) for n, (_, x) in zip(names, flat, strict=True)})


def load_head(text: str) -> DraftHead:
    """Draft head of a directory, as ``save_head`` has written it.

    Raises:
        ValueError: the file is missing, damaged or not one of a draft head.
    """
    path = Path(text) / HEAD_FILE
    try:
        found = {name: np.asarray(array) for name, array in open_file(path).items()}
    except (OSError, ValueError) as error:
        raise ValueError(f"head:{text}: {path} cannot be read: {error}. {HOW}") from error
    tree: dict[str, Any] = {}
    for name, array in found.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    fusion = next(iter(tree), "")
    if fusion not in FUSIONS or len(tree) != 1 or set(tree[fusion]) != {"fusion", "segments"}:
        raise ValueError(f"head:{text}: {path} is no draft head: it holds {sorted(found)[:5]}. {HOW}")
    return DraftHead(fusion, tree[fusion])


def check_head(head: DraftHead, model: Functional, params: Any) -> None:
    """Checks that a draft head is one of this model.

    Raises:
        ValueError: names what differs.
    """
    smaller, _ = head_model(model, params)
    wanted = {
        "fusion": jax.eval_shape(lambda: head.kind.start(model.config.embed_dim)),
        "segments": smaller.abstract()["segments"],
    }
    if head.kind.is_module:
        wanted["norm"] = smaller.abstract()["head"]["norm"]
    want, got = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (wanted, head.weights))
    for path in dict.fromkeys([*want, *got]):
        shapes = [list(tree[path].shape) if path in tree else "nothing" for tree in (got, want)]
        if shapes[0] != shapes[1]:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"head: the draft head's {name} is {shapes[0]}, this model needs {shapes[1]}. Train a head of it: {HOW}"
            )
