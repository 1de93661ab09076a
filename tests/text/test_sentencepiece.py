"""SentencePiece models: ids and text equal to the sentencepiece package's, for each kind of model."""

import functools
import io
import time

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from jaxllm.files import DataError
from jaxllm.text import StreamDecoder, load_tokenizer, template_from_gguf, tokenizer_from_gguf
from tests.text.texts import CORPUS, texts

PLAIN = {"normalization_rule_name": "identity", "byte_fallback": True, "remove_extra_whitespaces": False}
KINDS = {
    "llama": {**PLAIN, "split_digits": True},
    "gemma": {
        **PLAIN,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["▁▁", "▁▁▁▁", "\n\n", "<b>"],
        "control_symbols": ["<end_of_turn>"],
    },
    "mistral": {**PLAIN, "user_defined_symbols": ["[REF]", "12"], "control_symbols": ["[INST]"]},
    "squeezed": {**PLAIN, "remove_extra_whitespaces": True},
    "no bytes": {**PLAIN, "byte_fallback": False},
}


@functools.cache
def model(kind, name):
    written = io.BytesIO()
    options = {"vocab_size": 420, "hard_vocab_limit": False, "minloglevel": 2, **KINDS[name]}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, model_type=kind, **options
    )
    return written.getvalue()


def opened(folder, data):
    (folder / "tokenizer.model").write_bytes(data)
    return load_tokenizer(folder), sentencepiece.SentencePieceProcessor(model_proto=data)


def changed(data, **fields):
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(data)
    for name, value in fields.items():
        part, _, leaf = name.partition("__")
        setattr(getattr(proto, part), leaf, value)
    return proto.SerializeToString()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_and_text_equal_the_packages(kind, name, tmp_path):
    tokenizer, reference = opened(tmp_path, model(kind, name))
    assert tokenizer.vocab_size == reference.vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (reference.bos_id(), reference.eos_id())
    assert tokenizer.adds_bos
    refused = ties = 0
    for text in texts(0, 400):
        expected = reference.encode(text)
        if reference.unk_id() in expected:
            with pytest.raises(DataError, match="cannot spell"):
                tokenizer.encode(text)
            refused += 1
            continue
        ids = tokenizer.encode(text).tolist()
        if ids != expected and kind == "unigram":  # a, aa and aa, a: sums in float32 there, in float64 here
            scores = [sum(map(reference.get_score, one)) for one in (ids, expected)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-3), text
            assert tokenizer.decode(ids) == reference.decode(ids)
            ties += 1
            continue
        assert ids == expected, text
        assert tokenizer.decode(expected) == reference.decode(expected), text
    assert (refused > 0) == (name == "no bytes")
    assert ties < 20


@pytest.mark.parametrize("name", ["llama", "gemma", "mistral"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_round_trip_streaming_and_saving(kind, name, tmp_path):
    tokenizer, _ = opened(tmp_path, model(kind, name))
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.adds_bos, again.prefix_space, again.bos_id) == (True, name != "gemma", 1)
    for text in texts(1, 60):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        prefix = b" " if text and tokenizer.prefix_space else b""
        assert b"".join(tokenizer.token_bytes[i] for i in ids) == prefix + text.encode()
        assert tokenizer.token_lengths[ids].sum() == len(prefix + text.encode())
        stream = StreamDecoder(again)
        pieces = [stream.push(int(one)) for one in again.encode(text, bos=True)]
        assert "".join(pieces) + stream.flush() == text
        assert all("�" not in piece for piece in pieces)
        assert stream.push(ids) + stream.flush() == text, "the decoder can be used again"
        ongoing = StreamDecoder(again, continues=True)
        assert ongoing.push(ids) + ongoing.flush() == (prefix + text.encode()).decode()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_names_of_specials_are_text_except_in_templates(kind, tmp_path):
    tokenizer, reference = opened(tmp_path, model(kind, "mistral"))
    instruct = reference.piece_to_id("[INST]")
    text = "<s>[INST] hat [REF]</s>"
    plain = tokenizer.encode(text)
    assert not {1, 2, instruct} & set(plain.tolist())
    assert tokenizer.decode(plain) == text
    marked = tokenizer.encode(text, specials=True).tolist()
    assert marked[:2] == [1, instruct]
    assert marked[-1] == 2
    assert tokenizer.decode(marked[:2], specials=True) == "<s>[INST]"
    assert tokenizer.decode(marked).strip() == "hat [REF]"
    assert tokenizer.token_bytes[instruct] == b""
    assert reference.piece_to_id("[REF]") in marked


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"normalizer_spec__precompiled_charsmap": b"x", "normalizer_spec__name": "nmt_nfkc"}, "rules 'nmt_nfkc'"),
        ({"trainer_spec__treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"normalizer_spec__escape_whitespaces": False}, "escape_whitespaces"),
        ({"trainer_spec__model_type": 3}, "SentencePiece model of type 3"),
        ({"trainer_spec__eos_id": -1}, "which token ends a document"),
    ],
)
def test_what_cannot_be_had_exactly_is_refused(fields, message, tmp_path):
    with pytest.raises(DataError, match=message):
        opened(tmp_path, changed(model("bpe", "llama"), **fields))


@pytest.mark.parametrize("data", [b"", b"\x00\x01\x02", b"not a model at all", b"\x0a\xff"])
def test_files_that_are_no_models(data, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(DataError, match=r"tokenizer.model: neither a SentencePiece model nor a tiktoken file"):
        load_tokenizer(tmp_path)


def test_a_model_cut_short_is_an_error(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model("bpe", "llama")[:3000])
    with pytest.raises(DataError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


def metadata(data, **more):
    """Metadata of a GGUF file made from the model; user-defined pieces have real spaces there."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(data)
    pieces = proto.pieces
    about = {
        "model": "llama",
        "tokens": [one.piece.replace("▁", " ") if one.type == 4 else one.piece for one in pieces],
        "scores": np.array([one.score for one in pieces], np.float32),
        "token_type": [one.type for one in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (about | more).items()}


@pytest.mark.parametrize("name", ["llama", "gemma", "mistral"])
def test_the_tokenizer_inside_a_gguf_is_the_same(name):
    data = model("bpe", name)
    about = metadata(data) | {"general.architecture": "gemma2" if name == "gemma" else "llama"}
    tokenizer = tokenizer_from_gguf(about)
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    for text in texts(2, 200):
        assert tokenizer.encode(text).tolist() == reference.encode(text), text
    assert tokenizer.adds_bos
    named = {1, 2, reference.piece_to_id("<end_of_turn>")} if name == "gemma" else {1, 2}
    assert set(tokenizer.stop_ids) == named - {1}


def test_specials_of_phi3_take_the_white_space_after_them():
    about = metadata(model("bpe", "mistral"))
    plain = tokenizer_from_gguf(about)
    phi3 = tokenizer_from_gguf(about | {"general.architecture": "phi3"})
    text = "[INST]\nhat</s>"
    assert plain.decode(plain.encode(text, specials=True)) == "\nhat"
    assert phi3.decode(phi3.encode(text, specials=True)) == "hat"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000, outside"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; legal: a token id"),
        ({"model": "gemma4"}, "'gemma4'; legal: 'gpt2'"),
        ({"model": None}, "holds no tokenizer"),
        ({"tokens": ["a", "a"]}, "'a' twice"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(more, message):
    about = metadata(model("bpe", "llama"), **more)
    with pytest.raises(DataError, match=message):
        tokenizer_from_gguf({key: value for key, value in about.items() if value is not None})


def test_an_old_gguf_without_the_ids_of_special_tokens_has_the_usual_ones():
    about = metadata(model("bpe", "llama"), bos_token_id=None, eos_token_id=None)
    about = {key: value for key, value in about.items() if value is not None}
    tokenizer = tokenizer_from_gguf(about)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids, tokenizer.adds_bos) == (1, 2, (2,), True)
    template = template_from_gguf(about | {"tokenizer.chat_template": "{{ bos_token }}x{{ eos_token }}"})
    assert template is not None
    assert tokenizer.encode(template.render([]), specials=True)[[0, -1]].tolist() == [1, 2]


def test_an_old_gguf_without_types_tells_special_tokens_by_their_names():
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a"]
    about = {"model": "llama", "tokens": tokens, "scores": [0.0] * 5}
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in about.items()})
    assert (tokenizer.bos_id, tokenizer.stop_ids) == (1, (2,))
    assert tokenizer.encode("</s>a", specials=True)[-1] == 4
    assert tokenizer.decode([2, 4]) == "a"
    with pytest.raises(DataError, match="cannot spell"):
        tokenizer.encode("z")


def test_a_default_that_is_an_ordinary_token_is_not_taken():
    about = {"model": "llama", "tokens": ["<unk>", "b", "c", "\u2581", "a"], "scores": [0.0] * 5}
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in about.items()})
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, None, False)


def test_a_token_that_is_there_twice_is_found_at_once():
    tokens = [*map(str, range(60_000)), "59999"]
    start = time.perf_counter()
    with pytest.raises(DataError, match="'59999' twice"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens})
    assert time.perf_counter() - start < 1
