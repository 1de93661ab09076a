"""Quality rules, masks and languages of a corpus against tables of cases, each just inside or outside a limit.

The words of the cases are chosen so that the limits can be counted by hand: w(n) has n different words of six letters.
"""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm.config import ConfigError
from jaxllm.data.prepare.corpus_config import (
    Blocklist,
    CorpusConfig,
    CorpusSource,
    LanguageRule,
    PIIMasks,
    QualityRules,
)
from jaxllm.data.prepare.document_rules import DocumentRules
from jaxllm.files import DataError

pytest.importorskip("datatrove")

SOURCE = CorpusSource("s", ("a.jsonl",), "CC0")


def rules(**tables) -> DocumentRules:
    return DocumentRules(CorpusConfig("out", "byte", (SOURCE,), **tables))


def w(count: int, first: int = 0, letters: str = "qwrtzp") -> str:
    """Different words of six letters."""
    return " ".join(
        "".join(letters[(number // 6**place) % 6] for place in range(6)) for number in range(first, first + count)
    )


STOP = "the of "
GOPHER = [
    ("at least 50 words", STOP + w(48), ""),
    ("fewer than 50 words", STOP + w(47), "short_doc"),
    ("marks are no words", STOP + w(47) + " ! ? ;", "short_doc"),
    ("mean length of 3", "the and " + "abc " * 50, ""),
    ("mean length below 3", "the of " + "abc " * 50, "below_avg_threshold"),
    ("mean length of 10", "the that " + "abcdefghij " * 48 + "abcdefghijklmnopqrstuvw", ""),
    ("mean length above 10", "the of " + "abcdefghijk " * 100, "above_avg_threshold"),
    ("one hash in ten words", STOP + w(88) + " #" * 10, ""),
    ("more hashes", STOP + w(88) + " #" * 10 + "#" * 2, "too_many_hashes"),
    ("more ellipses than one in ten words", STOP + w(60) + " …" * 7, "too_many_ellipsis"),
    ("90% of lines are bullets", "\n".join([STOP + w(40)] + [f"- {w(1, 50 + n)}" for n in range(9)]), ""),
    ("more than 90% of lines are bullets", "\n".join(["- " + STOP + w(40)] + [f"- {w(1, 50 + n)}" for n in range(9)]),
     "too_many_bullets"),
    ("30% of lines end in an ellipsis", "\n".join(w(10, 10 * n) + ("..." if n < 3 else " the of") for n in range(10)),
     ""),
    ("more than 30% end in an ellipsis", "\n".join(w(10, 10 * n) + ("..." if n < 4 else " the of") for n in range(10)),
     "too_many_end_ellipsis"),
    ("80% of words have a letter", STOP + w(78) + " 123456" * 20, ""),
    ("fewer than 80% have a letter", STOP + w(77) + " 123456" * 21, "below_alpha_threshold"),
    ("one stop word", "the " + w(60), "enough_stop_words"),
    ("the same stop word twice", "the the " + w(60), "enough_stop_words"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in GOPHER], ids=[case[0] for case in GOPHER])
def test_gopher_quality(text, expected):
    _, rule, _ = rules(quality=QualityRules(("gopher_quality",))).apply(text)
    assert rule == (f"gopher_quality_{expected}" if expected else "")


def lines(different: int, repeated: int, each: int = 8) -> str:
    """Lines of `each` words: different ones, and more copies of the first."""
    return "\n".join([w(each, each * n) for n in range(different)] + [w(each)] * repeated)


def gram(n: int, times: int, rest: int) -> str:
    """The same n words again and again, each time after different ones."""
    return " ".join(f"{w(n)} {w(rest, 100 + rest * number)}" for number in range(times))


REPETITION = [
    ("different lines", lines(10, 0), ""),
    ("few short lines twice", "\n".join([w(20, 20 * n) for n in range(10)] + ["x"] * 4), ""),
    ("more than 30% of the lines repeat a line", "\n".join([w(30, 30 * n) for n in range(6)] + ["x"] * 5),
     "dup_line_frac"),
    ("more than 20% of characters are in repeated lines", lines(7, 3), "dup_line_char_frac"),
    ("more than 30% of the paragraphs repeat a paragraph",
     "\n\n".join([w(30, 30 * n) for n in range(6)] + ["x"] * 5), "dup_para_frac"),
    ("more than 20% of characters are in repeated paragraphs", lines(7, 3).replace("\n", "\n\n"), "dup_para_char_frac"),
    ("two words are 13/33 of the text", gram(2, 11, 1), "top_2_gram"),
    ("two words are 15% of the text", gram(2, 11, 11), ""),
    ("three words are 20% of the text", gram(3, 9, 13).replace(" ", "  "), ""),
    ("three words are twice among 20", " ".join([w(5), w(5, 50), w(5), w(5, 60)]), "top_3_gram"),
    ("15 words are twice among 60", " ".join([w(15), w(15, 50), w(15), w(15, 90)]), "duplicated_5_n_grams"),
    ("five words are twice among 60", " ".join([w(5), w(25, 50), w(5), w(25, 90)]), ""),
    ("ten words are twice among 75: 11.5% is above the limit of ten words only",
     " ".join([w(10), w(27, 50), w(10), w(28, 90)]), "duplicated_10_n_grams"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in REPETITION], ids=[case[0] for case in REPETITION])
def test_gopher_repetition(text, expected):
    _, rule, _ = rules(quality=QualityRules(("gopher_repetition",))).apply(text)
    assert rule == (f"gopher_repetition_{expected}" if expected else "")


GOOD = "\n".join(f"{w(4, 4 * n)}." for n in range(5))
C4 = [
    ("five sentences", GOOD, GOOD, ""),
    ("four sentences", "\n".join(GOOD.split("\n")[:4]), None, "too_few_sentences"),
    ("five sentences on one line", GOOD.replace("\n", " "), GOOD.replace("\n", " "), ""),
    ("a line without an end mark", GOOD + "\nno end of this line", GOOD, ""),
    ("a line that trails off", GOOD + "\nno end of this line...", GOOD, ""),
    ("a line of two words", GOOD + "\ntwo words.", GOOD, ""),
    ("a line about Javascript", GOOD + "\nPlease enable Javascript now.", GOOD, ""),
    ("a line about cookies", GOOD + "\nThis page uses cookies.", GOOD, ""),
    ("a long word", GOOD + "\nsome long " + "x" * 1001 + ".", GOOD, ""),
    ("lorem ipsum", GOOD + "\nLorem ipsum dolor sit amet.", None, "lorem_ipsum"),
    ("a curly bracket", GOOD + "\nif (x) { return y; } is code.", None, "curly_bracket"),
    ("citations", GOOD + "\nThis is a fact[12] of [citation needed] note.", GOOD + "\nThis is a fact of  note.", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kept", "expected"), [case[1:] for case in C4], ids=[case[0] for case in C4])
def test_c4(text, kept, expected):
    found, rule, _ = rules(quality=QualityRules(("c4",))).apply(text)
    assert rule == (f"c4_{expected}" if expected else "")
    assert kept is None or found == kept


FINEWEB = [
    ("lines that end in marks", "\n".join(f"{w(8, 8 * n)}." for n in range(10)), ""),
    ("3 of 25 lines, 12%", "\n".join(w(8, 8 * n) + "." * (n < 3) for n in range(25)), ""),
    ("2 of 25 lines, 8%", "\n".join(w(8, 8 * n) + "." * (n < 2) for n in range(25)), "line_punct_ratio"),
    ("two of three lines are short", "\n".join(f"{w(3 if n % 3 else 20, 30 * n)}." for n in range(9)), ""),
    ("three of four lines are short", "\n".join(f"{w(3 if n % 4 else 20, 30 * n)}." for n in range(12)),
     "short_line_ratio"),
    ("9% of characters repeat", "\n".join([f"{w(10, 10 * n)}." for n in range(10)] + [f"{w(10)}."]), ""),
    ("17% of characters repeat", "\n".join([f"{w(10, 10 * n)}." for n in range(10)] + [f"{w(10)}."] * 2),
     "char_dup_ratio"),
    ("a list of words", "\n".join(f"{w(1, n)}{'x' * 30}." for n in range(20)), "list_ratio"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in FINEWEB], ids=[case[0] for case in FINEWEB])
def test_fineweb(text, expected):
    _, rule, _ = rules(quality=QualityRules(("fineweb",))).apply(text)
    assert rule == (f"fineweb_{expected}" if expected else "")


PII = [
    ("write to ann.lee+news@mail.example.org today", "write to <m> today", ["emails"]),
    ("a@b.co, c_d@e-f.com", "<m>, <m>", ["emails"]),
    ("at 5@6 or @name or user@host", "at 5@6 or @name or user@host", []),
    ("host 8.8.8.8 answers", "host <i> answers", ["ips"]),
    ("8.8.4.4 and x@y.org", "<i> and <m>", ["emails", "ips"]),
    ("router 192.168.1.1, localhost 127.0.0.1, 10.0.0.7", "router 192.168.1.1, localhost 127.0.0.1, 10.0.0.7", []),
    ("version 1.2.3", "version 1.2.3", []),
    ("999.1.1.1 is no address, but its end is masked", "9<i> is no address, but its end is masked", ["ips"]),
    ("no address here", "no address here", []),
]


@pytest.mark.parametrize(("text", "expected", "masked"), PII, ids=[case[0][:20] for case in PII])
def test_masks(text, expected, masked):
    found, rule, changed = rules(pii=PIIMasks(email_mask="<m>", ip_mask="<i>")).apply(text)
    assert (found, rule, changed) == (expected, "", masked)


def test_masks_are_chosen():
    found, _, changed = rules(pii=PIIMasks(emails=False, ip_mask="x")).apply("a@b.com 8.8.8.8")
    assert (found, changed) == ("a@b.com x", ["ips"])


def test_languages():
    english = "The committee has decided that the old bridge over the river will be closed until the spring."
    german = "Der Ausschuss hat beschlossen, dass die alte Brücke über den Fluss bis zum Frühling gesperrt bleibt."
    only = rules(language=LanguageRule(("en",)))
    assert only.apply(english)[1] == ""
    assert only.apply(german)[1] == "language_de"
    assert rules(language=LanguageRule(("en", "de"))).apply(german)[1] == ""
    assert rules(language=LanguageRule(("en",), min_probability=1.0)).apply(english)[1] == "language_undecided"
    with pytest.raises(ConfigError, match="no language 'english'; legal: "):
        rules(language=LanguageRule(("english",)))


def test_limits_can_be_set_and_are_checked():
    config = QualityRules(("gopher_quality",), gopher_quality={"min_doc_words": 3})
    assert rules(quality=config).apply("the of three")[1] == ""
    with pytest.raises(ConfigError, match=r"no argument 'min_doc_word'. Did you mean 'min_doc_words'\?"):
        rules(quality=dataclasses.replace(config, gopher_quality={"min_doc_word": 3}))


def test_a_text_without_words_is_dropped_by_name():
    assert (
        rules(quality=QualityRules(("gopher_quality",), gopher_quality={"min_doc_words": 0})).apply("\x00 ! \n")[1]
        == "no_words"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A Bad word.", "blocked_word"),
        ("badly said, and embad too", ""),
        ("two\tbad", "blocked_word"),
        ("the very worst (very  worst)", "blocked_word"),
        ("very, worst", ""),
        ("これは悪い文", "blocked_word"),
        ("c++!", "blocked_word"),
        ("", ""),
    ],
)
def test_blocklist(tmp_path, text, expected):
    (tmp_path / "list.txt").write_text("bad\n\nVery Worst\n悪い\nc++\n", encoding="utf-8")
    found, rule, _ = rules(blocklist=Blocklist((str(tmp_path / "list.txt"),))).apply(text)
    assert rule == (expected or ("" if text else "no_text"))
    assert found == text


def test_a_blocklist_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    for name, message in [("absent.txt", "No such file"), ("empty.txt", "no words in"), ("latin.txt", "utf-8")]:
        with pytest.raises(DataError, match=message):
            rules(blocklist=Blocklist((str(tmp_path / name),)))
    with pytest.raises(ConfigError, match="is a URL"):
        Blocklist(("s3://b/list.txt",))
    with pytest.raises(ConfigError, match="empty"):
        Blocklist(())
