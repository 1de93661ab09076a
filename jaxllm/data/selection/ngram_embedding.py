"""N-gram embedding of text: hashed token n-grams at random signs, a fixed vector for each window of a source.

Cheap, deterministic and offline: no model is needed, and the same tokens give the same vector on every machine. The
tokens are those that the small runs train on, so token files and conversations are embedded too.

The counts of n-grams of each order are hashed into buckets, damped by a square root, and projected at random signs onto
the embedding's width; each order has the norm ``1 / sqrt(orders)``, so an embedding has the norm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer

from jaxllm.data.token_files import TokenDocuments

NAME = "ngrams-1"  # it must change if the embedding of a text ever changes
WIDTH = 256
ORDERS = (1, 2, 3)
BUCKETS = 1 << 16
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def sample_windows(
    documents: TokenDocuments, count: int, length: int, seed: int
) -> list[Integer[np.ndarray, " window"]]:
    """Windows of at most ``length`` tokens, each inside one document and drawn as the rows of training are, by tokens.

    Args:
        count: number of windows.
        seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    ends = np.cumsum(documents.lengths)
    places = np.sort(rng.integers(0, int(ends[-1]), count))
    found = []
    for place in places:
        number = int(np.searchsorted(ends, place, "right"))
        start, size = int(documents.starts[number]), int(documents.lengths[number])
        first = min(int(place - (ends[number] - size)), max(0, size - length))
        found.append(documents.tokens[start + first : start + min(size, first + length)])
    return found


def embed_tokens(tokens: Integer[np.ndarray, " window"]) -> Float[np.ndarray, " D"]:
    """N-gram embedding of a window of tokens, float64 [256], of norm 1; zero for no tokens."""
    parts = [_embed_order(tokens.astype(np.uint64), order) for order in ORDERS]
    found = np.sum(parts, axis=0)
    norm = np.linalg.norm(found)
    return found / norm if norm else found


def embed_windows(windows: Sequence[Integer[np.ndarray, " _"]]) -> Float[np.ndarray, "N D"]:
    """N-gram embeddings of windows of tokens, float64 [N, 256]."""
    return np.stack([embed_tokens(one) for one in windows])


def _embed_order(tokens: Integer[np.ndarray, " window"], order: int) -> Float[np.ndarray, " D"]:
    """Embedding of the n-grams of one order, of norm 1."""
    if len(tokens) < order:
        return np.zeros(WIDTH)
    hashed = np.full(len(tokens) - order + 1, order, np.uint64)
    for place in range(order):
        hashed = _mixed(hashed + tokens[place : len(tokens) - order + 1 + place])
    buckets, counts = np.unique(hashed % np.uint64(BUCKETS), return_counts=True)
    signed = _mixed(buckets * np.uint64(len(ORDERS)) + np.uint64(order))
    values = np.sqrt(counts) * np.where(signed >> np.uint64(63), 1.0, -1.0)
    found = np.bincount((signed % np.uint64(WIDTH)).astype(np.int64), values, WIDTH)
    norm = np.linalg.norm(found)
    return found / norm if norm else found


def _mixed(values: Integer[np.ndarray, " N"]) -> Integer[np.ndarray, " N"]:
    """Hash of 64-bit integers, modulo 2**64."""
    values = (values ^ (values >> np.uint64(29))) * _MULTIPLIER
    return values ^ (values >> np.uint64(32))
