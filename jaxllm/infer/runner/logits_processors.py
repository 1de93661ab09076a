"""Logits processors on the device: penalties, biases, bad words, allowed tokens, minimum length, and grammar masks.

A request's parameters are written into its slot when it is admitted: a bias for each token, counts of the tokens it
has, bad words. One program, ``seat``, writes them; each step updates the counts on the device, so the host need not
see a token before the next is sampled. Rows that request no processing keep their logits bit for bit.

Legend: S sampled rows, R slots, V vocab, W tokens of a bad word before its last, M bad words, U 32-bit words of a
mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.infer.runner.step.packed_buffer import PackedBuffer

MAX_BAD_WORD_TOKENS = 8
"""Tokens of the longest bad word."""
MAX_BAD_WORDS = 32
"""Bad bad_words of several tokens that a request may have; the number of single-token ones is not limited."""
IN_PROMPT, IS_STOP, COUNT = 1 << 30, 1 << 29, (1 << 29) - 1
"""Bit field of a token in ``LogitsState.seen``: in the prompt; a stop token; its count in the completion."""
SHAPED, MASKED, SAMPLES = 1, 2, 4
"""Bits of a row's kind: apply the slot's state; apply the row's mask; the row samples a token.

A prefill chunk that does not end its prompt samples none."""


class LogitsState(NamedTuple):
    """Logits-processor state of every slot.

    Attributes:
        seen: bit field of each token, see ``IN_PROMPT``.
        bias: added to logits; -inf forbids a token.
        recent: the sequence's last tokens, the newest at the end; -1 where there is none.
        bad_words: bad words, each at the end of its row after -1; a row of -1 where there is none.
    """

    seen: Int[Array, "R V"]
    bias: Float[Array, "R V"]
    recent: Int[Array, "R W"]
    bad_words: Int[Array, "R M W1"]


class LogitsParams(NamedTuple):
    """Logits-processor parameters of every sampled row.

    Attributes:
        slots: slot of the row's request; R where there is no request.
        kind: bit field, see ``SHAPED``.
        positions: position of the sampled token.
        earliest: first position at which a stop token is allowed.
        repetition, presence, frequency: penalties.
    """

    slots: Int[Array, " S"]
    kind: Int[Array, " S"]
    positions: Int[Array, " S"]
    earliest: Int[Array, " S"]
    repetition: Float[Array, " S"]
    presence: Float[Array, " S"]
    frequency: Float[Array, " S"]


def slot_buffer(vocab: int) -> PackedBuffer:
    """Packed buffer of ``seat``: one slot's state."""
    return PackedBuffer((
        ("slot", (), "int32"), ("seen", (vocab,), "int32"), ("bias", (vocab,), "float32"),
        ("recent", (MAX_BAD_WORD_TOKENS - 1,), "int32"), ("bad_words", (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), "int32"),
    ))  # fmt: skip


def empty_state(slots: int, vocab: int) -> LogitsState:
    """Logits-processor state of slots that request no processing."""
    return LogitsState(
        jnp.zeros((slots, vocab), jnp.int32),
        jnp.zeros((slots, vocab), jnp.float32),
        jnp.full((slots, MAX_BAD_WORD_TOKENS - 1), -1, jnp.int32),
        jnp.full((slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
    )


def seat(state: tuple[Array, ...], packed: Int[Array, " elements"]) -> tuple[Array, ...]:
    """Writes one slot's state, packed by the host."""
    state = LogitsState(*state)
    x = slot_buffer(state.seen.shape[1]).unpack(packed)
    slot = x["slot"]
    return tuple(old.at[slot].set(x[name], mode="drop") for name, old in state._asdict().items())


def process_logits(
    logits: Float[Array, "S V"], state: LogitsState, params: LogitsParams, masks: Int[Array, "S U"]
) -> Float[Array, "S V"]:
    """Applies penalties, then biases, then sets the logits of forbidden tokens to -inf."""

    def apply_slot_state(logits: Array) -> Array:
        slots = jnp.minimum(params.slots, state.seen.shape[0] - 1)
        seen = state.seen[slots]
        count = seen & COUNT
        real = logits.dtype
        repetition, presence, frequency = (
            x[:, None].astype(real) for x in (params.repetition, params.presence, params.frequency)
        )
        penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
        new = jnp.where((count > 0) | ((seen & IN_PROMPT) != 0), penalised, logits)
        new = new - count.astype(real) * frequency - jnp.where(count > 0, presence, 0)
        new = new + state.bias[slots].astype(real)
        early = (params.positions < params.earliest)[:, None] & ((seen & IS_STOP) != 0)
        new = jnp.where(early, -jnp.inf, new)
        bad_words, recent = state.bad_words[slots], state.recent[slots]
        prefix_matches = jnp.all((bad_words[:, :, :-1] == recent[:, None]) | (bad_words[:, :, :-1] < 0), axis=2)
        last = jnp.where(prefix_matches & (bad_words[:, :, -1] >= 0), bad_words[:, :, -1], logits.shape[1])
        new = jax.vmap(lambda row, tokens: row.at[tokens].set(-jnp.inf, mode="drop"))(new, last)
        return jnp.where(((params.kind & SHAPED) != 0)[:, None], new, logits)

    def apply_mask(logits: Array) -> Array:
        bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
        legal = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] != 0
        return jnp.where(legal | ((params.kind & MASKED) == 0)[:, None], logits, -jnp.inf)

    logits = jax.lax.cond(jnp.any((params.kind & SHAPED) != 0), apply_slot_state, lambda x: x, logits)
    return jax.lax.cond(jnp.any((params.kind & MASKED) != 0), apply_mask, lambda x: x, logits)


def record_tokens(state: LogitsState, params: LogitsParams, tokens: Int[Array, " S"]) -> LogitsState:
    """Updates counts and recent tokens after the sampled tokens."""
    there = ((params.kind & SHAPED) != 0) & ((params.kind & SAMPLES) != 0)

    def update(state: LogitsState) -> LogitsState:
        slots = jnp.where(there, params.slots, state.seen.shape[0])
        seen = state.seen.at[slots, tokens].add(1, mode="drop")
        old = state.recent[jnp.minimum(slots, state.seen.shape[0] - 1)]
        recent = state.recent.at[slots].set(jnp.concatenate([old[:, 1:], tokens[:, None]], axis=1), mode="drop")
        return state._replace(seen=seen, recent=recent)

    return jax.lax.cond(jnp.any(there), update, lambda s: s, state)


def fill_slot(
    x: dict[str, np.ndarray],
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    bias: dict[int, float],
    allowed: Sequence[int] | None,
    bad_words: Sequence[tuple[int, ...]],
    stops: Sequence[int],
) -> None:
    """Fills the packed buffer of a slot, on the host.

    Args:
        x: views of the buffer, all zero.
        prompt, text: known tokens of the prompt and of the completion.
        bias: logit biases by token.
        allowed: the only tokens that may be sampled; None: all.
        bad_words: bad words, each of MAX_BAD_WORD_TOKENS tokens at most, and MAX_BAD_WORDS of several tokens at most.
        stops: stop tokens.
    """
    x["seen"][list(set(prompt))] = IN_PROMPT
    tokens, counts = np.unique(np.asarray(text, np.int64), return_counts=True)
    x["seen"][tokens] += counts.astype(np.int32)
    x["seen"][list(stops)] |= IS_STOP
    if allowed is not None:
        x["bias"][:] = -np.inf
        x["bias"][list(allowed)] = 0
    for token, value in bias.items():
        x["bias"][token] += value
    for (token,) in (word for word in bad_words if len(word) == 1):
        x["bias"][token] = -np.inf
    x["bad_words"][:] = -1
    for row, word in zip(x["bad_words"], (word for word in bad_words if len(word) > 1), strict=False):
        row[MAX_BAD_WORD_TOKENS - len(word) :] = word
    known = [*prompt, *text][-(MAX_BAD_WORD_TOKENS - 1) :]
    x["recent"][:] = -1
    x["recent"][MAX_BAD_WORD_TOKENS - 1 - len(known) :] = known
