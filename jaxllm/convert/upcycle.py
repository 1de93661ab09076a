"""Sparse upcycling (arXiv:2212.05055): a mixture of experts whose experts are copies of a dense feed-forward layer.

The routing weights of the selected experts sum to one, so the first forward pass is the dense model's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jaxllm.checkpoint import StreamedLeaf
from jaxllm.hub import HubError
from jaxllm.models import BlockConfig, DecoderConfig, MoeConfig, RouterConfig

EXPERTS = "/mlp/experts/"
ROUTER = "/mlp/router"


def upcycled_config(config: DecoderConfig, experts: int, top_k: int) -> DecoderConfig:
    """Architecture with this many experts in place of each feed-forward layer, ``top_k`` of them per token.

    Raises:
        HubError: the model has experts already, feed-forward layers that experts cannot copy, or the sizes are
            illegal.
    """

    def one(block: BlockConfig) -> BlockConfig:
        mlp = block.mlp
        if mlp.mixture is not None:
            raise HubError("the model has experts already; upcycling needs a dense model.")
        if not mlp.gated or mlp.bias:
            raise HubError("the model's feed-forward layers have biases or no gate; experts have a gate and no biases.")
        try:
            moe = MoeConfig(experts, top_k, mlp.hidden, mlp.activation, router=RouterConfig(normalize=True))
        except ValueError as error:
            raise HubError(str(error)) from None
        return replace(block, mlp=moe)

    return replace(config, prefix=tuple(map(one, config.prefix)), pattern=tuple(map(one, config.pattern)))


def upcycled_leaf(path: str, shape: tuple[int, ...], dense: dict[str, StreamedLeaf]) -> StreamedLeaf:
    """Parameter of the mixture of experts, streamed from the dense model's."""
    if path.endswith(ROUTER):
        dtype = next(iter(dense.values())).dtype
        return StreamedLeaf(shape, dtype, _router(path, shape, dtype))
    if EXPERTS not in path:
        return dense[path]
    own = dense[path.replace(EXPERTS, "/mlp/")]
    return StreamedLeaf(shape, own.dtype, _copies(own, shape[1]))


def _router(path: str, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Router weights, initialised like a new model's; the same for the same name."""
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    for _ in range(shape[0]):
        yield (rng.standard_normal(shape[1:], np.float32) * shape[1] ** -0.5).astype(dtype)


def _copies(leaf: StreamedLeaf, count: int) -> Iterator[np.ndarray]:
    """Each layer's values ``count`` times; the leaf comes in slices of any size, one layer is held in memory."""
    size = int(np.prod(leaf.shape[1:]))
    layer, filled = np.empty(size, leaf.dtype), 0
    for piece in leaf.pieces:
        rest = np.asarray(piece).reshape(-1)
        while rest.size:
            part = rest[: size - filled]
            layer[filled : filled + part.size] = part
            filled, rest = filled + part.size, rest[part.size :]
            if filled == size:
                for _ in range(count):
                    yield layer
                layer, filled = np.empty(size, leaf.dtype), 0  # a new buffer: the consumer may still read the last one
