"""Tokenizers: round trips over all of Unicode, streaming, special tokens, saving, and refusals."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxllm.files import DataError
from jaxllm.text import ByteTokenizer, StreamDecoder, load_tokenizer
from jaxllm.text.bpe_training import cached_bpe, train_bpe

TEXTS = [
    "the cat sat on the mat and the hat. " * 20,
    "naïve café — déjà vu, 你好世界 🙂👩‍👩‍👧 привет\n\n\tx = 1\n" * 10,
]
BPE = train_bpe(TEXTS, 320, where="test")
TOKENIZERS = {"byte": ByteTokenizer(), "bpe": BPE}

each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@each_tokenizer
@given(text=UNICODE)
@settings(max_examples=100)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_lengths[ids].sum() == len(text.encode())
    both = tokenizer.encode(text, bos=True, eos=True)
    assert both[0] == tokenizer.bos_id
    assert both[-1] == tokenizer.eos_id
    np.testing.assert_array_equal(both[1:-1], ids)
    assert tokenizer.decode(both) == text


@each_tokenizer
@given(text=UNICODE)
@settings(max_examples=50)
def test_streaming_never_splits_a_character(tokenizer, text):
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(int(one)) for one in tokenizer.encode(text, bos=True)]
    assert "�" not in "".join(pieces) or "�" in text
    assert "".join(pieces) + stream.flush() == text


@each_tokenizer
@given(data=st.data())
@settings(max_examples=50)
def test_streaming_any_ids_equals_decoding_them(tokenizer, data):
    """Also ids that are no valid text, as an untrained model writes them, in pushes of any size."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    stream = StreamDecoder(tokenizer)
    assert stream.push(ids[:cut]) + stream.push(np.array(ids[cut:], np.int32)) + stream.flush() == tokenizer.decode(ids)


def test_streaming_holds_back_and_flush_lets_go():
    tokenizer = ByteTokenizer()
    stream = StreamDecoder(tokenizer)
    smile = tokenizer.encode("🙂").tolist()
    assert [stream.push(one) for one in smile] == ["", "", "", "🙂"]
    assert stream.push(smile[:2]) == ""
    assert stream.flush() == "�"
    assert stream.push(tokenizer.encode("ok")) == "ok"


@each_tokenizer
def test_names_of_specials_in_a_text_are_only_text(tokenizer):
    text = "a<|eos|>b<|bos|>"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.bos_id not in ids
    assert tokenizer.decode(ids) == text


@each_tokenizer
def test_specials_are_spelt_out_only_when_asked(tokenizer):
    ids = tokenizer.encode("hi", bos=True, eos=True)
    assert tokenizer.decode(ids, specials=True) == "<|bos|>hi<|eos|>"


@each_tokenizer
def test_ids_outside_the_vocabulary_are_an_error(tokenizer):
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside"):
            tokenizer.decode([1, wrong])


@each_tokenizer
def test_lone_surrogate_is_an_error(tokenizer):
    with pytest.raises(DataError, match=r"not valid Unicode"):
        tokenizer.encode("a\ud800")


@each_tokenizer
def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "one")
    loaded = load_tokenizer(tmp_path / "one")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert type(loaded) is type(tokenizer)
    np.testing.assert_array_equal(loaded.encode(TEXTS[1]), tokenizer.encode(TEXTS[1]))
    assert load_tokenizer(tmp_path / "one" / "tokenizer.json").fingerprint == tokenizer.fingerprint
    loaded.save(tmp_path / "two")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@each_tokenizer
def test_saved_file_means_the_same_to_the_library(tokenizer, tmp_path):
    """Other programs open tokenizer.json themselves."""
    tokenizer.save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(text).tolist()
        assert library.decode(ids) == text
    assert library.token_to_id("<|eos|>") == tokenizer.eos_id
    assert library.get_vocab_size() == tokenizer.vocab_size


def test_fingerprints_tell_tokenizers_apart():
    others = [ByteTokenizer(), BPE, train_bpe(TEXTS, 321, where="test"), train_bpe(TEXTS[:1], 285, where="test")]
    assert len({one.fingerprint for one in others}) == 4
    assert ByteTokenizer().fingerprint == ByteTokenizer().fingerprint


def test_training_is_deterministic():
    assert train_bpe(TEXTS, 320, where="test").fingerprint == BPE.fingerprint


def test_merges_shorten_the_text():
    assert BPE.vocab_size == 320
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2


@pytest.mark.parametrize(("size", "message"), [(200, "too small"), (5000, r"merges for \d+ tokens only; use 'bpe:")])
def test_impossible_vocabulary_sizes(size, message):
    with pytest.raises(DataError, match=message):
        train_bpe(TEXTS, size, where="test")


def test_trained_tokenizer_is_cached_and_a_damaged_entry_is_made_again(tmp_path):
    def get(texts):
        return cached_bpe(texts, 300, content_hash="abc", where="test", cache=tmp_path)

    first = get(TEXTS)
    assert get(["never read: it is in the cache"]).fingerprint == first.fingerprint
    (file,) = tmp_path.rglob("tokenizer.json")
    good = file.read_text()
    # Cut, empty, and changed so that it still opens: that only the hash tells.
    for damage in (good[: len(good) // 2], "", good.replace('"use_regex":true', '"use_regex":false')):
        assert damage != good
        file.write_text(damage)
        assert get(TEXTS).fingerprint == first.fingerprint
        assert file.read_text() == good
    file.unlink()
    assert get(TEXTS).fingerprint == first.fingerprint


def library_bpe(**changes):
    """A byte-level BPE as other tools write it, with the things that may lurk in such a file."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    library.enable_truncation(5)
    library.enable_padding(length=50)
    return json.loads(library.to_str()) | changes


def write(folder, definition, config=None):
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_truncation_padding_and_templates_of_a_foreign_file_do_not_apply(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, library_bpe()))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert len(tokenizer.encode("longer than five")) == len("longer than five")


def test_tokens_named_by_the_neighbouring_config(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, library_bpe(), {"bos_token": None, "eos_token": {"content": "<s>"}}))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.start_id) == (None, 256, 256)
    assert tokenizer.encode("a", bos=True)[0] == 256


def test_added_tokens_that_are_not_special_have_their_text(tmp_path):
    definition = library_bpe()
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 258, "content": "    ", "special": False})
    tokenizer = load_tokenizer(write(tmp_path, definition))
    ids = tokenizer.encode("a    b")
    assert 258 in ids
    assert tokenizer.decode(ids) == "a    b"
    assert tokenizer.token_lengths[258] == 4


def test_a_vocabulary_that_lacks_bytes_says_so_instead_of_dropping_them(tmp_path):
    definition = library_bpe()
    vocabulary = definition["model"]["vocab"]
    absent = chr(0xF0)  # stands for byte 0xF0, with which every emoji begins
    definition["model"]["vocab"] = {char: n for char, n in vocabulary.items() if char != absent}
    tokenizer = load_tokenizer(write(tmp_path, definition))
    assert tokenizer.decode(tokenizer.encode("café")) == "café"
    with pytest.raises(DataError, match=r"cannot spell '🙂'"):
        tokenizer.encode("so 🙂")


@pytest.mark.parametrize(
    ("definition", "config", "message"),
    [
        ({"model": {"type": "BPE"}}, None, "not a tokenizer.json|which token ends"),
        (library_bpe(added_tokens=[]), None, "which token ends a document"),
        (library_bpe(), {"eos_token": "<nope>"}, "'<nope>' is not in the vocabulary"),
        (library_bpe(decoder=None), None, "a BPE with decoder None; legal: byte-level"),
    ],
)
def test_unusable_files(tmp_path, definition, config, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(write(tmp_path, definition, config))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(DataError, match=r"nothing: no tokenizer here; legal: 'byte', 'bpe:SIZE'"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"not a tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json: not valid JSON"):
        load_tokenizer(tmp_path)
