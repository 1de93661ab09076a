"""Record files of every kind give the same documents; compression, URLs, missing packages."""

import builtins
import gzip
import json

import fsspec
import pyarrow
import pytest
import zstandard
from pyarrow import ipc

from jaxllm import data
from jaxllm.data.sources import chitchat
from jaxllm.data.sources.documents import BadRecords
from jaxllm.data.sources.records import RecordFiles
from jaxllm.data.sources.remote_files import RemoteFile, file_format, find_files
from jaxllm.files import DataError
from tests.proofs.data.bad_input import WRITERS

ROWS = [{"text": f"row {n} ü", "n": n} for n in range(23)]
TEXTS = [row["text"] for row in ROWS]


def records(*files, **settings):
    found = find_files([str(file) for file in files])
    return RecordFiles(found, file_format(found, "auto"), **settings)


def texts(documents):
    return [document.text for document in documents]


@pytest.mark.parametrize("ending", WRITERS)
def test_every_kind_gives_the_same_documents(tmp_path, ending):
    WRITERS[ending](tmp_path / f"a{ending}", ROWS)
    documents = records(tmp_path / f"a{ending}")
    assert texts(documents) == TEXTS
    assert [document.row for document in documents] == list(range(1, 24))
    assert texts(documents) == TEXTS  # read anew


def test_several_zstd_frames_are_one_file(tmp_path):
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / "a.jsonl.zst").write_bytes(
        b"".join(zstandard.compress(b"".join(lines[n : n + 7])) for n in (0, 7, 14, 21))
    )
    assert texts(records(tmp_path / "a.jsonl.zst")) == TEXTS


def test_urls(tmp_path, monkeypatch):
    with fsspec.open("memory://bucket/a.jsonl.gz", "wb") as file:
        file.write(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)))
    assert texts(records("memory://bucket/a.jsonl.gz")) == TEXTS
    with pytest.raises(DataError, match=r"memory://bucket/b.jsonl: no such file"):
        find_files(["memory://bucket/b.jsonl"])
    with pytest.raises(DataError, match=r"nothing://x: fsspec cannot open it"):
        find_files(["nothing://x"])
    dataset = data.load_dataset(
        data.DataConfig("memory://bucket/a.jsonl.gz", tokenizer="byte", seq_len=8, cache_dir=str(tmp_path))
    )
    assert dataset.train.plan.rows
    missing(monkeypatch, "fsspec")
    with pytest.raises(DataError, match=r"needs the package fsspec: pip install 'jaxllm\[data\]'"):
        RemoteFile("s3://x/y").size()


def missing(monkeypatch, package):
    """Simulates a package that is not installed."""
    found = builtins.__import__

    def refuse(name, *rest, **more):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize(("ending", "package"), [(".parquet", "pyarrow"), (".jsonl.zst", "zstandard")])
def test_packages_that_are_not_installed_are_named(tmp_path, monkeypatch, ending, package):
    WRITERS[ending](tmp_path / f"a{ending}", ROWS)
    missing(monkeypatch, package)
    with pytest.raises(DataError, match=rf"a{ending}: .* the package {package}: pip install"):
        texts(records(tmp_path / f"a{ending}"))


def test_the_folder_of_a_saved_dataset(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    table = pyarrow.Table.from_pylist(ROWS)
    for number, part in enumerate((table.slice(0, 9), table.slice(9))):
        with ipc.new_stream(str(folder / f"data-{number:05}-of-00002.arrow"), table.schema) as writer:
            writer.write_table(part)
    state = {"_data_files": [{"filename": f"data-{n:05}-of-00002.arrow"} for n in range(2)]}
    (folder / "state.json").write_text(json.dumps(state))
    assert texts(records(folder)) == TEXTS
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"contains several splits; name one: .*saved"):
        find_files([str(tmp_path)])
    (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state.json: does not list"):
        find_files([str(folder)])


def test_other_columns_are_named(tmp_path):
    WRITERS[".parquet"](tmp_path / "a.parquet", ROWS)
    with pytest.raises(
        DataError, match=r"a.parquet: no column 'txt', only \['n', 'text'\]; did you mean text_field='text'"
    ):
        texts(records(tmp_path / "a.parquet", field="txt"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"a.jsonl:1: 'messages' is an empty list"),
        ({"messages": "hi"}, r"a.jsonl:1: 'messages' is a str"),
        ({"messages": [{"content": "x"}]}, r"a.jsonl:1: message 1 is not an object with a 'role'"),
        ({"messages": [{"role": "user"}]}, r"a.jsonl:1: message 1 has neither 'content' nor 'tool_calls'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"a.jsonl:1: 'messages' is not valid Unicode"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 3}, r"a.jsonl:1: 'tools' is a int"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": "{"},
            r"a.jsonl:1: 'tools' is text that is not JSON",
        ),
    ],
)
def test_conversations_that_are_none(tmp_path, row, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        texts(records(tmp_path / "a.jsonl", field="messages", chat=True))


def test_skipped_records_are_counted_and_a_hundred_listed(tmp_path):
    good = json.dumps({"text": "good"})
    (tmp_path / "a.jsonl").write_text("\n".join([good, *["{"] * 250, good]))
    documents = records(tmp_path / "a.jsonl", bad=BadRecords(skip=True))
    assert texts(documents) == ["good", "good"]
    assert texts(documents) == ["good", "good"]
    assert documents.bad.count == 250
    assert len(documents.bad.listed) == BadRecords.LISTED
    assert documents.content_hash != records(tmp_path / "a.jsonl").content_hash


def test_chitchat(monkeypatch, tmp_path):
    documents = chitchat.Chitchat(chitchat.find_chitchat())
    found = [json.loads(one.text)["messages"] for one in documents]
    assert len(found) == 4017
    for messages in found[::97]:
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert len(messages) <= chitchat.MAX_MESSAGES
    (tmp_path / "dataset.json").write_text('{"a": {"messages": 3}}')
    with pytest.raises(DataError, match=r"dataset.json: not the data of version 0.9.0"):
        texts(chitchat.Chitchat(tmp_path / "dataset.json"))
    monkeypatch.setattr(chitchat.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"these chats, is not installed: pip install --no-deps"):
        chitchat.find_chitchat()
