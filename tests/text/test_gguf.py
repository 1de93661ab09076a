"""Byte-level tokenizers inside GGUF files: ids equal to the same tokenizer's own form and to transformers' loader."""

import functools
import json

import gguf
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from jaxllm.files import DataError
from jaxllm.text import load_tokenizer, template_from_gguf, tokenizer_from_gguf
from tests.text.test_tiktoken import PATTERNS
from tests.text.texts import CORPUS, texts

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ByteLevel = functools.partial(pre_tokenizers.ByteLevel, add_prefix_space=False)


def split(pattern):
    # tiktoken's `$` is the end of the text, and Oniguruma has no possessive {1,3}+.
    regex = pattern.replace("{1,3}+", "{1,3}").replace("$", r"\z")
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), ByteLevel(use_regex=False)])


# What each name stands for, as those models' own tokenizer.json have it.
HF_FORMS = {
    "gpt-2": ByteLevel(use_regex=True),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), ByteLevel(use_regex=True)]),
    "llama-bpe": split(PATTERNS["llama3"]),
    "dbrx": split(PATTERNS["llama3"]),
    "qwen2": split(PATTERNS["qwen2"]),
    "tekken": split(PATTERNS["tekken"]),
    "gpt-4o": split(PATTERNS["o200k"]),
}
BY_TRANSFORMERS = ["gpt-2", "llama-bpe", "tekken", "gpt-4o"]  # of the others it knows no split, or composes nothing


@functools.cache
def library(pre):
    """A tokenizer in its own form, trained with its split."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    made.pre_tokenizer = HF_FORMS[pre]
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet)
    made.train_from_iterator([*CORPUS, *texts(3, 200)], trainer)
    made.encode_special_tokens = True
    return made


def metadata(pre, /, **more):
    model = json.loads(library(pre).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    about = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (about | more).items() if value is not None}


def without_specials(many):
    return [text for text in many if not any(name in text for name in SPECIALS)]


@pytest.mark.parametrize("pre", HF_FORMS)
def test_ids_equal_the_tokenizers_own_form(pre):
    tokenizer, reference = tokenizer_from_gguf(metadata(pre)), library(pre)
    for text in without_specials(texts(4, 400)):
        ids = tokenizer.encode(text).tolist()
        assert ids == reference.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == reference.decode(ids)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (500, 1, 2)
    assert tokenizer.stop_ids == (2, 0)
    assert tokenizer.encode("<|im_end|>").tolist() != [2]
    assert tokenizer.encode("<|im_end|>", specials=True).tolist() == [2]


@pytest.mark.parametrize("pre", BY_TRANSFORMERS)
def test_ids_equal_transformers_own_loader(pre, tmp_path):
    from transformers import AutoTokenizer

    about = metadata(pre)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(about["tokenizer.ggml.tokens"])
    writer.add_token_types(about["tokenizer.ggml.token_type"])
    writer.add_token_merges(about["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, write)()
    tokenizer = tokenizer_from_gguf(about)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in texts(5, 200):
        assert tokenizer.encode(text, specials=True).tolist() == reference.encode(text, add_special_tokens=False), text


def test_without_a_name_text_splits_as_llama_cpp_splits_it():
    """Punctuation apart, then words, then digits in threes."""
    tokenizer = tokenizer_from_gguf(metadata("gpt-2", pre=None))
    pieces = [piece for piece, _ in tokenizer._plain.pre_tokenizer.pre_tokenize_str("a, b! 1234567  x")]
    assert pieces == ["a", ",", "Ġb", "!", "Ġ", "123", "456", "7", "Ġ", "Ġx"]


def test_saved_and_opened_again(tmp_path):
    tokenizer = tokenizer_from_gguf(metadata("smollm", add_bos_token=True, eot_token_id=0))
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.stop_ids, again.adds_bos, again.bos_id) == ((2, 0), True, 1)
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert reference.encode("hat 12") == [1, *tokenizer.encode("hat 12").tolist()]


def test_bos_as_the_file_says_or_else_as_its_kind_does():
    assert not tokenizer_from_gguf(metadata("smollm")).adds_bos
    assert not tokenizer_from_gguf(metadata("smollm", add_bos_token=None)).adds_bos
    assert tokenizer_from_gguf(metadata("llama-bpe", add_bos_token=None)).adds_bos
    assert not tokenizer_from_gguf(metadata("llama-bpe", add_bos_token=True, bos_token_id=None)).adds_bos


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pre": "mystery"}, "tokenizer.ggml.pre is 'mystery', an unknown pre-tokenizer; known: .*'smollm'"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a"]}, "has 'a', which does not join two tokens"),
        ({"merges": ["Ġ nothere"]}, "has 'Ġ nothere', which does not join two tokens"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(more, message):
    with pytest.raises(DataError, match=message):
        tokenizer_from_gguf(metadata("smollm", **more))


def test_the_template_inside():
    about = metadata("smollm") | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "with tools",
    }
    template = template_from_gguf(about)
    message = [{"role": "user", "content": "hi"}]
    assert template is not None
    assert template.render(message) == "<|im_start|>hi<|im_end|>"
    assert template.render(message, tools=[{"type": "function"}]) == "with tools"
    assert template_from_gguf(metadata("smollm")) is None
