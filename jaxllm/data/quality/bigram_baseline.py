"""Bigram baseline: bits per byte of a byte bigram on the held-out text, which a trained model must beat.

    p(y | x) = w * (c(x, y) + k) / (c(x) + k * 257) + (1 - w) * (c(y) + k) / (c + k * 257)

x is the previous byte or the start of the document; y is one of 256 bytes or the end of the document; c counts in the
training text. k and w are chosen on the training text alone, by cross-validation over eight contiguous parts. (If
single pairs were left out instead, the names in a play would predict each other, k would be too small and the baseline
too weak.) Bits are divided by the bytes of the text, as for a model: the end of a document costs bits and has no bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jaxllm.data.loader import Dataset
from jaxllm.text import Tokenizer

BOUNDARY = 256  # as x: start of the document; as y: end of the document
OUTCOMES = 257
FOLDS = 8
SMOOTHING = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
WEIGHTS = (1.0, 0.999, 0.997, 0.99, 0.97, 0.9, 0.7)


@dataclass(frozen=True)
class BigramBaseline:
    """Result of `bigram_baseline`. A weight of 1.0 means that mixing in the unigram did not help."""

    bits_per_byte: float
    heldout_bytes: int
    train_bytes: int
    smoothing: float
    weight: float


def bigram_baseline(train: Iterable[bytes], heldout: Iterable[bytes]) -> BigramBaseline:
    """Fits a byte bigram on `train` and measures it on `heldout`; each item is a document.

    Raises ValueError if either has no bytes.
    """
    folds = np.stack([_counted(part) for part in np.array_split(_pairs(train), FOLDS)])
    counts, test = folds.sum(0), _counted(_pairs(heldout))
    train_bytes, heldout_bytes = int(counts[:, :BOUNDARY].sum()), int(test[:, :BOUNDARY].sum())
    if not train_bytes or not heldout_bytes:
        raise ValueError("the bigram baseline needs training text and held-out text")
    settings = [(k, weight) for k in SMOOTHING for weight in WEIGHTS]
    k, weight = min(settings, key=lambda one: sum(bits(fold, counts - fold, *one) for fold in folds))
    return BigramBaseline(bits(test, counts, k, weight) / heldout_bytes, heldout_bytes, train_bytes, k, weight)


def bigram_baseline_of(dataset: Dataset, *, max_train_bytes: int = 1 << 24) -> BigramBaseline:
    """Bigram baseline of a data set, over exactly the bytes that its held-out targets cover.

    max_train_bytes: about how many bytes from the beginning of the training text to fit on; 66,049 counts need no more.

    Raises ValueError if nothing is held out, or the training data has no documents (a data source of one's own).
    """
    if dataset.heldout is None:
        raise ValueError("nothing is held out, so there is nothing to measure on; set data.heldout or heldout_fraction")
    documents = getattr(dataset.train, "documents", None)
    if documents is None:
        raise ValueError("the training data has no documents to fit a bigram to; give a data set of documents")
    heldout = _texts(dataset.heldout.targets, dataset.tokenizer, None)
    return bigram_baseline(_texts(documents, dataset.tokenizer, max_train_bytes), heldout)


def bits(test: Int[np.ndarray, "257 257"], counts: Int[np.ndarray, "257 257"], k: float, weight: float) -> float:
    """Total bits of the pairs `test` under the bigram that is fitted to the pairs `counts`; both are counts [x, y]."""
    x, y = np.nonzero(test)
    bigram = (counts[x, y] + k) / (counts.sum(1)[x] + k * OUTCOMES)
    unigram = (counts.sum(0)[y] + k) / (counts.sum() + k * OUTCOMES)
    return float(-(test[x, y] * np.log2(weight * bigram + (1 - weight) * unigram)).sum())


def _pairs(documents: Iterable[bytes]) -> Int[np.ndarray, " pairs"]:
    """Pairs x * 257 + y for each byte and each end of all documents, in order."""
    pairs = [np.empty(0, np.int32)]
    for document in documents:
        text = np.concatenate([[BOUNDARY], np.frombuffer(document, np.uint8), [BOUNDARY]]).astype(np.int32)
        pairs.append(text[:-1] * OUTCOMES + text[1:])
    return np.concatenate(pairs)


def _counted(pairs: Int[np.ndarray, " pairs"]) -> Int[np.ndarray, "257 257"]:
    return np.bincount(pairs, minlength=OUTCOMES * OUTCOMES).reshape(OUTCOMES, OUTCOMES)


def _texts(documents: Iterable[np.ndarray], tokenizer: Tokenizer, limit: int | None) -> Iterator[bytes]:
    for document in documents:
        text = tokenizer.decode_bytes(document if limit is None else document[:limit])
        yield text
        if limit is not None:
            limit -= len(text)
            if limit <= 0:
                return
