"""The bigram baseline against a direct count, its limits, and text of known entropy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.data.quality import bigram_baseline

DOCUMENTS = st.lists(st.binary(max_size=30), min_size=1, max_size=6)


@given(train=DOCUMENTS, heldout=DOCUMENTS)
@settings(max_examples=8)
def test_equals_counting_by_hand(train, heldout):
    if not (any(train) and any(heldout)):
        with pytest.raises(ValueError, match="needs training text and held-out text"):
            bigram_baseline.bigram_baseline(train, heldout)
        return
    result = bigram_baseline.bigram_baseline(train, heldout)

    def pairs(documents):
        for document in documents:
            symbols = ["start", *document, "end"]
            yield from itertools.pairwise(symbols)

    seen, k, w = list(pairs(train)), result.smoothing, result.weight
    bits = 0.0
    for x, y in pairs(heldout):
        both = sum(pair == (x, y) for pair in seen)
        bigram = (both + k) / (sum(pair[0] == x for pair in seen) + 257 * k)
        unigram = (sum(pair[1] == y for pair in seen) + k) / (len(seen) + 257 * k)
        bits -= math.log2(w * bigram + (1 - w) * unigram)
    assert result.bits_per_byte == pytest.approx(bits / sum(map(len, heldout)))
    assert (result.train_bytes, result.heldout_bytes) == (sum(map(len, train)), sum(map(len, heldout)))


def test_probabilities_sum_to_one(rng):
    counts, total = rng.integers(0, 5, (257, 257)), 0.0
    for y in range(257):
        one = np.zeros((257, 257), np.int64)
        one[42, y] = 1
        total += 2 ** -bigram_baseline.bits(one, counts, 0.3, 0.9)
    assert total == pytest.approx(1.0, rel=1e-12)


def test_reaches_the_entropy_of_a_markov_chain(rng):
    """A chain over two letters with flips of probability 0.1 has H(0.1) = 0.469 bits per byte."""
    text = (97 + np.cumsum(rng.random(200_000) < 0.1) % 2).astype(np.uint8).tobytes()
    result = bigram_baseline.bigram_baseline([text[:100_000]], [text[100_000:]])
    assert result.bits_per_byte == pytest.approx(0.469, abs=0.015)


def test_mixes_in_the_unigram_where_that_helps(rng):
    """Letters drawn independently, too little text to fill 26 x 26 pairs."""
    text = rng.choice(26, 1200, p=np.arange(26, 0, -1) / 351).astype(np.uint8).tobytes()
    assert bigram_baseline.bigram_baseline([text], [text]).weight < 1.0
