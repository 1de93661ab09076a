"""Channel order of block floating point: the model computes the same, and blocks lose less to large channels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.models import Functional, Segments, functional
from jaxllm.models.channel_order import ChannelOrder
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS
from tests.infer import engines
from tests.proofs.harness import proof


@proof("kv_cache", cases=list(engines.MODELS), sample=1, float64=True, bound=1e-10)
def reordered_channels_are_exact(name: str) -> float:
    """Logits of the model with reordered channels, less those of the model; its keys and values are others."""
    model, params = functional(engines.model_of(name, "float64")), engines.params_of(name, "float64")
    order = ChannelOrder(model, params)
    folded = order.fold(params)
    changed = [not np.array_equal(folded["segments"]["0"]["0"]["attention"][n],
                                  params["segments"]["0"]["0"]["attention"][n]) for n in "qkvo"]  # fmt: skip
    assert all(changed)
    tokens = np.random.default_rng(0).integers(0, engines.VOCAB, (2, 30)).astype(np.int32)
    one, two = logits(model, params, tokens), logits(order.model, folded, tokens)
    return float(np.abs(one - two).max())


def logits(model: Functional, params: Any, tokens: np.ndarray) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = model.forward(params, jnp.asarray(tokens), positions, Segments())
    return np.asarray(model.head(params, hidden))


@proof("kv_cache", count=200, sample=3)
def ordered_blocks_lose_less(seed: int) -> None:
    """Values with a large channel in each block: the mean square error in bfp4 is less once channels are in order."""
    rng = np.random.default_rng(seed)
    h, many = int(rng.choice([64, 128])), 200
    sizes = np.ones(h)
    large = np.arange(0, h, 16) + rng.integers(0, 16, h // 16)
    sizes[large] = rng.uniform(15, 25, len(large))
    values = (rng.normal(size=(many, h)) * sizes).astype(np.float32)
    row, error = KV_FORMATS["bfp4"], []
    for order in (np.arange(h), np.argsort(-sizes, kind="stable")):
        data, words = row.encode(jnp.asarray(values[:, order]), (h,), "float32")
        got = np.asarray(row.unpack(data, words.T, (h,), "float32"))
        error.append(float(np.mean(np.square(got - values[:, order]))))
    assert error[1] < 0.85 * error[0]
