"""Objects of a storage: listed, fetched by ranges, tried again, refused by name; prepared from, and trained on."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from jaxllm.data import DataConfig, DataError, load_dataset
from jaxllm.data.prepare import object_cache
from jaxllm.data.prepare.corpus_config import read_corpus_config
from jaxllm.data.prepare.object_cache import list_files, local_copy, read_range
from jaxllm.data.prepare.preparation import prepare_corpus
from tests.data.object_storage import object_storage

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("rensa")


@pytest.fixture
def storage(monkeypatch):
    """A storage with three objects; the second attempt follows at once."""
    monkeypatch.setattr(object_cache, "WAIT_SECONDS", 0.001)
    monkeypatch.setattr(object_cache, "RANGE_BYTES", 1000)
    with object_storage(monkeypatch) as running:
        rows = [json.dumps({"text": f"text {number} of the storage"}) + "\n" for number in range(100)]
        running.objects["bucket/data/a.jsonl"] = "".join(rows[:60]).encode()
        running.objects["bucket/data/b.jsonl"] = "".join(rows[60:]).encode()
        running.objects["bucket/other.txt"] = b"x"
        yield running


def gets(storage) -> list[tuple[str, str]]:
    return [(name, ranged) for method, name, ranged in storage.requests if method == "GET" and ranged]


def test_objects_are_listed_and_fetched_by_ranges_once(storage, tmp_path):
    a, b = list_files(("s3://bucket/data/*.jsonl",), "source")
    assert (a.name, b.name) == ("s3://bucket/data/a.jsonl", "s3://bucket/data/b.jsonl")
    raw = storage.objects["bucket/data/a.jsonl"]
    assert a.size == len(raw)
    path = local_copy(a, tmp_path)
    assert path.read_bytes() == raw
    assert path.suffix == ".jsonl"
    assert len(gets(storage)) == -(-len(raw) // 1000)
    assert local_copy(a, tmp_path) == path
    assert len(gets(storage)) == -(-len(raw) // 1000), "the copy is used"
    assert read_range(a.name, 3, 9) == raw[3:9]


def test_errors_that_pass_are_tried_again(storage, tmp_path):
    (a,) = list_files(("s3://bucket/data/a.jsonl",), "source")
    storage.fault = lambda method, key, number: {1: "500", 2: "short", 4: "503"}.get(number, "")
    assert local_copy(a, tmp_path).read_bytes() == storage.objects["bucket/data/a.jsonl"]


def test_slow_reads_are_given_up_and_tried_again(storage, tmp_path, monkeypatch):
    (b,) = list_files(("s3://bucket/data/b.jsonl",), "source")
    monkeypatch.setattr(object_cache, "TIMEOUT_SECONDS", 0.3)
    storage.fault = lambda method, key, number: "slow" if number == 1 else ""
    assert local_copy(b, tmp_path).read_bytes() == storage.objects["bucket/data/b.jsonl"]
    monkeypatch.setattr(object_cache, "ATTEMPTS", 2)
    storage.fault = lambda method, key, number: "slow"
    with pytest.raises(
        DataError, match=r"b.jsonl: failed 2 times; the last error is TimeoutError: no answer within 0.3 s"
    ):
        read_range(b.name, 0, 10)


def test_faults_that_stay_are_named_and_leave_nothing(storage, tmp_path):
    (a,) = list_files(("s3://bucket/data/a.jsonl",), "source")
    storage.fault = lambda method, key, number: "short"
    with pytest.raises(DataError, match=r"a.jsonl: failed 5 times; the last error is OSError: truncated: 500 of 1000"):
        local_copy(a, tmp_path)
    storage.fault = lambda method, key, number: ""
    raw = storage.objects["bucket/data/a.jsonl"]
    storage.objects["bucket/data/a.jsonl"] = raw[:1500] + b"#" + raw[1501:]
    with pytest.raises(DataError, match="do not match its ETag"):
        local_copy(a, tmp_path)
    storage.objects["bucket/data/a.jsonl"] = raw[:1500]
    with pytest.raises(DataError, match=r"a.jsonl: failed 5 times"):
        local_copy(a, tmp_path)
    assert not list(tmp_path.iterdir())
    storage.fault = lambda method, key, number: "500"
    with pytest.raises(DataError, match=r"s3://bucket/data/\*.jsonl: failed 5 times; .*InternalError"):
        list_files(("s3://bucket/data/*.jsonl",), "source")
    storage.fault = lambda method, key, number: ""
    with pytest.raises(DataError, match=r"s3://bucket/none.jsonl: no such file"):
        list_files(("s3://bucket/none.jsonl",), "source")
    with pytest.raises(DataError, match=r"source: s3://bucket/none\*.jsonl matches no file"):
        list_files(("s3://bucket/none*.jsonl",), "source")


def test_wrong_credentials_are_named_at_once(storage, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("s3://bucket/data/*.jsonl", "s3://bucket/data/a.jsonl"):
        with pytest.raises(DataError, match=r"access is refused \(.*\); check the credentials"):
            list_files((name,), "source")
    assert len(storage.requests) <= 4


@pytest.mark.drawn(3)
def test_a_corpus_is_prepared_from_a_storage_and_trained_on_from_one(storage, tmp_path):
    (tmp_path / "corpus.toml").write_text(
        'out = "out"\ntokenizer = "byte"\nshard_tokens = 900\n[dedup]\n'
        '[[source]]\nname = "web"\nfiles = ["s3://bucket/data/*.jsonl"]\nlicense = "CC0"\n'
    )
    storage.fault = lambda method, key, number: "500" if number % 3 == 1 else ""
    corpus = prepare_corpus(read_corpus_config(tmp_path / "corpus.toml"))
    (source,) = corpus.manifest["sources"]
    assert (source["read"], source["kept"]) == (100, 100)
    raw = storage.objects["bucket/data/a.jsonl"]
    assert source["files"][0]["sha256"] == hashlib.sha256(raw).hexdigest()
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            storage.objects[f"bucket/out/{path.relative_to(tmp_path / 'out').as_posix()}"] = path.read_bytes()

    def train(place: str, cache: str):
        return load_dataset(DataConfig(place, tokenizer="byte", seq_len=32, batch_size=4, heldout_fraction=0.0,
                                       cache_dir=str(tmp_path / cache))).train  # fmt: skip

    local = train(str(corpus.path), "a")
    storage.requests.clear()
    storage.fault = lambda method, key, number: "500" if key.endswith(".bin") and number % 3 == 1 else ""
    remote = train("s3://bucket/out/manifest.json", "b")
    assert remote.fingerprint == local.fingerprint
    assert remote.check_cursor(local.cursor(3)) == 3
    shards = [one["file"] for one in corpus.manifest["shards"]]
    tails = {name for name, _ in gets(storage) if name.endswith(".bin")}
    assert tails == {f"bucket/out/{name}" for name in shards}
    assert not list((tmp_path / "b" / "shards").glob("*.bin")), "only offsets are read before tokens are needed"
    for step in range(30):
        assert np.array_equal(remote.batch_at(step).tokens, local.batch_at(step).tokens)
    storage.requests.clear()
    assert np.array_equal(train("s3://bucket/out/manifest.json", "b").batch_at(2).tokens, local.batch_at(2).tokens)
    assert all(int(ranged.split("=")[1].split("-")[0]) > 0 for name, ranged in gets(storage) if name.endswith(".bin"))
    second = storage.objects[f"bucket/out/{shards[1]}"]
    storage.objects[f"bucket/out/{shards[1]}"] = b"\x01" + second[1:]
    with pytest.raises(DataError, match=r"00001.bin: does not match the sha256 in the manifest"):
        [train("s3://bucket/out/manifest.json", "c").batch_at(step) for step in range(30)]
