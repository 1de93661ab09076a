"""Detokenizer and beam search by hand: stop strings in any pieces, beams beside an exhaustive search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jaxllm.infer.engine.beam_search import BeamSearch, length_normalised_score
from jaxllm.text import ByteTokenizer
from jaxllm.text.detokenizer import Detokenizer

TOKENIZER = ByteTokenizer()


def pushed(text: str, stops: list[str], **options: bool) -> tuple[list[str], bool]:
    """(texts given out, a byte at a time, until a stop string; whether one was found)."""
    reader, given = Detokenizer(TOKENIZER, stops, **options), []
    for token in TOKENIZER.encode(text).tolist():
        part, stopped = reader.push(token)
        given.append(part)
        if stopped:
            return given, True
    return [*given, reader.end()], False


@pytest.mark.parametrize("stops", [["abc"], ["bc", "abc"], ["ab", "abc", "b"], ["aa", "cab"], ["é", "ca"]])
def test_stop_strings_in_any_pieces(stops):
    """All texts of six letters: what is given out ends where the first stop string begins, and never in one."""
    for letters in itertools.product("abcé"[: 3 + ("é" in stops)], repeat=5):
        text = "".join(letters)
        # The stop string that is complete first; of those the one that begins first.
        ends = [n for n in range(1, 6) if any(text[:n].endswith(stop) for stop in stops)]
        wanted = (
            text
            if not ends
            else min((text[: ends[0] - len(stop)] for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        )
        given, stopped = pushed(text, stops)
        assert ("".join(given), stopped) == (wanted, bool(ends)), text


def test_a_stop_string_may_be_part_of_the_text():
    assert "".join(pushed("xabcy", ["abc"], include=True)[0]) == "xabc"


def test_beams_by_hand(rng):
    """As many beams as there are texts: the search is exhaustive, and the best by the normalised score comes first."""
    table = np.log(rng.dirichlet(np.ones(3), size=40))
    for penalty in (0.0, 0.5, 2.0):
        search = BeamSearch(width=27, max_tokens=3, stop_ids=(2,), length_penalty=penalty)

        def after(tokens: tuple[int, ...]) -> list[tuple[int, float]]:
            row = table[sum((token + 1) * 3**n for n, token in enumerate(tokens))]
            return sorted(enumerate(row.tolist()), key=lambda pair: -pair[1])

        while search.advance([after(beam.tokens) for beam in search.beams]):
            pass
        scores = {}
        for length in (1, 2, 3):
            for tokens in itertools.product(range(3), repeat=length):
                if 2 in tokens[:-1] or (length < 3 and tokens[-1] != 2):
                    continue
                total = sum(dict(after(tokens[:n]))[token] for n, token in enumerate(tokens))
                scores[tokens] = total / length**penalty
        best = sorted(scores, key=lambda tokens: -scores[tokens])
        assert [beam.tokens for beam in search.ended] == best
        assert search.ended[0].finish == ("stop" if best[0][-1] == 2 else "length")
    assert length_normalised_score(-6.0, 4, 0.5) == -3.0
    assert math.isfinite(length_normalised_score(-1.0, 0, 1.0))
