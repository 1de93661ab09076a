"""Tokenisation in parts: the same bytes for any number of processes, stopped or not."""

import json

import numpy as np
import pytest

from jaxllm.data import tokenise
from jaxllm.data.chat_encoding import ChatEncoder, TextEncoder
from jaxllm.data.sources.documents import BadRecords
from jaxllm.data.sources.records import RecordFiles, jsonl_files
from jaxllm.data.token_files import open_tokens, write_tokens
from jaxllm.data.tokenise import tokenise_documents
from jaxllm.files import DataError
from jaxllm.text import ByteTokenizer, ChatTemplate
from tests.data.test_chat import CHATML

BYTE = ByteTokenizer()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(tokenise, "PART_CHARACTERS", 200)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"row {n} " * (n % 7 + 1)}) + "\n" for n in range(60))
    )
    return jsonl_files((tmp_path / "a.jsonl",))


def entry(cache):
    (found,) = cache.glob("tokens/*.bin")
    return found.read_bytes()


def test_any_number_of_processes_gives_the_same_bytes(tmp_path, source):
    seen = []
    alone = tokenise_documents(source, TextEncoder(BYTE), tmp_path / "1", progress=lambda *now: seen.append(now))
    assert seen[-1] == (60, alone.total)
    assert len(seen) > 5
    assert alone.about["files"] == [{"file": str(source.files[0]), "documents": 60, "last_row": 60}]
    tokenise_documents(source, TextEncoder(BYTE), tmp_path / "2", workers=2)
    assert entry(tmp_path / "1") == entry(tmp_path / "2")
    assert not list((tmp_path / "2").rglob("*.parts"))


def test_a_stopped_one_goes_on(tmp_path, source):
    encoded = []

    class Stops(ByteTokenizer):
        def _ids(self, texts):
            if len(encoded) == 4:
                raise KeyboardInterrupt
            encoded.append(len(texts))
            return super()._ids(texts)

    with pytest.raises(KeyboardInterrupt):
        tokenise_documents(source, TextEncoder(Stops()), tmp_path / "cache")
    parts = sorted((tmp_path / "cache").rglob("*.parts/*.bin"))
    assert len(parts) == 4
    parts[1].write_bytes(parts[1].read_bytes()[:-1])  # cut by the kill: made again
    before = sum(encoded)
    again = []

    class Counts(ByteTokenizer):
        def _ids(self, texts):
            again.append(len(texts))
            return super()._ids(texts)

    tokenise_documents(source, TextEncoder(Counts()), tmp_path / "cache")
    assert sum(again) == 60 - before + encoded[1]
    tokenise_documents(source, TextEncoder(BYTE), tmp_path / "whole")
    assert entry(tmp_path / "cache") == entry(tmp_path / "whole")
    assert not list((tmp_path / "cache").rglob("*.parts"))


@pytest.mark.parametrize("workers", [0, 1])
def test_conversations_that_cannot_be_encoded_are_named_or_counted(tmp_path, workers):
    rows = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}] for n in range(12)]
    rows[7] = rows[7][:1]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in rows))
    encoder = ChatEncoder(BYTE, ChatTemplate(CHATML))

    def conversations(skip):
        return RecordFiles((tmp_path / "a.jsonl",), "jsonl", "messages", True, BadRecords(skip))

    with pytest.raises(DataError, match=r"a.jsonl:8: the conversation has no message of the assistant"):
        tokenise_documents(conversations(False), encoder, tmp_path / "cache", workers=workers)
    found = tokenise_documents(conversations(True), encoder, tmp_path / "cache", workers=workers)
    assert len(found.starts) == 11
    assert found.about["skipped"]["unencodable"] == 1
    assert found.about["skipped"]["listed"][0].startswith(f"{tmp_path / 'a.jsonl'}:8: ")
    said = BYTE.decode(np.concatenate(list(found.targets())))
    assert said == "a<|im_end|>\n" * 11  # of these bytes none ends a turn
    assert found.loss_mask is not None
    # A copy of it keeps the masks.
    write_tokens(tmp_path / "copy.bin", found.encoded(), BYTE)
    copy = open_tokens(tmp_path / "copy.bin", BYTE)
    assert copy.loss_mask is not None
    assert copy.loss_mask.tolist() == found.loss_mask.tolist()


def test_masks_of_some_documents_are_refused(tmp_path):
    from jaxllm.data.chat_encoding import EncodedDocument

    mixed = [EncodedDocument(np.array([1, 2]), np.array([True, False])), np.array([3])]
    with pytest.raises(ValueError, match="1 of 2 documents have a loss mask"):
        write_tokens(tmp_path / "a.bin", mixed, BYTE)
    assert not list(tmp_path.iterdir())
