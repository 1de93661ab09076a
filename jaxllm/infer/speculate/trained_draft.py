"""Trained self-speculation (S3D, arXiv:2405.20314): some of a model's layers, taught to draft several tokens in a pass.

A pass reads the tokens that the draft has not seen yet and, after them, mask tokens; a token is drafted after the last
known one and after each mask. Mask tokens have embeddings of their own, and low-rank factors adapt the layers that the
draft keeps; both are used in drafting alone, and the model stays as it is. They are trained by
``jaxllm.posttrain.frozen.draft_training``.

Legend: M mask tokens, D embed, L layers of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxllm.hub.safetensors import open_file, write_file
from jaxllm.infer.runner.extended_vocabulary import ExtendedVocabulary
from jaxllm.models import Functional
from jaxllm.peft.adapter import Adapter, merged_params
from jaxllm.peft.low_rank_factors import LoraWeight, LowRank

HOW = "`jaxllm train s3d_smollm2` writes such a file."


@dataclass(frozen=True)
class TrainedDraft:
    """Trained draft: the layers of a model that draft for it, and the values that training adds to them.

    Attributes:
        layers: indices of the layers that the draft keeps, rising.
        masks: embeddings of the mask tokens.
        factors: low-rank factors by the path of their weight in the smaller model, stacked over its layers.
    """

    layers: tuple[int, ...]
    masks: Float[Any, "M D"]
    factors: dict[str, LowRank]

    @property
    def tokens(self) -> int:
        """Tokens that a pass drafts."""
        return len(self.masks) + 1


def save_draft(draft: TrainedDraft, path: Path) -> None:
    """Writes a trained draft to a safetensors file."""
    arrays = {"layers": np.asarray(draft.layers, np.int32), "masks": np.asarray(draft.masks, np.float32)}
    for name, one in draft.factors.items():
        arrays |= {f"{name}/a": np.asarray(one.a, np.float32), f"{name}/b": np.asarray(one.b, np.float32)}
        arrays[f"{name}/scale"] = np.asarray(one.scale, np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, arrays)


def load_draft_file(path: Path) -> TrainedDraft:
    """Trained draft, as ``save_draft`` has written it.

    Raises:
        ValueError: the file is missing, damaged or not one of a trained draft.
    """
    try:
        found = {name: np.asarray(array) for name, array in open_file(path).items()}
    except (OSError, ValueError) as error:
        raise ValueError(f"self:{path} cannot be read: {error}. {HOW}") from error
    paths = {name.removesuffix("/a") for name in found if name.endswith("/a")}
    legal = {"layers", "masks", *(f"{path}/{part}" for path in paths for part in ("a", "b", "scale"))}
    if set(found) != legal or not paths:
        raise ValueError(f"self:{path} is no trained draft: it holds {sorted(found)[:5]}. {HOW}")
    factors = {one: LowRank(found[f"{one}/a"], found[f"{one}/b"], float(found[f"{one}/scale"])) for one in paths}
    return TrainedDraft(tuple(int(layer) for layer in found["layers"]), found["masks"], factors)


def check_draft(draft: TrainedDraft, model: Functional, smaller: Functional) -> None:
    """Checks that a trained draft is one of this model.

    Args:
        model: the model that it drafts for.
        smaller: model of the layers that it keeps.

    Raises:
        ValueError: names what differs.
    """
    if draft.masks.shape[1:] != (model.config.embed_dim,):
        raise ValueError(
            f"self: the trained draft is for a model of {draft.masks.shape[1]} numbers a token; this one has "
            f"{model.config.embed_dim}. Train a draft of this model."
        )
    linears = smaller.linears(experts=True)
    for path, one in draft.factors.items():
        if path not in linears:
            raise ValueError(f"self: the trained draft adapts {path}, which this model has not. Train a draft of it.")
        linear = linears[path]
        lead = (*linear.stack, *linear.shape[: linear.lead])
        wanted = (*lead, *linear.inputs, one.rank), (*lead, one.rank, *linear.outputs)
        if (one.a.shape, one.b.shape) != wanted:
            raise ValueError(
                f"self: the trained draft's factors of {path} are {list(one.a.shape)} and {list(one.b.shape)}; this "
                f"model needs {list(wanted[0])} and {list(wanted[1])}. Train a draft of this model."
            )


def drafting_params(draft: TrainedDraft, smaller: Functional, params: Any, *, merge: bool) -> Any:
    """Weights that draft: those of the kept layers with the factors, and the embedding with the mask tokens.

    Args:
        draft: trained draft.
        smaller, params: model of the kept layers, and its weights; they are not copied unless merged.
        merge: add the factors to the weights, as a mesh needs; under the mesh.
    """
    if merge:
        ranks = {path: (one.rank,) * one.a.shape[0] for path, one in draft.factors.items()}
        params = merged_params(smaller, params, Adapter("lora", draft.factors, ranks))
    else:
        params = params | {"segments": {n: _adapted(n, some, draft) for n, some in params["segments"].items()}}
    embedding = params["embedding"]
    table = embedding["table"]
    dtype = jnp.dtype(smaller.config.param_dtype) if not isinstance(table, jax.Array) else table.dtype
    return params | {"embedding": {**embedding, "table": ExtendedVocabulary(table, jnp.asarray(draft.masks, dtype))}}


def _adapted(number: str, segment: Any, draft: TrainedDraft) -> Any:
    """Layers of a segment, stacked or apart, with the factors."""

    def some(part: Any, pick: Any) -> Any:
        def one(path: tuple, base: Any) -> Any:
            name = f"{number}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            if (factors := draft.factors.get(f"segments/{name}")) is None:
                return base
            dtype = base.dtype if isinstance(base, jax.Array) else jnp.float32
            a, b = (jnp.asarray(pick(x), dtype) for x in (factors.a, factors.b))
            return LoraWeight(base, LowRank(a, b, factors.scale))

        return jax.tree.map_with_path(one, part, is_leaf=lambda x: not isinstance(x, dict))

    if not isinstance(segment, tuple):
        return some(segment, lambda x: x)
    return tuple(some(layer, lambda x, i=i: x[i]) for i, layer in enumerate(segment))
