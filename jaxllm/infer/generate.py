"""Generation with the training forward: prefill a prompt, then decode several tokens per call.

Legend: B batch, S prompt, T cache slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxllm.infer.cache import empty_cache
from jaxllm.infer.sampler import sample
from jaxllm.models import AttentionContext, Functional

BUCKET = 64


def bucket(n: int, least: int = BUCKET) -> int:
    """The power of two from ``least`` on that holds ``n``: prompts of similar length share a compiled program."""
    size = least
    while size < n:
        size *= 2
    return size


class Generator:
    """Generates continuations of token sequences.

    Args:
        model: the model's functions.
        params: its parameters.
        block: tokens made per call of the device; larger blocks spend less on the host and stream in larger pieces.
        vocab_size: the tokenizer's; tokens from there on are never made (embeddings are padded to round numbers).
            None: the model's.

    Raises:
        ValueError: a block of nothing, or a vocabulary larger than the model's.
    """

    def __init__(self, model: Functional, params: Any, *, block: int = 8, vocab_size: int | None = None):
        if block < 1:
            raise ValueError(f"block = {block}; give 1 or more tokens.")
        most = model.config.vocab_size
        self.vocab_size = most if vocab_size is None else vocab_size
        if not 1 <= self.vocab_size <= most:
            raise ValueError(f"vocab_size = {self.vocab_size}; the model's vocabulary has {most} tokens.")
        self.model, self.params, self.block = model, params, block
        self._prefill = jax.jit(functools.partial(prefill, model, vocab_size=self.vocab_size), static_argnames="slots")
        self._decode = jax.jit(
            functools.partial(decode, model, vocab_size=self.vocab_size),
            static_argnames="count",
            donate_argnames="cache",
        )

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> Iterator[Int[np.ndarray, "B new"]]:
        """New tokens of all rows, a block at a time, ``max_tokens`` in all; they are made as they are asked for.

        Ends early when every row has made one of ``stop_ids``; what a row makes after its own is to be ignored.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, nothing to make, a negative temperature, more
                tokens than the model has learned positions.
        """
        lengths = [len(p) for p in prompts]
        check_request(prompts, max_tokens, temperature, stop_ids, self.vocab_size)
        most = self.model.config.learned_positions
        if most is not None and max(lengths) + max_tokens > most:
            raise ValueError(
                f"{max(lengths)} tokens of prompt and {max_tokens} new ones are {max(lengths) + max_tokens}; the model "
                f"has learned {most} positions. Give a shorter prompt or fewer new tokens."
            )
        return self._stream(prompts, max_tokens, temperature, seed, stop_ids)

    def _stream(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, seed: int, stop_ids: Sequence[int]
    ) -> Iterator[Int[np.ndarray, "B new"]]:
        lengths = [len(p) for p in prompts]
        padded = np.zeros((len(prompts), bucket(max(lengths))), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
            row[len(prompt) :] = prompt[-1]
        slots = bucket(max(lengths) + max_tokens)
        key, heat = jax.random.key(seed), jnp.float32(temperature)
        last = jnp.asarray(lengths, jnp.int32) - 1
        token, cache = self._prefill(self.params, padded, last, key, heat, slots=slots)
        stopped = np.zeros(len(prompts), bool)
        made = 0
        position = last + 1
        fresh = token[:, None]
        while True:
            later = None
            if made == 0:
                # Decoding may have to be compiled first, and the first token is there already.
                yield np.asarray(fresh)
            if made + fresh.shape[1] < max_tokens:
                # The next block is on its way before this one is looked at.
                later, token, position, cache = self._decode(
                    self.params, token, position, key, heat, cache, count=self.block
                )
            out = np.asarray(fresh)[:, : max_tokens - made]
            if made > 0:
                yield out
            made += out.shape[1]
            stopped |= np.isin(out, list(stop_ids)).any(axis=1)
            if later is None or stopped.all():
                return
            fresh = later


def prefill(
    model: Functional,
    params: Any,
    tokens: Int[Array, "B S"],
    last: Int[Array, " B"],
    key: PRNGKeyArray,
    temperature: Float[Array, ""],
    *,
    slots: int,
    vocab_size: int,
) -> tuple[Int[Array, " B"], AttentionContext]:
    """Runs the prompts and samples the token after position ``last`` of each.

    A prompt is filled up with its last token, which stays at position ``last``: what it writes to the cache is what is
    there, and no row is longer than its prompt, which matters to rotary scalings that look at the length.
    """
    batch, length = tokens.shape
    positions = jnp.minimum(jnp.arange(length, dtype=jnp.int32), last[:, None])
    hidden, cache = model.forward(params, tokens, positions, empty_cache(model.config, batch, slots))
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)  # only the row that is sampled is projected
    logits = next_logits(model, params, hidden, vocab_size)
    return sample(logits, temperature, key, last + 1), cache


def decode(
    model: Functional,
    params: Any,
    token: Int[Array, " B"],
    position: Int[Array, " B"],
    key: PRNGKeyArray,
    temperature: Float[Array, ""],
    cache: AttentionContext,
    *,
    count: int,
    vocab_size: int,
) -> tuple[Int[Array, "B count"], Int[Array, " B"], Int[Array, " B"], AttentionContext]:
    """Feeds each row its last token and makes ``count`` more, without leaving the device."""

    def step(carry: tuple[Array, Array, AttentionContext], _: None) -> tuple[Any, Array]:
        token, position, cache = carry
        hidden, cache = model.forward(params, token[:, None], position[:, None], cache)
        logits = next_logits(model, params, hidden, vocab_size)
        token = sample(logits, temperature, key, position + 1)
        return (token, position + 1, cache), token

    (token, position, cache), made = jax.lax.scan(step, (token, position, cache), None, length=count)
    return made.T, token, position, cache


def next_logits(model: Functional, params: Any, hidden: Float[Array, "B 1 D"], vocab_size: int) -> Float[Array, "B V"]:
    """Logits of the next token; those that no tokenizer knows have no probability."""
    logits = model.head(params, hidden)[:, 0]
    if vocab_size == logits.shape[1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[1]) < vocab_size, logits, -jnp.inf)


def check_request(
    prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, stop_ids: Sequence[int], vocab_size: int
) -> None:
    """Refuses what cannot be generated from."""
    if not prompts or any(len(p) == 0 for p in prompts):
        raise ValueError("a prompt is empty; generation starts from at least one token.")
    check_settings(max_tokens, temperature)
    for what, tokens in (*(("a prompt", p) for p in prompts), ("stop_ids", stop_ids)):
        wrong = [token for token in tokens if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"{what} holds token {wrong[0]}, but the vocabulary has {vocab_size} tokens.")


def check_settings(max_tokens: int, temperature: float) -> None:
    """Refuses what no prompt can be continued with."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}; give 1 or more.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature = {temperature}; give 0 (the likeliest token) or a positive number.")
