"""Data quality: duplicates, languages and contamination in texts whose truth is known."""

import itertools

import pytest

from jaxllm.data import corpus
from jaxllm.data.quality.contamination import find_contamination
from jaxllm.data.quality.corpus_stats import length_stats
from jaxllm.data.quality.dedup import find_duplicates
from jaxllm.data.quality.language import detect_language
from jaxllm.data.quality.word_shingles import ngram_hashes, words

WORDS = [f"w{n}" for n in range(4000)]


def sentence(rng, n):
    return " ".join(rng.choice(WORDS, n))


def test_ngrams_are_equal_where_the_words_are():
    one, two = ngram_hashes("The cat sat, on the mat.", 3), ngram_hashes("a cat SAT on the  mat again", 3)
    assert len(one) == 4
    assert len(set(one.tolist()) & set(two.tolist())) == 3
    assert len(ngram_hashes("two words", 5)) == 1
    assert ngram_hashes("two words", 5) == ngram_hashes("Two, words!", 5)
    assert not len(ngram_hashes("... !", 3))
    assert words("Größe_1 x") == ["größe_1", "x"]


def test_duplicates_of_both_kinds_are_found(rng):
    texts, truth = [], []
    for number in range(120):
        kind = rng.integers(3) if number > 10 else 0
        origins = [n for n in range(number) if truth[n] == n]
        of = int(rng.choice(origins)) if kind and origins else number
        if kind == 0:
            text = sentence(rng, 400)
        elif kind == 1:
            text = "  " + texts[of].upper().replace(" ", ", ", 5) + "!"
        else:
            listed = texts[of].split()
            listed[int(rng.integers(len(listed)))] = "other"  # five or fewer of 396 runs: Jaccard 0.97 or more
            text = " ".join(listed)
        texts.append(text)
        truth.append(of)
    found = find_duplicates(texts)
    # Two copies may have the same word changed: the later one repeats the earlier, which repeats the origin.
    assert found.duplicate_of[found.duplicate_of].tolist() == truth
    assert found.keep.tolist() == [of == n for n, of in enumerate(truth)]
    assert found.exact + found.near == sum(of != n for n, of in enumerate(truth))
    assert (found.similarity[~found.keep] >= 0.8).all()
    only = find_duplicates(texts, threshold=None)
    assert only.near == 0
    assert only.exact <= found.exact + found.near


def test_different_texts_are_kept():
    scenes = corpus.path("train").read_text().split("<|endoftext|>\n")
    assert find_duplicates(scenes[:60]).keep.all()
    assert find_duplicates(["", "", "!", "?"]).keep.tolist() == [True, False, True, True]
    with pytest.raises(ValueError, match=r"threshold is 1.5; legal"):
        find_duplicates([], threshold=1.5)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The quick brown fox jumps over the lazy dog and it is not the end of the story.", "en"),
        ("Der schnelle braune Fuchs springt über den faulen Hund, und das ist nicht das Ende.", "de"),
        ("これは日本語の文章です。", "ja"),
        ("αυτή είναι μια πρόταση", "el"),
        ("xyzzy plugh qux", "undecided"),
        ("1 + 1 = 2 !!!", "undecided"),
        ("", "undecided"),
    ],
)  # fmt: skip
def test_languages(text, code):
    assert detect_language(text) == code


def test_lengths():
    known = length_stats(list(range(1, 101)))
    assert (known.count, known.total, known.least, known.p50, known.p90, known.p99, known.most) == (
        100, 5050, 1, 51, 91, 100, 100,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no document"):
        length_stats([])


def test_contamination(rng):
    items = [sentence(rng, 30) for _ in range(20)] + ["one two three four five six", "too short"]
    documents = [sentence(rng, 200) for _ in range(30)]
    documents[3] = documents[3] + ". " + " ".join(items[5].upper().split()[4:20]) + ", " + documents[3]
    documents[7] = "One two three, four five six!"
    documents[9] = " ".join(items[6].split()[:12])  # one word less than a run
    found = find_contamination(documents, items)
    assert sorted(found.found) == [5, 20]
    assert found.documents == [3, 7]
    assert found.found[20] == 1.0
    assert found.found[5] == pytest.approx(4 / 18)
    assert (found.items, found.short) == (22, 1)
    assert found.share == pytest.approx(2 / 21)


def test_the_wording_of_all_items_is_no_contamination(rng):
    wording = sentence(rng, 20)
    items = [f"{wording} own{number} {sentence(rng, 15)}" for number in range(10)]
    assert not find_contamination([f"{wording} {sentence(rng, 50)}"], items).found
    assert list(find_contamination([items[2]], items).found) == [2]
    with pytest.raises(ValueError, match="no items"):
        find_contamination([], [])
    with pytest.raises(ValueError, match="n-grams of 1"):
        find_contamination([], ["x"], ngram_words=1)


def test_a_similar_document_is_one_of_an_earlier_dropped_one(rng):
    """A chain of documents, each similar to the one before it only: all but the first have an earlier similar one."""
    chain = [sentence(rng, 100).split()]
    for number in range(5):
        chain.append([*chain[-1]])
        chain[-1][15 * number : 15 * number + 5] = sentence(rng, 5).split()
    found = find_duplicates([" ".join(one) for one in chain], threshold=0.8)
    assert found.duplicate_of.tolist() == [0, 0, 1, 2, 3, 4]
    grams = [set(zip(*(one[place:] for place in range(5)), strict=False)) for one in chain]
    exact = [len(a & b) / len(a | b) for a, b in itertools.pairwise(grams)]
    assert found.similarity[1:].tolist() == exact


def test_pairs_above_the_threshold_are_found(rng):
    """Thirty pairs that differ in 8 of 400 words, a Jaccard similarity of 0.82: nearly all are found at 0.6."""
    texts = []
    for _ in range(30):
        listed = sentence(rng, 400).split()
        texts.append(" ".join(listed))
        for place in range(20, 400, 50):
            listed[place] = "other"
        texts.append(" ".join(listed))
    found = find_duplicates(texts, threshold=0.6)
    assert found.keep[0::2].all()
    assert (~found.keep[1::2]).sum() >= 29  # each is missed with a probability below 0.001
