"""Deduplication across a corpus: sorted runs, intervals of keys, candidate pairs, similarities computed from texts."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.data.quality import near_duplicates as nd

pytest.importorskip("rensa")


def records(kind: np.dtype, *rows: tuple[int, ...]) -> np.ndarray:
    return np.array(list(rows), kind)


def test_the_words_decide_whether_texts_are_equal():
    def keys(text: str) -> tuple[int, int]:
        return nd.exact_keys(text, nd.words(text))

    assert keys("The cat, sat.") == keys("the  cat sat")
    assert keys("the cat sat") != keys("the cats at")
    assert keys("!!!") != keys("???")


def test_ngrams_and_similarity():
    assert nd.word_ngrams(["a", "b", "c", "d"], 3) == {"a b c", "b c d"}
    assert nd.word_ngrams(["a", "b"], 3) == {"a b"}
    assert nd.word_ngrams([], 3) == frozenset()
    assert nd.jaccard(frozenset("abc"), frozenset("bcd")) == 0.5
    assert nd.jaccard(frozenset(), frozenset()) == 0.0


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_are_the_longest_that_find_pairs_at_the_threshold(threshold):
    rows = nd.band_rows(threshold, 128)

    def found(rows: int) -> float:
        return 1 - (1 - threshold**rows) ** (128 // rows)

    assert found(rows) >= 0.99
    assert all(found(more) < 0.99 for more in range(rows + 1, 129))


def test_band_keys_of_similar_texts_meet_and_of_others_do_not(rng):
    keys = nd.BandKeys(0.8, 128, 5)
    words = [f"w{n}" for n in rng.integers(0, 10**6, 400)]
    near = [*words[:200], "changed", *words[201:]]
    other = [f"v{n}" for n in rng.integers(0, 10**6, 400)]
    assert len(keys(words)) == keys.bands == 128 // keys.rows
    assert (keys(words) == keys(words)).all()
    assert np.intersect1d(keys(words), keys(near)).size
    assert not np.intersect1d(keys(words), keys(other)).size
    assert not keys([]).size


def test_runs_are_sorted_and_intervals_of_keys_partition_them(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(nd, "RUN_RECORDS", 50)
    [(tmp_path / name).mkdir() for name in "ab"]
    monkeypatch.setattr(nd, "PARTITION_RECORDS", 40)
    writers = [nd.SortedWriter(tmp_path / name, "bands", nd.BAND) for name in "ab"]
    nd.SortedWriter(tmp_path, "none", nd.BAND).close()
    expected = []
    for number in range(60):
        keys = rng.integers(0, 2**64, 3, dtype=np.uint64)
        keys[0] = [0, 2**64 - 1, 2**63][number % 3]  # the ends of the intervals
        writers[number % 3 == 0].add(keys, number)
        expected += [(key, number) for key in keys.tolist()]
    [writer.close() for writer in writers]
    paths = [tmp_path / "a/bands.npy", tmp_path / "b/bands.npy", tmp_path / "none.npy"]
    assert [len(np.load(path)) for path in paths] == [120, 60, 0]
    assert len(list(tmp_path.rglob("*.npy"))) == 3, "the runs are gone"
    assert all((np.diff(np.load(path)["key"].astype(object)) >= 0).all() for path in paths)
    count = nd.partition_count(180)
    assert count == 5
    found = [row for number in range(count) for row in nd.partition(paths, number, count).tolist()]
    assert found == sorted(expected)


def test_a_document_is_equal_to_the_first_with_its_words():
    found = nd.exact_pairs(
        records(nd.EXACT, (1, 1, 4), (1, 2, 0), (1, 2, 5), (1, 2, 9), (2, 2, 1), (3, 0, 2), (3, 0, 3))
    )
    assert found.tolist() == [(3, 2), (5, 0), (9, 0)]
    assert not len(nd.exact_pairs(np.empty(0, nd.EXACT)))


def test_candidates_are_earlier_documents_with_an_equal_key():
    found = nd.candidate_pairs(records(nd.BAND, (1, 3), (1, 7), (1, 9), (2, 3), (2, 7), (5, 1)))
    assert found.tolist() == [(7, 3), (9, 3), (9, 7)]
    assert not len(nd.candidate_pairs(np.empty(0, nd.BAND)))


def test_candidates_of_a_large_group_are_the_first_and_the_last_before():
    found = nd.candidate_pairs(records(nd.BAND, *((7, number) for number in range(100))))
    assert sorted(other for one, other in found.tolist() if one == 50) == [0, 1, 2, 3, 46, 47, 48, 49]
    assert len(found) < 100 * 2 * nd.NEIGHBOURS


def test_pairs_of_one_input_file(tmp_path):
    one, other = tmp_path / "0.npy", tmp_path / "1.npy"
    key = nd.document_id
    nd.save_sorted(one, records(nd.PAIR, (key(0, 5), 1), (key(1, 0), 3), (key(2, 0), 9)))
    nd.save_sorted(other, records(nd.PAIR, (key(1, 0), 3), (key(1, 2), 0)))
    assert nd.pairs_of_file([one, other], 1).tolist() == [(key(1, 0), 3), (key(1, 2), 0)]
    assert nd.pairs_of_file([], 1).tolist() == []


def test_similar_documents_are_decided_by_the_texts():
    texts = {1: "a b c d e f g h i j", 2: "a b c d e f g h i k", 3: "x b c d e f g h y z", 4: "a b c d e f g h i j k"}
    pairs = records(nd.PAIR, (2, 1), (3, 1), (3, 2), (4, 1), (4, 2))
    found = list(nd.similar_documents(pairs, texts.__getitem__, 0.7, 2))
    assert [(one, other) for one, other, _ in found] == [(2, 1), (4, 1)]
    assert [share for *_, share in found] == [8 / 10, 9 / 10]
    assert [one[0] for one in nd.similar_documents(pairs, texts.__getitem__, 8 / 10, 2)] == [2, 4], "at the threshold"
    assert [one[0] for one in nd.similar_documents(pairs, texts.__getitem__, 0.81, 2)] == [4]
