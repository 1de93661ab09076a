r"""Pre-tokenizers: regular expressions that split text into words before BPE merges, by name.

Each is the one that its vocabulary was trained with: `gpt2`, `cl100k` and `o200k` as in OpenAI's tiktoken package,
`llama3`, `qwen2`, `qwen35`, `tekken` and `smollm` as in those models' tokenizer.json. They are written for
Oniguruma, which the `tokenizers` library uses: no possessive `{1,3}+`, and `\z` instead of `$`.
"""

from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"


def _cased(tail: str) -> str:
    """Regular expression of words that end where lower case changes to upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{_UPPER}*{_LOWER}+{tail}|{lead}{_UPPER}+{_LOWER}*{tail}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

SPLITS: dict[str, tuple[str, ...]] = {
    "gpt2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "cl100k": (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|\s+\z|\s*[\r\n]|\s+(?!\S)|\s",),
    "llama3": (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|{_SPACES}",),
    "qwen2": (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}[\r\n]*|{_SPACES}",),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "tekken": (rf"{_cased('')}|\p{{N}}|{_PUNCTUATION}[\r\n/]*|{_SPACES}",),
    "o200k": (rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n/]*|{_SPACES}",),
    # llama.cpp's default for files that do not name a pre-tokenizer.
    "ggml-default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}

# Qwen's tokenizers normalize text to NFC first; the others do not normalize.
_COMPOSED = ("qwen2", "qwen35")


def pre_tokenizer(name: str) -> dict[str, Any]:
    """The `pre_tokenizer` of a tokenizer.json: splits by the expressions of `name`, then spells words in bytes."""
    split = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in SPLITS[name]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*split, byte_level]}


def normalizer(name: str) -> dict[str, Any] | None:
    """The `normalizer` of a tokenizer.json that belongs to the pre-tokenizer `name`; None for none."""
    return {"type": "NFC"} if name in _COMPOSED else None
