"""Weight folding: an engine that needs another order of channels, clusters of heads, or rotated latents folds it in."""

from __future__ import annotations

from typing import Any

import jax

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.latent_rotation import LatentRotation
from jaxllm.infer.runner.retention.chai import HeadClusters, calibration_tokens
from jaxllm.models import Functional
from jaxllm.models.channel_order import ChannelOrder
from jaxllm.text import Tokenizer

Folding = ChannelOrder | HeadClusters | LatentRotation
"""Has ``model``, and ``fold``, which makes its weights of the given model's."""


def folding_of(
    config: EngineConfig,
    model: Functional,
    params: Any,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    mesh: jax.sharding.Mesh | None,
) -> Folding | None:
    """Folding that an engine's configuration asks for; None: weights are served as they are.

    Raises:
        ValueError: it does not go with the mesh, the model or its weights.
    """
    on_mesh = mesh is not None and mesh.size > 1
    if config.mla != "exact":
        tensor = 1 if mesh is None else mesh.shape.get("tensor", 1)
        if tensor == 1:
            raise ConfigError(without_tensor(config.mla))
        rotation = config.mla.partition(":")[2] or "pca"
        return LatentRotation(model, params, tensor, rotation, calibration_tokens(vocab_size, tokenizer), mesh)
    if config.orders_channels:
        if on_mesh:
            raise ConfigError(
                f"engine: kv_dtype = {config.kv_dtype!r} reorders channels on one device; on a mesh use kivi4 or int4."
            )
        return ChannelOrder(model, params)
    if config.head_clusters == 1:
        return None
    if on_mesh:
        raise ConfigError(
            f"engine: head_clusters = {config.head_clusters} (chai) folds weights on one device; leave --mesh out."
        )
    return HeadClusters(model, params, config.head_clusters, calibration_tokens(vocab_size, tokenizer))


def without_tensor(mla: str) -> str:
    """Message: latents in slices on a mesh without tensor shards."""
    return f"mla = {mla!r} slices latents over tensor, and the mesh has none: give tensor=2 or more, or leave mla out."
