"""Data sources: documents, held-out text, and an error with file and row for each bad input."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.data import corpus
from jaxllm.data.sources.documents import hold_out
from jaxllm.data.sources.records import jsonl_files
from jaxllm.data.sources.remote_files import file_format, find_files
from jaxllm.data.sources.text_files import TextFiles, bundled
from jaxllm.files import DataError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(documents):
    return [document.text for document in documents]


def test_text_separators(tmp_path):
    file = write(tmp_path / "a.txt", "one\n\ntwo\n<|endoftext|>\nthree\r\n\n \nfour")
    assert texts(TextFiles((file,))) == ["one\n\ntwo\n", "three\r\n\n \nfour"]
    assert texts(TextFiles((file,), "")) == ["one\n", "two\n<|endoftext|>\nthree\r\n", "four"]
    assert texts(TextFiles((file,), None)) == [file.read_bytes().decode()]
    assert [document.row for document in TextFiles((file,))] == [1, 5]
    assert [document.row for document in TextFiles((file,), "")] == [1, 3, 8]


def test_a_file_without_separator_is_one_document(tmp_path):
    files = tuple(write(tmp_path / f"{n}.txt", f"text\n\n{n}") for n in range(3))
    assert texts(TextFiles(files)) == ["text\n\n0", "text\n\n1", "text\n\n2"]


def test_byte_order_marks_and_empty_documents_are_not_text(tmp_path):
    file = write(tmp_path / "a.txt", "\ufeff<|endoftext|>\nA\n<|endoftext|>\n \n<|endoftext|>\nB")
    assert texts(TextFiles((file,))) == ["A\n", "B"]
    rows = write(tmp_path / "a.jsonl", '\ufeff{"text": "A"}\n\n{"text": ""}\n{"text": "B", "x": 1}')
    assert texts(jsonl_files((rows,))) == ["A", "B"]
    assert [document.row for document in jsonl_files((rows,))] == [1, 4]


def test_content_hash_follows_content_and_rules_not_names(tmp_path):
    one, two = write(tmp_path / "1.txt", "same"), write(tmp_path / "2.txt", "same")
    assert TextFiles((one,)).content_hash == TextFiles((two,)).content_hash
    others = [
        TextFiles((one,)),
        TextFiles((one,), ""),
        TextFiles((one, two)),
        jsonl_files((one,)),
        jsonl_files((one,), "x"),
    ]
    assert len({other.content_hash for other in others}) == len(others)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "cut', r"a.jsonl:3: not valid JSON \(.* at column 10\)"),
        ("[1]", "a.jsonl:3: a list; a row must be an object with 'text'"),
        ('{"txet": "x"}', r"a.jsonl:3: no field 'text', only \['txet'\]; did you mean text_field='txet'"),
        ('{"text": 5}', "a.jsonl:3: 'text' is a int; it must be text"),
        ('{"text": "\\ud800"}', "a.jsonl:3: 'text' is not valid Unicode"),
        (b'{"text": "\xff"}', "a.jsonl:3: not UTF-8 .byte 0xff"),
    ],
)
def test_bad_jsonl_rows(tmp_path, row, message):
    row = row if isinstance(row, bytes) else row.encode()
    file = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + row + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=message):
        list(jsonl_files((file,)))


@pytest.mark.parametrize("separator", ["<|endoftext|>", "", None])
def test_bad_bytes_in_text_name_the_row(tmp_path, separator):
    file = write(tmp_path / "a.txt", b"one\n\n<|endoftext|>\nfour\nfi\xe9ve\n")
    with pytest.raises(DataError, match=r"a.txt:5: not UTF-8"):
        list(TextFiles((file,), separator))


def test_missing_empty_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"gone.txt: no such file; legal: .*'shakespeare'"):
        find_files([str(tmp_path / "gone.txt")])
    with pytest.raises(DataError, match=r"a.txt: is empty"):
        find_files([str(write(tmp_path / "a.txt", ""))])
    with pytest.raises(DataError, match=r"is a folder"):
        find_files([str(tmp_path)])
    with pytest.raises(DataError, match=r"b.txt: contains no text"):
        list(TextFiles((write(tmp_path / "b.txt", " \n\n"),)))
    with pytest.raises(DataError, match=r"b.jsonl: contains no text"):
        list(jsonl_files((write(tmp_path / "b.jsonl", '{"text": ""}\n'),)))


def test_kinds(tmp_path):
    assert file_format([tmp_path / "a.txt", tmp_path / "b.md"], "auto") == "text"
    assert file_format([tmp_path / "a.csv"], "jsonl") == "jsonl"
    with pytest.raises(DataError, match=r"a.csv: the suffix names no known format. Set source_format"):
        file_format([tmp_path / "a.csv"], "auto")
    with pytest.raises(DataError, match=r"mixes file formats"):
        file_format([tmp_path / "a.txt", tmp_path / "b.jsonl"], "auto")


@given(
    rows=st.lists(st.text("abc ", min_size=1, max_size=20).filter(str.strip), min_size=2, max_size=30),
    fraction=st.floats(0.01, 0.9),
)
@settings(max_examples=50)
def test_hold_out_is_a_partition_by_content(tmp_path_factory, rows, fraction):
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    documents = jsonl_files((write(file, "\n".join(json.dumps({"text": row}) for row in rows)),))
    total = sum(map(len, rows))
    if any(sum(len(row) for row in rows if row != one) < fraction * total for one in set(rows)):
        return  # may be impossible: one text with its copies makes too much of the source
    train, heldout = hold_out(documents, fraction)
    assert sorted(texts(train) + texts(heldout)) == sorted(rows)
    assert texts(train)
    assert not set(texts(train)) & set(texts(heldout))
    assert sum(map(len, texts(heldout))) >= fraction * total
    # The same rows in another order: the same choice.
    chosen = sorted(texts(heldout))
    write(file, "\n".join(json.dumps({"text": row}) for row in reversed(rows)))
    assert sorted(texts(hold_out(jsonl_files((file,)), fraction)[1])) == chosen


def test_hold_out_that_leaves_nothing_is_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"text": "same"}\n' * 9)
    with pytest.raises(DataError, match=r"holding out 10% leaves no document to train on; set heldout_fraction=0"):
        hold_out(jsonl_files((file,)), 0.1)


def test_hold_out_of_one_document_is_its_end(tmp_path):
    file = write(tmp_path / "a.txt", "line\n" * 100)
    train, heldout = hold_out(TextFiles((file,)), 0.1)
    assert texts(train) == ["line\n" * 90]
    assert texts(heldout) == ["line\n" * 10]
    assert next(iter(heldout)).row == 91
    assert len({train.content_hash, heldout.content_hash, TextFiles((file,)).content_hash}) == 3
    with pytest.raises(DataError, match=r"too short to hold out"):
        hold_out(TextFiles((write(tmp_path / "b.txt", "x"),)), 0.1)


def test_bundled_corpus_is_what_its_readme_says():
    readme = corpus.path("train").with_name("README.md").read_text()
    for split, plays, scenes in (("train", corpus.TRAIN_PLAYS, 399), ("heldout", corpus.HELDOUT_PLAYS, 46)):
        found = texts(bundled(split))
        size = corpus.path(split).stat().st_size
        assert len(found) == scenes
        assert len({text.split("\n")[0] for text in found}) == len(plays)
        assert f"| {scenes} | {size:,} | `{corpus.SHA256[split]}` |" in readme
        assert "".join(found).isascii()
    assert not {text.split("\n")[0] for text in texts(bundled("train"))} & {"MACBETH", "TWELFTH NIGHT"}
    assert sum(corpus.path(split).stat().st_size for split in corpus.SHA256) < 3_000_000


def test_altered_bundled_corpus_is_refused(tmp_path, monkeypatch):
    altered = write(tmp_path / "train.txt", corpus.path("train").read_bytes() + b" ")
    monkeypatch.setattr(corpus, "path", lambda split: altered)
    with pytest.raises(DataError, match=r"missing or altered"):
        bundled("train")
