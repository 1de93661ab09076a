"""tiktoken files: ids equal to the tiktoken package's for each way to split, and refusal of unknown files."""

import base64
import functools
import json
import unicodedata

import pytest
import tiktoken
import tiktoken._educational

from jaxllm.files import DataError
from jaxllm.text import load_tokenizer
from tests.text.texts import texts

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# As their publishers write them, possessive quantifiers and all.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
    "llama3": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}",
    "tekken": rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
}
CONFIG = {"eos_token": "<|endoftext|>", "added_tokens_decoder": {"402": {"content": "<|endoftext|>", "special": True}}}


@functools.cache
def ranks():
    """Trained without splitting, so that only the split keeps words apart."""
    data = " ".join(texts(7, 120)).replace("<|", "")
    return tiktoken._educational.bpe_train(data=data, vocab_size=400, pat_str=r"[\s\S]+", visualise=None)


def write(folder, table, config=CONFIG, name="some.tiktoken"):
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in table.items()]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / name


@pytest.mark.parametrize("split", PATTERNS)
def test_ids_equal_the_packages(split, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, ranks()), split=split)
    reference = tiktoken.Encoding("t", pat_str=PATTERNS[split], mergeable_ranks=ranks(), special_tokens={})
    for text in texts(0, 500):
        seen = unicodedata.normalize("NFC", text) if split.startswith("qwen") else text
        ids = tokenizer.encode(text).tolist()
        assert ids == reference.encode(seen, disallowed_special=()), text
        assert tokenizer.decode(ids) == seen
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.stop_ids) == (403, 402, (402,))
    assert tokenizer.encode("a<|endoftext|>", specials=True)[-1] == 402
    assert tokenizer.special_names == {400: "<|unused_400|>", 401: "<|unused_401|>", 402: "<|endoftext|>"}


def test_saved_and_opened_by_transformers(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(write(tmp_path, ranks()), split="cl100k")
    tokenizer.save(tmp_path / "saved")
    reference = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in texts(1, 100):
        assert reference.encode(text, add_special_tokens=False) == tokenizer.encode(text, specials=True).tolist()
    assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint


@pytest.mark.drawn(0.3)
def test_llama_3_is_known_by_what_is_in_its_file(tmp_path):
    """Its file is called tokenizer.model, as SentencePiece's are."""
    table = {bytes([n]): n for n in range(256)}
    table |= {b"\xf8%d" % n: n for n in range(256, 128000)}
    table = {token: rank for token, rank in table.items() if rank != 9906} | {b"Hello": 9906}
    tokenizer = load_tokenizer(write(tmp_path, table, None, "tokenizer.model"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (128256, 128000, 128001)
    assert set(tokenizer.stop_ids) == {128001, 128008, 128009}
    assert tokenizer.adds_bos
    assert tokenizer.encode("<|eot_id|>Hello", specials=True).tolist() == [128009, 9906]
    assert len(tokenizer.special_names) == 256
    assert tokenizer.encode("1234").tolist() == list(b"1234")


def test_a_vocabulary_that_is_not_known_is_refused(tmp_path):
    file = write(tmp_path, ranks())
    with pytest.raises(DataError, match=r"400 tokens of an unknown vocabulary.*give `split`, one of gpt2"):
        load_tokenizer(file)
    with pytest.raises(DataError, match="no split 'p50k'; legal: gpt2"):
        load_tokenizer(file, split="p50k")


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (b"YQ== 0\nnot base64! 1\n", CONFIG, r"some.tiktoken:2: not a token in base64"),
        (b"YQ== 0\nYQ== 1\n", CONFIG, r"some.tiktoken:2: the token b'a' occurs twice"),
        (b"YQ== 0\nYg== 0\n", CONFIG, "several tokens have the same rank"),
        (b"YQ== 402\n", CONFIG, "the id 402 is a token's rank and a special token's too"),
        (
            base64.b64encode(b"<|endoftext|>") + b" 7\n",
            CONFIG,
            r"'<\|endoftext\|>' is both a special token and an ordinary token",
        ),
        (b"YQ== 0\n", None, "which token ends a document"),
        (b"YQ== 0\n", {"eos_token": "</s>"}, "'</s>' is not in the vocabulary"),
        (b"YQ== 0\n", {"eos_token": "x", "added_tokens_decoder": ["x"]}, "is no ids to tokens"),
    ],
)
def test_files_that_do_not_fit(content, config, message, tmp_path):
    file = write(tmp_path, {}, config)
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(file, split="gpt2")


def test_split_is_only_for_tiktoken_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="contains its own pre-tokenizer"):
        load_tokenizer(tmp_path, split="gpt2")
