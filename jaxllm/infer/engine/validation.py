"""Requests that an engine cannot do are refused before anything is begun."""

from __future__ import annotations

from collections.abc import Collection

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.text import Tokenizer


def bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """``params.bad_words`` as token ids: a text as it is written at a beginning and after a space.

    Raises:
        ValueError: a text, and no tokenizer.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise ValueError("bad_words that are texts need an engine with a tokenizer; give token ids.")
        for text in (word, f" {word.lstrip()}"):
            found[tuple(int(i) for i in tokenizer.encode(text))] = None
    return tuple(found)


def check(
    prompt: list[int],
    params: SamplingParams,
    words: tuple[tuple[int, ...], ...],
    stops: Collection[int],
    config: EngineConfig,
    vocab_size: int,
    max_len: int,
    tokenizer: Tokenizer | None,
) -> None:
    """Refuses what cannot be done.

    Args:
        prompt, params: of the request.
        words, stops: as the engine understands them.
        config, vocab_size, max_len, tokenizer: of the engine.

    Raises:
        ValueError: says what, and what can be done.
    """
    if not prompt:
        raise ValueError("a prompt is empty; generation starts from at least one token.")
    told = {
        "a prompt": prompt,
        "stop_ids": params.stop_ids,
        "logit_bias": params.logit_bias,
        "allowed_tokens": params.allowed_tokens or (),
        "bad_words": [token for word in words for token in word],
    }
    for what, tokens in told.items():
        wrong = [token for token in tokens if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"{what} holds token {wrong[0]}, but the vocabulary has {vocab_size} tokens.")
    total = len(prompt) + params.max_tokens
    if total > max_len:
        raise ValueError(
            f"{len(prompt)} tokens of prompt and {params.max_tokens} new ones are {total}; this engine's sequences "
            f"have {max_len} at most. Give a shorter prompt or fewer new tokens."
        )
    if tokenizer is None and params.stop:
        raise ValueError("stop texts need an engine with a tokenizer; give stop_ids.")
    if tokenizer is None and params.echo:
        raise ValueError("echo needs an engine with a tokenizer; the prompt's tokens are known.")
    if (
        max(map(len, words), default=0) > logits_processors.WORD
        or sum(len(word) > 1 for word in words) > logits_processors.WORDS
    ):
        raise ValueError(
            f"bad_words: the longest may have {logits_processors.WORD} tokens, and {logits_processors.WORDS} may have more than one, each "
            "as the tokenizer writes it at a beginning and after a space."
        )
    if params.needs_full and "full" not in config.samplers:
        raise ValueError(
            "this engine was built with the plain sampler alone, which knows temperature and seed: add 'full' to "
            f"samplers = {config.samplers}."
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > config.top_logprobs:
            raise ValueError(
                f"{name} = {getattr(params, name)}; this engine was built with top_logprobs = {config.top_logprobs}."
            )
    if params.beams > 1 and params.beams + len(stops) > config.top_logprobs:
        raise ValueError(
            f"beams = {params.beams} with {len(stops)} stop tokens need an engine with top_logprobs = "
            f"{params.beams + len(stops)}; this one was built with {config.top_logprobs}."
        )
