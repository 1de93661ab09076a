"""Weight folding: an engine that needs another order of channels, or clusters of heads, serves changed weights."""

from __future__ import annotations

from typing import Any

import jax

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.retention.chai import HeadClusters, calibration_tokens
from jaxllm.models import Functional
from jaxllm.models.channel_order import ChannelOrder
from jaxllm.text import Tokenizer

Folding = ChannelOrder | HeadClusters
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
