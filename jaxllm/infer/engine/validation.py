"""Request validation: requests that the engine cannot serve are refused when they are submitted."""

from __future__ import annotations

from collections.abc import Collection

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.logits_processors import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.text import Tokenizer


def bad_word_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token ids of ``params.bad_words``: each string as tokenized at the start of a text and after a space.

    Raises:
        ValueError: a bad word is a string, and there is no tokenizer.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise ValueError("bad_words that are strings need an engine with a tokenizer; give token ids.")
        for text in (word, f" {word.lstrip()}"):
            found[tuple(int(i) for i in tokenizer.encode(text))] = None
    return tuple(found)


def check_request(
    prompt: list[int],
    params: SamplingParams,
    bad_words: tuple[tuple[int, ...], ...],
    stops: Collection[int],
    config: EngineConfig,
    vocab_size: int,
    max_len: int,
    tokenizer: Tokenizer | None,
) -> None:
    """Checks that an engine can serve a request.

    Args:
        prompt, params: prompt and sampling parameters of the request.
        bad_words, stops: its bad words and stop tokens as token ids.
        config, vocab_size, max_len, tokenizer: configuration and limits of the engine.

    Raises:
        ValueError: names the parameter that is illegal, and what is legal.
    """
    if not prompt:
        raise ValueError("a prompt is empty; generation starts from at least one token.")
    token_fields = {
        "a prompt": prompt,
        "stop_ids": params.stop_ids,
        "logit_bias": params.logit_bias,
        "allowed_tokens": params.allowed_tokens or (),
        "bad_words": [token for word in bad_words for token in word],
        "subtasks": () if params.subtasks is None else (*params.subtasks.start, *params.subtasks.end),
    }
    for what, tokens in token_fields.items():
        wrong = [token for token in tokens if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"{what} holds token {wrong[0]}, but the vocabulary has {vocab_size} tokens.")
    if params.subtasks is not None:
        _check_subtasks(config)
    total = len(prompt) + (params.max_tokens if params.subtasks is None else 1)
    if total > max_len:
        raise ValueError(
            f"{len(prompt)} tokens of prompt and {total - len(prompt)} new ones are {total}; this engine's sequences "
            f"have {max_len} at most. Give a shorter prompt or fewer new tokens."
        )
    if tokenizer is None and params.stop:
        raise ValueError("stop strings need an engine with a tokenizer; give stop_ids.")
    if tokenizer is None and params.echo:
        raise ValueError("echo needs an engine with a tokenizer; without one, the caller has the prompt's tokens.")
    longest, long_words = max(map(len, bad_words), default=0), sum(len(word) > 1 for word in bad_words)
    if longest > MAX_BAD_WORD_TOKENS or long_words > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words: the longest may have {MAX_BAD_WORD_TOKENS} tokens, and {MAX_BAD_WORDS} may have more than "
            "one, each as tokenized at the start of a text and after a space."
        )
    if params.needs_full and "full" not in config.samplers:
        raise ValueError(
            "this engine was built with the plain sampler only, which supports temperature and seed: add 'full' to "
            f"samplers = {config.samplers}."
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > config.top_logprobs:
            raise ValueError(
                f"{name} = {getattr(params, name)}; this engine was built with top_logprobs = {config.top_logprobs}."
            )
    if (chunks := params.cached_chunks) is not None:
        if not config.chunk_cache:
            raise ValueError("cached_chunks: this engine was built without chunk_cache (--chunk-cache).")
        if chunks.spans[-1][1] > len(prompt):
            raise ValueError(f"cached_chunks: spans = {chunks.spans} end behind the prompt's {len(prompt)} tokens.")
    if params.beams > 1 and params.beams + len(stops) > config.top_logprobs:
        raise ValueError(
            f"beams = {params.beams} with {len(stops)} stop tokens need an engine with top_logprobs = "
            f"{params.beams + len(stops)}; this one was built with {config.top_logprobs}."
        )


def _check_subtasks(config: EngineConfig) -> None:
    """Checks that an engine can take finished subtasks out of sequences."""
    refused = {
        "speculation, whose drafts are made for the whole text (speculate, verify_tokens)": config.verify_tokens > 0,
        "pools, whose decode engines compute no prompts": config.pools is not None and not config.offloads_attention,
    }
    for what in (what for what, is_so in refused.items() if is_so):
        raise ValueError(f"subtasks do not go with {what}: leave one of them out.")
