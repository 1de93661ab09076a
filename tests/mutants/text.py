"""Mutants of the text room."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "documents_end_before_they_begin",
        "jaxllm/text/tokenizer.py",
        "[np.concatenate([start, one, end]) for one in ids]",
        "[np.concatenate([end, one, start]) for one in ids]",
        ("tests/text/test_tokenizer.py::test_round_trip",),
    ),
    Mutant(
        "streams_cut_characters",
        "jaxllm/text/tokenizer.py",
        "        return self._utf8.decode(raw)\n",
        '        return raw.decode("utf-8", errors="replace")\n',
        ("tests/text/test_tokenizer.py::test_streaming_never_splits_a_character",),
    ),
    Mutant(
        "a_second_text_has_no_leading_space_removed",
        "jaxllm/text/tokenizer.py",
        ("        self._at_start = True\n        return self._utf8"),
        "        return self._utf8",
        ("tests/text/test_sentencepiece.py::test_round_trip_streaming_and_saving",),
    ),
    Mutant(
        "ids_beyond_the_vocabulary_by_one",
        "jaxllm/text/tokenizer.py",
        "max(listed) >= self.vocab_size)",
        "max(listed) > self.vocab_size)",
        ("tests/text/test_tokenizer.py::test_ids_outside_the_vocabulary_are_an_error",),
    ),
]
