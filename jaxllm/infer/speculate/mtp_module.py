"""Multi-token prediction (MTP): drafts of the module that a model was trained with (DeepSeek-V3, arXiv:2412.19437).

The module (section 2.2) is a draft head: an RMSNorm of the model's feature and one of the next token's embedding, a
linear map of both, one transformer block, and a final norm; embedding and output matrix are the model's. Checkpoints
hold it as the layer after the model's last, with the tensors of ``PARTS`` beside those of a block. DeepSeek-V3 and R1,
and GLM-4.5 (``glm4_moe``) come with one. Further tokens are drafted by the same module from its own features. Of
several modules the first is used.

The paper leaves open where the model's feature is taken. It is read after the model's final norm, and the module's own
after the module's, as vLLM does (pull requests 45895 and 47448, by measured acceptance).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.hub import HubError, open_source
from jaxllm.hub.families.families import family
from jaxllm.hub.huggingface import equal_tensors, leaves_by_path, place_leaf, sources_by_leaf
from jaxllm.hub.model_source import ModelSource
from jaxllm.hub.weight_mapping import hf_layout
from jaxllm.infer.speculate.draft_head import MODULE, DraftHead, head_model
from jaxllm.infer.speculate.draft_model import ServedModel
from jaxllm.infer.speculate.head_draft import HeadProposer

PARTS = {
    "embedding_norm": "enorm.weight",
    "feature_norm": "hnorm.weight",
    "both": "eh_proj.weight",
    "norm": "shared_head.norm.weight",
}
"""Names of the module's own tensors in its layer; ``eh_proj`` takes the embedding first, then the feature."""
SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Tensors of the model that some checkpoints repeat in the module's layer."""


def parse_nothing(text: str) -> None:
    """Checks that nothing follows ``mtp``.

    Raises:
        ValueError: something does.
    """
    if text:
        raise ValueError(f"mtp:{text}; the module is the served model's own: give mtp alone.")


def load_module_proposer(argument: None, served: ServedModel) -> HeadProposer:
    """Proposer of the module of a served model.

    Raises:
        ValueError: the model has no module that can be read; or see ``HeadProposer``.
    """
    return HeadProposer(load_module(served), served)


def load_module(served: ServedModel) -> DraftHead:
    """Module of a served model, read from its checkpoint in the model's compute dtype.

    Raises:
        ValueError: it has none, or none that can be read; says why.
    """
    if served.path is None or served.path.is_file() or (served.path / "checkpoints").is_dir():
        where = "the model is not from a checkpoint" if served.path is None else f"{served.path} is none of these"
        raise ValueError(
            "speculate: mtp reads the module for multi-token prediction from a directory with config.json and "
            f"safetensors, and {where}; give draft:MODEL, or ngram."
        )
    try:
        return read_module(open_source(served.path), served)
    except HubError as error:
        raise ValueError(f"speculate: the module for multi-token prediction of {served.path}: {error}") from error


def read_module(source: ModelSource, served: ServedModel) -> DraftHead:
    """Module in the tensors of a published model.

    Raises:
        ValueError: there is none.
        HubError: a tensor of it is missing or of another shape.
    """
    table, last = family(source.source).table, served.model.config.layers
    layer = f"{table.prefix}{table.layer}".replace("{layer}", str(last))
    names = {part: layer + name for part, name in PARTS.items()}
    if not any(name in source.tensors for name in names.values()):
        raise ValueError(
            f"speculate: {served.path} has no module for multi-token prediction: there is no {names['both']}. "
            "Give draft:MODEL, head:DIR or ngram."
        )
    for copy, shared in SHARED.items():
        _check_shared(source, layer + copy, shared)
    smaller, _ = head_model(served.model, served.params)
    where = jax.sharding.SingleDeviceSharding(next(iter(jax.tree.leaves(served.params)[0].devices())))
    segments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), {"segments": smaller.abstract()["segments"]}
    )
    leaves = leaves_by_path(segments)
    at_last = table.layer.replace("{layer}", str(last))
    layout = hf_layout(replace(table, layer=at_last, whole=()), smaller.config, leaves)
    wanted = {name: tensor.shape for name, tensor in layout.items()}
    width = smaller.config.embed_dim
    wanted |= {name: (width,) if part != "both" else (width, 2 * width) for part, name in names.items()}
    for name, shape in wanted.items():
        found = tuple(source.tensors[name].shape) if name in source.tensors else None
        if found != shape:
            raise HubError(f"{name} is {'missing' if found is None else list(found)}; it should be {list(shape)}.")
    sources = sources_by_leaf(layout, source.tensors)
    placed = [place_leaf(leaf, sources[path], path) for path, leaf in leaves.items()]
    dtype = jnp.dtype(smaller.config.dtype)
    own: dict[str, Any] = {part: jnp.asarray(np.asarray(source.tensors[name]), dtype) for part, name in names.items()}
    norm = {"gain": own.pop("norm")}
    own["both"] = own["both"].T
    return DraftHead(MODULE, {"fusion": own, "norm": norm} | jax.tree.unflatten(jax.tree.structure(segments), placed))


def _check_shared(source: ModelSource, own: str, theirs: str) -> None:
    """Checks that a tensor of the module that is the model's by design equals it.

    Raises:
        ValueError: it does not.
    """
    tensors = source.tensors
    theirs = theirs if theirs in tensors else SHARED["embed_tokens.weight"]  # tied
    if own not in tensors or theirs not in tensors:
        return
    if not equal_tensors(tensors[own], tensors[theirs]):
        raise ValueError(
            f"speculate: {own} differs from {theirs}: a module with an embedding or output matrix of its own is not "
            "read. Give draft:MODEL, or ngram."
        )
