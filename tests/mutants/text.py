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
    Mutant(
        "content_is_marked_at_the_ends_of_whole_names_only",
        "jaxllm/text/chat_template/content_marks.py",
        "    edges = {c for name in ordered for c in (name[0], name[-1]) if not (c.isalnum() or c.isspace())}\n",
        "    edges = {c for name in ordered for c in (name[-1],) if not (c.isalnum() or c.isspace())}\n",
        ("tests/text/test_special_tokens.py::test_names_in_pieces",),
    ),
    Mutant(
        "strings_of_the_template_are_marked",
        "jaxllm/text/chat_template/content_marks.py",
        "        return text if found[1] is not None else self._marks[text[0]] + text[1:]\n",
        "        return self._marks.get(text[0], text[0]) + text[1:]\n",
        ("tests/text/test_special_tokens.py::test_what_a_template_looks_for_in_content_is_found",),
    ),
]
