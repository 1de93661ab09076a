r"""How each byte-level vocabulary cuts text into words before merging: regular expressions, by name.

Each is the one its vocabulary was trained with: `gpt2`, `cl100k` and `o200k` as in OpenAI's tiktoken package,
`llama3`, `qwen2`, `qwen35`, `tekken` and `smollm` as in those models' own tokenizer.json. They are written for
Oniguruma, which the `tokenizers` library uses: no possessive `{1,3}+`, and `\z` where others write `$`.
"""

from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"


def _cased(tail: str) -> str:
    """Words that end where lower case turns to upper."""
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
    # What llama.cpp uses for files that do not say how to split.
    "ggml-default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}

# Qwen's tokenizers compose characters first; the others take text as it is.
_COMPOSED = ("qwen2", "qwen35")


def pre_tokenizer(name: str) -> dict[str, Any]:
    """The `pre_tokenizer` of a tokenizer.json that splits as `name` does, then spells words in bytes."""
    split = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in SPLITS[name]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*split, byte_level]}


def normalizer(name: str) -> dict[str, Any] | None:
    """The `normalizer` that goes with it."""
    return {"type": "NFC"} if name in _COMPOSED else None
