"""Token files and the token cache: written data is read back, and damaged data is never used."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.data.chat_encoding import TextEncoder
from jaxllm.data.sources.records import jsonl_files
from jaxllm.data.sources.text_files import TextFiles
from jaxllm.data.token_files import open_tokens, sidecar, write_tokens
from jaxllm.data.tokenise import tokenise_documents
from jaxllm.files import DataError, atomic
from jaxllm.infer.llm import encode_prompt
from jaxllm.text import ByteTokenizer

BYTE = ByteTokenizer()


class Wide(ByteTokenizer):
    """A vocabulary that needs 32 bits."""

    vocab_size = 70_000


def documents_of(opened):
    return [one.tolist() for one in opened]


@given(rows=st.lists(st.lists(st.integers(0, 271), max_size=9), min_size=1, max_size=9).filter(any))
@settings(max_examples=30)
def test_written_and_opened(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tokens") / "a.bin"
    write_tokens(path, (np.array(row, np.int32) for row in rows), BYTE)
    opened = open_tokens(path, BYTE)
    assert documents_of(opened) == rows
    assert isinstance(opened.tokens, np.memmap)
    assert opened.tokens.dtype == np.uint16
    assert opened.total == sum(map(len, rows))


def test_large_vocabularies_take_32_bits(tmp_path):
    write_tokens(tmp_path / "a.bin", [np.array([1, 69_999])], Wide())
    opened = open_tokens(tmp_path / "a.bin", Wide())
    assert opened.tokens.dtype == np.uint32
    assert documents_of(opened) == [[1, 69_999]]


def test_a_foreign_file_needs_only_a_sidecar(tmp_path):
    np.array([5, 6, 7], np.uint16).tofile(tmp_path / "a.bin")
    about = {"format": "jaxllm-tokens", "version": 1, "dtype": "uint16", "tokens": 3, "tokenizer": BYTE.fingerprint}
    sidecar(tmp_path / "a.bin").write_text(json.dumps(about))
    assert documents_of(open_tokens(tmp_path / "a.bin", BYTE)) == [[5, 6, 7]]


def write(path, rows=((1, 2, 3), (4, 5))):
    write_tokens(path, (np.array(row) for row in rows), BYTE)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "a.bin.json: dtype 'int8'; legal: uint16, uint32"),
        ({"format": "other"}, "a.bin.json: format 'other' version 1; legal"),
        ({"tokens": "5"}, r"a.bin.json: needs .*tokens \(int\)"),
        ({"tokens": 6}, r"a.bin: 34 bytes, but a.bin.json describes 36; the file is truncated or altered"),
        ({"tokenizer": "f" * 64}, r"a.bin: made with another tokenizer \(fingerprint ffffffffffff, vocabulary 272\)"),
        ({"sha256": "0" * 64}, "a.bin: does not match the sha256 in a.bin.json"),
        ({"documents": None}, "'documents' is not a number"),
    ],
)
def test_wrong_sidecars(tmp_path, change, message):
    path = write(tmp_path / "a.bin")
    sidecar(path).write_text(json.dumps(json.loads(sidecar(path).read_text()) | change))
    with pytest.raises(DataError, match=message):
        open_tokens(path, BYTE)


def test_missing_sidecar_and_wrong_vocabulary_and_offsets(tmp_path):
    path = write(tmp_path / "a.bin", [(1, 2), (3, 300)])
    with pytest.raises(DataError, match=r"a.bin:2: token 3 is 300, outside the tokenizer's vocabulary of 272"):
        open_tokens(path, BYTE)
    about = json.loads(sidecar(path).read_text())
    del about["sha256"]
    sidecar(path).write_text(json.dumps(about))
    raw = bytearray(write(tmp_path / "b.bin").read_bytes())
    raw[-8:] = (3).to_bytes(8, "little")
    (tmp_path / "b.bin").write_bytes(raw)
    about = json.loads(sidecar(tmp_path / "b.bin").read_text())
    sidecar(tmp_path / "b.bin").write_text(json.dumps({key: about[key] for key in about if key != "sha256"}))
    with pytest.raises(DataError, match=r"document offsets do not run from 0 up to 5"):
        open_tokens(tmp_path / "b.bin", BYTE)
    with pytest.raises(DataError, match=r"gone.bin: no such file"):
        open_tokens(tmp_path / "gone.bin", BYTE)
    sidecar(path).unlink()
    with pytest.raises(DataError, match=r"no a.bin.json beside it"):
        open_tokens(path, BYTE)


def test_holding_out_documents_or_the_end_of_one(tmp_path):
    opened = open_tokens(write(tmp_path / "a.bin", [(n, n + 1, n + 2) for n in range(0, 60, 3)]), BYTE)
    train, heldout = opened.hold_out(0.2)
    assert sorted(documents_of(train) + documents_of(heldout)) == documents_of(opened)
    assert len(heldout.starts) == 4
    assert len({train.content_hash, heldout.content_hash, opened.content_hash}) == 3
    one = open_tokens(write(tmp_path / "b.bin", [range(10)]), BYTE)
    assert [documents_of(part) for part in one.hold_out(0.3)] == [[list(range(7))], [[7, 8, 9]]]
    assert one.hold_out(0) == (one, None)


class Counting(ByteTokenizer):
    """Counts how many documents were really encoded."""

    def __init__(self):
        self.encoded = 0

    def _ids(self, texts):
        self.encoded += len(texts)
        return super()._ids(texts)


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "zwölf"}\n')
    return jsonl_files((file,))


def test_tokenised_once_and_cached(tmp_path, source):
    tokenizer = Counting()
    first = tokenise_documents(source, TextEncoder(tokenizer), tmp_path / "cache")
    assert [tokenizer.decode(one, specials=True) for one in first] == ["<|bos|>one<|eos|>", "<|bos|>zwölf<|eos|>"]
    again = tokenise_documents(source, TextEncoder(tokenizer), tmp_path / "cache")
    assert tokenizer.encoded == 2
    assert documents_of(again) == documents_of(first)
    assert again.name == source.name
    # Changed text or another rule is another entry.
    source.files[0].write_text('{"text": "two"}\n')
    assert documents_of(
        tokenise_documents(jsonl_files(source.files), TextEncoder(tokenizer), tmp_path / "cache")
    ) != documents_of(first)
    tokenise_documents(TextFiles(source.files), TextEncoder(tokenizer), tmp_path / "cache")
    assert tokenizer.encoded == 4


class NoBos(ByteTokenizer):
    """A tokenizer that puts no token before a prompt, as SmolLM2's."""

    adds_bos = False


def test_documents_begin_as_prompts_do(tmp_path, source):
    """What a model learns at a document's start is what it meets at a prompt's."""
    tokenizer, cache = NoBos(), tmp_path / "cache"
    tokenise_documents(source, TextEncoder(BYTE), cache)  # the same vocabulary: the other entry must not be found
    for one in tokenise_documents(source, TextEncoder(tokenizer), cache):
        prompt = encode_prompt(tokenizer, tokenizer.decode(one))
        assert one.tolist() == [*prompt, tokenizer.eos_id]


@pytest.mark.parametrize("damage", ["flipped byte", "cut", "empty", "broken sidecar", "no sidecar", "no file"])
def test_a_damaged_cache_entry_is_made_again(tmp_path, source, damage, caplog):
    caplog.set_level(logging.WARNING)
    cache = tmp_path / "cache"
    good = documents_of(tokenise_documents(source, TextEncoder(BYTE), cache))
    (entry,) = cache.rglob("*.bin")
    raw = entry.read_bytes()
    if damage == "flipped byte":
        entry.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    elif damage == "cut":
        entry.write_bytes(raw[:-3])
    elif damage == "empty":
        entry.write_bytes(b"")
    elif damage == "broken sidecar":
        sidecar(entry).write_text('{"format": "jaxllm')
    else:
        (entry if damage == "no file" else sidecar(entry)).unlink()
    assert documents_of(tokenise_documents(source, TextEncoder(BYTE), cache)) == good
    assert entry.read_bytes() == raw
    assert ("tokenising again" in caplog.text) == (not damage.startswith("no "))
    caplog.clear()
    assert documents_of(tokenise_documents(source, TextEncoder(BYTE), cache)) == good
    assert not caplog.text


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "deep" / "a"
    with atomic(path) as file:
        file.write(b"old")

    def fail_halfway():
        with atomic(path) as file:
            file.write(b"half of the new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_halfway()
    assert path.read_bytes() == b"old"
    assert [one.name for one in path.parent.iterdir()] == ["a"]


def test_a_text_the_tokenizer_cannot_spell_is_named(tmp_path, source):
    class NoUmlauts(ByteTokenizer):
        def _ids(self, texts):
            if any("ö" in text for text in texts):
                raise DataError("cannot spell 'ö'")
            return super()._ids(texts)

    with pytest.raises(DataError, match=r"a.jsonl:2: cannot spell 'ö'"):
        tokenise_documents(source, TextEncoder(NoUmlauts()), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.*"))
