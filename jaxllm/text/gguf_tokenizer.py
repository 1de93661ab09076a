"""GGUF tokenizer: opens the tokenizer in a GGUF file's metadata.

Keys and their meaning: GGUF's specification, and llama.cpp's `llama-vocab.cpp` for pre-tokenization
(`tokenizer.ggml.pre`) and for the defaults of absent keys.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxllm.files import DataError
from jaxllm.text import pretokenizers, tokenizer_json
from jaxllm.text.gguf_special_tokens import special_id
from jaxllm.text.hf_tokenizer import HFTokenizer
from jaxllm.text.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceVocabulary,
    bpe_tokenizer_json,
)

# tokenizer.ggml.pre -> name in pretokenizers.SPLITS. Names that llama.cpp treats alike share a row.
_PRE = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "exaone4", "trillion"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "smollm"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), "llama3"),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), "qwen2"),
    "qwen35": "qwen35",
    "tekken": "tekken",
    **dict.fromkeys(("gpt-4o", "llama4"), "o200k"),
    "default": "ggml-default",
}
# Pre-tokenizers that look up whole words before merging (ignore_merges), and those that add bos by default.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
_ADD_BOS = _WHOLE_WORDS

# Metadata keys of tokens that end a turn, and names of such tokens in files without these keys.
_END_KEYS = ("eot", "eom")
_END_NAMES = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, where: str = "GGUF metadata") -> HFTokenizer:
    """Opens the tokenizer of a GGUF file's metadata: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Args:
        metadata: keys and values of the file, arrays as sequences.
        where: name of the file in errors.

    Raises:
        DataError: a key is missing or invalid, or the kind of tokenizer is unknown; names it.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        what = "holds no tokenizer" if kind is None else f"tokenizer.ggml.model is {kind!r}"
        raise DataError(f"{where}: {what}; legal: 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE)")
    tokens = [str(token) for token in _need(metadata, "tokens", where)]
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise DataError(f"{where}: tokenizer.ggml.tokens has {twice!r} twice")
    types = [int(one) for one in metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise DataError(f"{where}: {len(tokens)} tokens, but tokenizer.ggml.token_type has {len(types)} entries")
    bos, eos = (special_id(metadata, name, where=where) for name in ("bos", "eos"))
    if kind == "llama":  # old files have no token types; bos and eos must not be matched in text
        types = [CONTROL if index in (bos, eos) and one == NORMAL else one for index, one in enumerate(types)]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    default_bos = kind == "llama" or pre in _ADD_BOS
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)) and bos is not None
    begin = (tokens[bos], bos) if adds_bos and bos is not None else None
    make = _byte_level if kind == "gpt2" else _sentencepiece
    ends = [special_id(metadata, key, where=where) for key in _END_KEYS]
    named = [n for n, token in enumerate(tokens) if token in _END_NAMES and types[n] in (CONTROL, USER_DEFINED)]
    return HFTokenizer(
        make(metadata, tokens, types, begin, where),
        bos=None if bos is None else tokens[bos],
        eos=None if eos is None else tokens[eos],
        where=where,
        adds_bos=adds_bos,
        stop_ids=[*(one for one in ends if one is not None), *named],
    )


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], bos: tuple[str, int] | None, where: str
) -> str:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise DataError(f"{where}: tokenizer.ggml.pre is {pre!r}, an unknown pre-tokenizer; known: {sorted(_PRE)}")
    split = _PRE[pre]
    merges = [str(merge).split(" ") for merge in _need(metadata, "merges", where)]
    vocab = {token: index for index, token in enumerate(tokens)}
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise DataError(f"{where}: tokenizer.ggml.merges has {' '.join(merge)!r}, which does not join two tokens")
    return tokenizer_json.tokenizer_json(
        tokenizer_json.bpe(vocab, merges, whole_words=pre in _WHOLE_WORDS),
        added=SentencePieceVocabulary(tokens, (), types).added(),
        normalizer=pretokenizers.normalizer(split),
        pre_tokenizer=pretokenizers.pre_tokenizer(split),
        decoder=tokenizer_json.BYTE_LEVEL,
        bos=bos,
    )


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], bos: tuple[str, int] | None, where: str
) -> str:
    architecture = str(metadata.get("general.architecture", ""))
    scores = [float(score) for score in _need(metadata, "scores", where)]
    if len(scores) != len(tokens):
        raise DataError(f"{where}: {len(tokens)} tokens, but tokenizer.ggml.scores has {len(scores)} entries")
    if architecture.startswith("gemma"):  # in Gemma's files token order, not the scores, gives the merge order
        scores = [float(-index) for index in range(len(tokens))]
    unknown = special_id(metadata, "unknown", where=where)
    if UNKNOWN not in types and unknown is not None:
        types = [UNKNOWN if index == unknown else kind for index, kind in enumerate(types)]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return bpe_tokenizer_json(
        SentencePieceVocabulary(tokens, scores, types),
        normalizer=tokenizer_json.prefixed_spaces(prefix),
        prefix=prefix,
        byte_fallback=BYTE in types,
        bos=bos,
        where=where,
        rstrip=architecture == "phi3",
    )


def _need(metadata: Mapping[str, Any], key: str, where: str) -> Any:
    name = f"tokenizer.ggml.{key}"
    if name not in metadata:
        raise DataError(f"{where}: {name} is missing; a tokenizer of this kind needs it")
    return metadata[name]
