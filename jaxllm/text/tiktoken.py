"""tiktoken vocabulary files: each line has a token in base64 and its rank.

Such a file contains neither the pre-tokenizer nor the special tokens. Both are known for published vocabularies; for
others the caller names the pre-tokenizer (`split`).
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.files import DataError, at
from jaxllm.text import pretokenizers, tokenizer_json
from jaxllm.text.byte_tokenizer import byte_alphabet
from jaxllm.text.hf_tokenizer import HFTokenizer
from jaxllm.text.tokenizer_files import CONFIG_FILE, read_stop_ids, token_name

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d+)")


@dataclass(frozen=True)
class _Published:
    """Published vocabulary: its pre-tokenizer, special tokens by id, and which of them are bos, eos and stop tokens."""

    split: str
    specials: Mapping[int, str]
    eos: str
    bos: str | None = None
    stop: tuple[str, ...] = ()


_END = "<|endoftext|>"
_FILLS = {100258: "<|fim_prefix|>", 100259: "<|fim_middle|>", 100260: "<|fim_suffix|>", 100276: "<|endofprompt|>"}
_LLAMA3 = {
    **{0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>"},
    **{6: "<|start_header_id|>", 7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>"},
}
_LLAMA3_RESERVED = [n for n in range(256) if n not in _LLAMA3]
_LLAMA3_ALL = _LLAMA3 | {n: f"<|reserved_special_token_{count}|>" for count, n in enumerate(_LLAMA3_RESERVED)}
_QWEN = [_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]

# Key: (number of ranks, rank of b"Hello"), because a file's name may be anything ("tokenizer.model").
_PUBLISHED = {
    (50256, 15496): _Published("gpt2", {50256: _END}, _END),
    (50280, 15496): _Published("gpt2", {50256: _END}, _END),
    (100256, 9906): _Published("cl100k", {100257: _END, **_FILLS}, _END),
    (199998, 13225): _Published("o200k", {199999: _END, 200018: "<|endofprompt|>"}, _END),
    (128000, 9906): _Published(
        "llama3",
        {128000 + n: name for n, name in _LLAMA3_ALL.items()},
        "<|end_of_text|>",
        "<|begin_of_text|>",
        ("<|eot_id|>", "<|eom_id|>"),
    ),
    (151643, 9707): _Published("qwen2", {151643 + n: name for n, name in enumerate(_QWEN)}, _END, stop=("<|im_end|>",)),
}


def is_tiktoken(data: bytes) -> bool:
    """Whether a file's content begins like a tiktoken file."""
    return _LINE.fullmatch(data[:1000].partition(b"\n")[0].strip()) is not None


def open_tiktoken(file: Path, data: bytes, config: Mapping[str, Any], split: str | None) -> HFTokenizer:
    """Opens a tiktoken file.

    Args:
        file: path of the file, for errors and for `generation_config.json` beside it.
        data: content of the file.
        config: the tokenizer_config.json beside it, or {}; its `added_tokens_decoder` names special tokens.
        split: pre-tokenizer, a name of `pretokenizers.SPLITS`; None for a published vocabulary.

    Raises:
        DataError: the file is invalid, or its vocabulary is unknown and `split` is not given.
    """
    where = at(file)
    ranks = _ranks(data, where)
    known = _PUBLISHED.get((len(ranks), ranks.get(b"Hello", -1)))
    if split is None and known is None:
        raise DataError(
            f"{where}: {len(ranks):,} tokens of an unknown vocabulary, so its pre-tokenizer is unknown; "
            f"give `split`, one of {', '.join(pretokenizers.SPLITS)}"
        )
    if split is not None and split not in pretokenizers.SPLITS:
        raise DataError(f"{where}: no split {split!r}; legal: {', '.join(pretokenizers.SPLITS)}")
    if known is not None and split not in (None, known.split):
        raise DataError(f"{where}: this vocabulary splits as {known.split!r} does, not as {split!r}; leave `split` out")
    split = split or (known.split if known else "")
    added = _added(config, known, where)
    names = {one["content"]: index for index, one in added.items()}
    bos, eos = (token_name(config.get(f"{end}_token")) or (known and getattr(known, end)) for end in ("bos", "eos"))
    if eos is None:
        raise DataError(
            f"{where}: which token ends a document? Put a {CONFIG_FILE} beside it with 'eos_token', "
            "and 'added_tokens_decoder' with its id"
        )
    adds_bos = bool(config.get("add_bos_token", bos is not None)) and bos in names
    stop_ids = [*read_stop_ids(file.parent), *(names[one] for one in (known.stop if known else ()) if one in names)]
    text = _definition(ranks, added, split, (bos, names[bos]) if adds_bos and bos else None, where)
    return HFTokenizer(text, bos=bos, eos=eos, where=where, adds_bos=adds_bos, stop_ids=stop_ids)


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for row, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        try:
            token = base64.b64decode(found[1], validate=True) if found else b""
        except binascii.Error:
            token = b""
        if found is None or not token:
            raise DataError(f"{where}:{row}: not a token in base64 and its rank")
        if token in ranks:
            raise DataError(f"{where}:{row}: the token {token!r} occurs twice")
        ranks[token] = int(found[2])
    if len(set(ranks.values())) != len(ranks):
        raise DataError(f"{where}: several tokens have the same rank")
    return ranks


def _added(config: Mapping[str, Any], known: _Published | None, where: str) -> dict[int, dict[str, Any]]:
    """Added tokens by id: those of the configuration, else those of the published vocabulary."""
    listed = config.get("added_tokens_decoder")
    if listed is None:
        specials = known.specials if known else {}
        return {index: tokenizer_json.added_token(index, name, special=True) for index, name in specials.items()}
    try:
        return {
            int(index): tokenizer_json.added_token(int(index), one["content"], special=bool(one.get("special", True)))
            for index, one in listed.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(f"{where}: 'added_tokens_decoder' of the {CONFIG_FILE} beside it is no ids to tokens") from None


def _definition(
    ranks: Mapping[bytes, int],
    added: dict[int, dict[str, Any]],
    split: str,
    bos: tuple[str, int] | None,
    where: str,
) -> str:
    alphabet = byte_alphabet()
    spelt = {"".join(alphabet[byte] for byte in token): rank for token, rank in ranks.items()}
    if taken := set(ranks.values()) & added.keys():
        raise DataError(f"{where}: the id {min(taken)} is a token's rank and a special token's too")
    if both := spelt.keys() & {one["content"] for one in added.values()}:
        raise DataError(f"{where}: {min(both)!r} is both a special token and an ordinary token")
    # Unused ids get placeholder tokens, because the library numbers added tokens without gaps.
    last_rank = max(ranks.values())
    for index in set(range(max([last_rank, *added]))) - set(ranks.values()) - added.keys():
        added[index] = tokenizer_json.added_token(index, f"<|unused_{index}|>", special=True)
    inside = {one["content"]: index for index, one in added.items() if index < last_rank}
    merges = tokenizer_json.merges_of(spelt, spelt)
    return tokenizer_json.tokenizer_json(
        tokenizer_json.bpe(spelt | inside, merges, whole_words=True),
        added=list(added.values()),
        normalizer=pretokenizers.normalizer(split),
        pre_tokenizer=pretokenizers.pre_tokenizer(split),
        decoder=tokenizer_json.BYTE_LEVEL,
        bos=bos,
    )
