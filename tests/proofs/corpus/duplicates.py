"""Deduplication against brute force, and its memory."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from scipy import sparse

from benchmarks.corpus.preparation import peak_memory
from jaxllm.data.prepare.corpus_config import CorpusConfig, CorpusSource, DedupRule
from jaxllm.data.prepare.preparation import prepare_corpus
from jaxllm.data.quality.word_shingles import words
from jaxllm.data.token_files import open_tokens
from jaxllm.text import ByteTokenizer
from tests.proofs.harness import proof

ALSO_COVERS = ("benchmarks/corpus/*.py",)

DOCUMENTS, THRESHOLD, NGRAM = 5_000, 0.8, 5


def planted_documents(rng: np.random.Generator, count: int = DOCUMENTS) -> list[str]:
    """Documents of 60 to 300 words from 30 topics, so that unrelated ones share n-grams too; a third are copies of
    others with 0 to 5% of their words changed, in random order."""
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    vocabulary = np.array([first + second for first in syllables for second in syllables])
    phrases = [[rng.choice(vocabulary, 12).tolist() for _ in range(6)] for _ in range(30)]
    made: list[list[str]] = []
    while len(made) < count:
        if made and rng.random() < 0.33:
            text = list(made[rng.integers(len(made))])
            for place in rng.integers(0, len(text), int(rng.uniform(0, 0.05) * len(text))):
                text[place] = str(rng.choice(vocabulary))
        else:
            topic = phrases[rng.integers(30)]
            text = rng.choice(vocabulary, rng.integers(60, 300)).tolist()
            for _ in range(rng.integers(0, 4)):
                place = int(rng.integers(len(text)))
                text[place:place] = topic[rng.integers(6)]
        made.append(text)
    return [" ".join(made[number]) for number in rng.permutation(count)]


def similarities(texts: list[str]) -> sparse.csr_matrix:
    """Jaccard similarity of every pair of texts that share an n-gram, by a product of sparse matrices."""
    numbers: dict[str, int] = {}
    rows, columns = [], []
    for row, text in enumerate(texts):
        listed = words(text)
        grams = {" ".join(listed[place : place + NGRAM]) for place in range(len(listed) - NGRAM + 1)}
        rows += [row] * len(grams)
        columns += [numbers.setdefault(gram, len(numbers)) for gram in grams]
    has = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), (len(texts), len(numbers)))
    shared = (has @ has.T).tocoo()
    sizes = np.asarray(has.sum(axis=1)).ravel()
    shares = shared.data / (sizes[shared.row] + sizes[shared.col] - shared.data)
    return sparse.csr_matrix((shares, (shared.row, shared.col)), shared.shape)


@proof("corpus", count=5, sample=1, bound={"missed": 0.01, "false": 0.001}, counts=("duplicates", "documents"))
def dedup_is_brute_force(seed: int) -> dict[str, float]:
    """5,000 documents with planted near duplicates of similarities about the threshold: documents with an earlier one
    of Jaccard similarity 0.8 or more that stay, of all such; documents dropped without one, of all."""
    rng = np.random.default_rng(seed)
    texts = planted_documents(rng)
    earlier = sparse.tril(similarities(texts), -1).tocsr()
    similar = np.asarray(earlier.max(axis=1).todense()).ravel() >= THRESHOLD
    assert 500 < similar.sum() < 3000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(4):
            rows = texts[number * DOCUMENTS // 4 : (number + 1) * DOCUMENTS // 4]
            (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        source = CorpusSource("s", (str(folder / "*.jsonl"),), "none")
        config = CorpusConfig(str(folder / "out"), "byte", (source,), dedup=DedupRule(THRESHOLD, NGRAM))
        corpus = prepare_corpus(config)
        tokenizer = ByteTokenizer()
        shards = [open_tokens(folder / "out" / one["file"], tokenizer) for one in corpus.manifest["shards"]]
        kept = [tokenizer.decode([int(token) for token in one[1:-1]]) for shard in shards for one in shard]
    place = 0
    dropped = np.ones(DOCUMENTS, bool)
    for number, text in enumerate(texts):  # those kept are in order
        if place < len(kept) and kept[place] == text and not (similar[number] and _twice(texts, kept, number, place)):
            dropped[number] = False
            place += 1
    assert place == len(kept)
    return {
        "missed": float((similar & ~dropped).sum() / similar.sum()),
        "false": float((dropped & ~similar).sum() / DOCUMENTS),
        "duplicates": float(similar.sum()),
        "documents": float(DOCUMENTS),
    }


def _twice(texts: list[str], kept: list[str], number: int, place: int) -> bool:
    """Whether an equal text comes before, so that this one is a copy and the kept text is another."""
    return texts[number] in kept[:place]


CASES = ((2_000, 500, 1 << 14), (100_000, 10_000, 1 << 19))
"""(documents, documents of a file, records that a task takes): the last as it is by default."""


@proof("corpus", cases=CASES, sample=1, quick=CASES[:1], bound=0.15, parallel=False)
def memory_is_flat(case: tuple[int, int, int]) -> float:
    """Memory of its own that preparing ten times as many documents takes at most, over that of the fewer, less one."""
    documents, each, partition = case
    few, many = (peak_memory(count, each, partition)["mib"] for count in (documents, 10 * documents))
    assert few > 30  # MiB: it was measured
    return many / few - 1
