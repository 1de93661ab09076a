"""Data loader: from configuration to dataset, with real files; and each setting that is refused."""

import inspect
import json
import subprocess
import sys

import numpy as np
import pytest

from jaxllm import data
from jaxllm.text import ByteTokenizer


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))


def config(**changes):
    return data.DataConfig(**({"tokenizer": "byte", "seq_len": 16, "batch_size": 4} | changes))


def jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


ROWS = [f"document number {n} " * (1 + n % 5) for n in range(40)]


def decoded(dataset, documents):
    return [dataset.tokenizer.decode(one) for one in documents]


@pytest.mark.drawn(0.3)
def test_bundled_corpus_end_to_end():
    dataset = data.load_dataset(data.DataConfig(tokenizer="bpe:512", seq_len=64, batch_size=8))
    assert dataset.tokenizer.vocab_size == 512
    assert dataset.train.tokens_per_step == 512
    batch = dataset.train.batch_at(0)
    assert batch.tokens.shape == (8, 64)
    assert (batch.targets >= 0).all()
    assert dataset.heldout is not None
    # The held-out targets are the held-out text: every byte of it, and the end of each scene.
    text = "".join(decoded(dataset, dataset.heldout.documents))
    assert dataset.heldout.target_bytes == len(text.encode())
    covered = sum(dataset.tokenizer.token_lengths[b.targets[b.targets >= 0]].sum() for b in dataset.heldout)
    assert covered == dataset.heldout.target_bytes
    assert "Double, double toil and trouble" in text
    assert not any("Double, double toil" in one for one in decoded(dataset, dataset.train.documents))
    assert dataset.summary.startswith("shakespeare: 399 documents, ")
    assert data.load_dataset(dataset.config).train.fingerprint == dataset.train.fingerprint


@pytest.mark.drawn(0.3)
def test_bigram_baseline_of_the_bundled_corpus_does_not_depend_on_the_tokenizer():
    """The figure that a first model is measured against."""
    results = [data.bigram_baseline_of(data.load_dataset(config(tokenizer=one))) for one in ("byte", "bpe:300")]
    assert results[0] == results[1]
    assert results[0].bits_per_byte == pytest.approx(3.683, abs=0.002)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_jsonl_with_a_share_held_out(tmp_path, packing):
    file = jsonl(tmp_path / "a.jsonl", ROWS, field="body")
    dataset = data.load_dataset(config(source=file, text_field="body", heldout_fraction=0.2, packing=packing))
    train, heldout = decoded(dataset, dataset.train.documents), decoded(dataset, dataset.heldout.documents)
    assert sorted(train + heldout) == sorted(ROWS)
    seen = np.concatenate([dataset.train.batch_at(step).tokens.reshape(-1) for step in range(100)])
    assert set(seen.tolist()) >= set("".join(train).encode())


def test_several_text_files_and_heldout_files(tmp_path):
    names = []
    for n in range(3):
        names.append(str(tmp_path / f"{n}.txt"))
        (tmp_path / f"{n}.txt").write_text(f"file {n}, one\n\nfile {n}, two\n")
    dataset = data.load_dataset(config(source=(names[0], names[1]), heldout=names[2], separator=""))
    assert decoded(dataset, dataset.train.documents) == [
        "file 0, one\n",
        "file 0, two\n",
        "file 1, one\n",
        "file 1, two\n",
    ]
    assert decoded(dataset, dataset.heldout.documents) == ["file 2, one\n", "file 2, two\n"]


def test_token_file_gives_the_same_batches_as_its_text(tmp_path):
    from_text = data.load_dataset(config(source=jsonl(tmp_path / "a.jsonl", ROWS), heldout_fraction=0))
    data.write_tokens(tmp_path / "a.bin", from_text.train.documents, from_text.tokenizer)
    from_tokens = data.load_dataset(config(source=str(tmp_path / "a.bin"), heldout_fraction=0))
    assert from_text.heldout is None
    assert from_tokens.heldout is None
    assert from_tokens.train.fingerprint == from_text.train.fingerprint
    for one, other in zip(*(one.train.batch_at(7).arrays for one in (from_text, from_tokens)), strict=True):
        np.testing.assert_array_equal(one, other)
    half = data.load_dataset(config(source=str(tmp_path / "a.bin"), heldout_fraction=0.5))
    assert half.train.documents.total + sum(map(len, half.heldout.documents)) == from_text.train.documents.total
    other = data.load_dataset(config(source=str(tmp_path / "a.bin"), heldout=str(tmp_path / "a.bin")))
    assert sum(map(len, other.heldout.documents)) == from_text.train.documents.total


def test_saved_tokenizer_by_path(tmp_path):
    first = data.load_dataset(config(source=jsonl(tmp_path / "a.jsonl", ROWS), tokenizer="bpe:280"))
    first.tokenizer.save(tmp_path / "tokenizer")
    again = data.load_dataset(config(source=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer")))
    assert again.train.fingerprint == first.train.fingerprint


def test_bpe_is_trained_without_the_heldout_text(tmp_path):
    """Merges that only the held-out text suggests must not exist."""
    (tmp_path / "a.txt").write_text("the train text is here and here again\n" * 20)
    (tmp_path / "b.txt").write_text("zyxzyxzyx " * 200)
    dataset = data.load_dataset(
        config(source=str(tmp_path / "a.txt"), heldout=str(tmp_path / "b.txt"), tokenizer="bpe:280")
    )
    assert len(dataset.tokenizer.encode("zyx")) == 3


@pytest.mark.parametrize("name", ["seq_len", "batch_size", "seed", "packing", "tokenizer", "source"])
def test_what_decides_the_batches_is_in_the_cursor(tmp_path, name):
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    other = jsonl(tmp_path / "b.jsonl", [*ROWS[:-1], "another last one"])
    changed = {
        "seq_len": 32,
        "batch_size": 8,
        "seed": 1,
        "packing": "documents",
        "tokenizer": "bpe:280",
        "source": other,
    }
    before = data.load_dataset(config(source=file))
    after = data.load_dataset(config(**({"source": file} | {name: changed[name]})))
    word = "content" if name == "source" else name
    with pytest.raises(data.CursorMismatch, match=rf"{word} was .*, is now"):
        after.train.check_cursor(before.train.cursor(5))


def test_moved_data_resumes(tmp_path):
    one = data.load_dataset(config(source=jsonl(tmp_path / "a.jsonl", ROWS)))
    two = data.load_dataset(config(source=jsonl(tmp_path / "elsewhere.jsonl", ROWS), cache_dir=str(tmp_path / "other")))
    assert two.train.check_cursor(one.train.cursor(3)) == 3
    assert list((tmp_path / "other").rglob("*.bin"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 0}, "data.seq_len is 0; it must be at least 1"),
        ({"batch_size": -1}, "data.batch_size is -1"),
        ({"source": ()}, "data.source is empty"),
        ({"heldout_fraction": 1.0}, "data.heldout_fraction is 1.0; legal"),
        ({"heldout_fraction": 0.1, "heldout": "x"}, "both set"),
    ],
)
def test_values_that_are_not_legal(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_names_that_are_not_legal(monkeypatch):
    """Without the type checks of the tests, as users have it."""
    made = data.DataConfig.__init__
    monkeypatch.setattr(data.DataConfig, "__init__", inspect.unwrap(made))
    with pytest.raises(ValueError, match=r"data.packing is 'sorted'; legal: concat, documents"):
        config(packing="sorted")
    with pytest.raises(
        ValueError, match=r"data.source_format is 'csv'; legal: auto, text, jsonl, parquet, arrow, webdataset, tokens"
    ):
        config(source_format="csv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout_fraction": 0.1}, "data.heldout_fraction is set, but has no effect for the bundled corpus"),
        ({"text_field": "x"}, "data.text_field is set, but has no effect for the bundled corpus"),
        ({"source": "a.txt", "text_field": "x"}, "data.text_field is set, but has no effect for text files"),
        ({"source": "a.jsonl", "separator": ""}, "data.separator is set, but has no effect for JSONL files"),
        ({"source": "a.bin", "separator": ""}, "data.separator is set, but has no effect for a token file"),
        ({"source": "a.bin", "tokenizer": "bpe:300"}, "contains tokens, so 'bpe:300' cannot be trained on it"),
        ({"source": ("a.bin", "b.bin")}, "b.bin: a second token file"),
        ({"source": "a.txt", "heldout": "a.jsonl"}, "held-out files are jsonl, the source is text"),
        ({"source": "a.txt", "tokenizer": "bpe:many"}, "to train one give 'bpe:SIZE'"),
        ({"source": "a.txt", "tokenizer": "bytes"}, "bytes: no tokenizer here; legal: 'byte', 'bpe:SIZE'"),
        (
            {"source": "a.txt", "tokenizer": "bpe:4000"},
            r"a.txt: the text is too short for 'bpe:4000': the corpus has merges for \d+ tokens only",
        ),
        ({"source": "shakespear"}, "shakespear: no such file; legal: a file, or 'shakespeare'"),
        ({"source": "empty.txt"}, "empty.txt: is empty"),
        ({"source": "broken.jsonl"}, "broken.jsonl:2: not valid JSON"),
        ({"source": "tokenless.bin", "heldout_fraction": 0.0}, "tokenless.bin: too short"),
    ],
)
def test_settings_and_files_that_do_not_go_together(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text\n" * 30)
    (tmp_path / "empty.txt").write_text("")
    jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"}\n')
    for name in ("a", "b"):
        data.write_tokens(tmp_path / f"{name}.bin", [np.arange(9)], ByteTokenizer())
    data.write_tokens(tmp_path / "tokenless.bin", [np.array([1])], ByteTokenizer())
    with pytest.raises(ValueError, match=message):
        data.load_dataset(config(**changes))


def test_importing_the_package_loads_nothing_heavy():
    script = "import sys, jaxllm.data; print(sorted({'numpy', 'jax', 'tokenizers', 'jaxtyping'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = subprocess.run(
        [sys.executable, "-c", script.replace("jaxllm.data", "jaxllm")], capture_output=True, text=True, check=True
    )
    assert done.stdout == loaded.stdout  # no more than jaxllm itself
    script = "import sys; from jaxllm.data import load_dataset; print('tokenizers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_public_names_exist():
    assert all(getattr(data, name) is not None for name in data.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'load_datasets'"):
        _ = data.load_datasets
