"""Logits changed by what a request asks for and by what its text has, on the device.

What a request asks for lies in its slot from when it gets one: a bias for each token, what its text has, words it must
not make. One program, ``seat``, puts it there; steps keep it up to date, so the host need not see a token before the
next is drawn. Rows that ask for nothing keep their logits to the bit.

Legend: S sampled rows, R slots, V vocab, W tokens of a word before its last, M words, U 32-bit pieces of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.infer.runner.packed_buffer import Layout

WORD = 8
"""Tokens of the longest bad word."""
WORDS = 32
"""Bad words of more than one token that a request may have; those of one token are without number."""
IN_PROMPT, IS_STOP, COUNT = 1 << 30, 1 << 29, (1 << 29) - 1
"""Of what a slot has seen of a token: the prompt has it, it ends the text, how often the text has it."""
SHAPED, MASKED, SAMPLES = 1, 2, 4
"""Of a row's kind: its slot's state counts, its mask counts, it makes a token (a piece of a prompt makes none)."""


class State(NamedTuple):
    """Of each slot.

    Attributes:
        seen: see ``IN_PROMPT``.
        bias: added to logits; -inf takes a token away.
        recent: the last tokens, the newest at the end; -1 where there is none.
        words: that are not made, each at the end of its row after -1; -1 throughout where there is none.
    """

    seen: Int[Array, "R V"]
    bias: Float[Array, "R V"]
    recent: Int[Array, "R W"]
    words: Int[Array, "R M W1"]


class Asked(NamedTuple):
    """Of each sampled row.

    Attributes:
        slots: R where there is no request.
        kind: see ``SHAPED``.
        positions: that the token fills.
        earliest: the first position that a stop token may fill.
        repetition, presence, frequency: penalties.
    """

    slots: Int[Array, " S"]
    kind: Int[Array, " S"]
    positions: Int[Array, " S"]
    earliest: Int[Array, " S"]
    repetition: Float[Array, " S"]
    presence: Float[Array, " S"]
    frequency: Float[Array, " S"]


def row_layout(vocab: int) -> Layout:
    """What ``seat`` is told."""
    return Layout((
        ("slot", (), "int32"), ("seen", (vocab,), "int32"), ("bias", (vocab,), "float32"),
        ("recent", (WORD - 1,), "int32"), ("words", (WORDS, WORD), "int32"),
    ))  # fmt: skip


def empty_state(slots: int, vocab: int) -> State:
    """Slots that ask for nothing."""
    return State(
        jnp.zeros((slots, vocab), jnp.int32),
        jnp.zeros((slots, vocab), jnp.float32),
        jnp.full((slots, WORD - 1), -1, jnp.int32),
        jnp.full((slots, WORDS, WORD), -1, jnp.int32),
    )


def seat(state: tuple[Array, ...], packed: Int[Array, " numbers"]) -> tuple[Array, ...]:
    """The state with one slot's as the host says."""
    state = State(*state)
    x = row_layout(state.seen.shape[1]).unpack(packed)
    slot = x["slot"]
    return tuple(old.at[slot].set(x[name], mode="drop") for name, old in state._asdict().items())


def shaped(logits: Float[Array, "S V"], state: State, asked: Asked, masks: Int[Array, "S U"]) -> Float[Array, "S V"]:
    """Logits with penalties, then biases, then what must not be made at -inf."""

    def by_slot(logits: Array) -> Array:
        slots = jnp.minimum(asked.slots, state.seen.shape[0] - 1)
        seen = state.seen[slots]
        count = seen & COUNT
        real = logits.dtype
        repetition, presence, frequency = (
            x[:, None].astype(real) for x in (asked.repetition, asked.presence, asked.frequency)
        )
        punished = jnp.where(logits > 0, logits / repetition, logits * repetition)
        new = jnp.where((count > 0) | ((seen & IN_PROMPT) != 0), punished, logits)
        new = new - count.astype(real) * frequency - jnp.where(count > 0, presence, 0)
        new = new + state.bias[slots].astype(real)
        early = (asked.positions < asked.earliest)[:, None] & ((seen & IS_STOP) != 0)
        new = jnp.where(early, -jnp.inf, new)
        words, recent = state.words[slots], state.recent[slots]
        begun = jnp.all((words[:, :, :-1] == recent[:, None]) | (words[:, :, :-1] < 0), axis=2)
        last = jnp.where(begun & (words[:, :, -1] >= 0), words[:, :, -1], logits.shape[1])
        new = jax.vmap(lambda row, tokens: row.at[tokens].set(-jnp.inf, mode="drop"))(new, last)
        return jnp.where(((asked.kind & SHAPED) != 0)[:, None], new, logits)

    def by_mask(logits: Array) -> Array:
        bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
        legal = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] != 0
        return jnp.where(legal | ((asked.kind & MASKED) == 0)[:, None], logits, -jnp.inf)

    logits = jax.lax.cond(jnp.any((asked.kind & SHAPED) != 0), by_slot, lambda x: x, logits)
    return jax.lax.cond(jnp.any((asked.kind & MASKED) != 0), by_mask, lambda x: x, logits)


def grown(state: State, asked: Asked, tokens: Int[Array, " S"]) -> State:
    """The state after these tokens were made."""
    there = ((asked.kind & SHAPED) != 0) & ((asked.kind & SAMPLES) != 0)

    def grow(state: State) -> State:
        slots = jnp.where(there, asked.slots, state.seen.shape[0])
        seen = state.seen.at[slots, tokens].add(1, mode="drop")
        old = state.recent[jnp.minimum(slots, state.seen.shape[0] - 1)]
        recent = state.recent.at[slots].set(jnp.concatenate([old[:, 1:], tokens[:, None]], axis=1), mode="drop")
        return state._replace(seen=seen, recent=recent)

    return jax.lax.cond(jnp.any(there), grow, lambda s: s, state)


def fill_row(
    x: dict[str, np.ndarray],
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    bias: dict[int, float],
    allowed: Sequence[int] | None,
    words: Sequence[tuple[int, ...]],
    stops: Sequence[int],
) -> None:
    """What a slot is to hold, on the host.

    Args:
        x: views of a row, zero.
        prompt, text: tokens that are known.
        bias: of tokens.
        allowed: no others; None: all.
        words: that are not made, of WORD tokens at most; of those longer than one WORDS at most.
        stops: tokens that end the text.
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
    for (token,) in (word for word in words if len(word) == 1):
        x["bias"][token] = -np.inf
    x["words"][:] = -1
    for row, word in zip(x["words"], (word for word in words if len(word) > 1), strict=False):
        row[WORD - len(word) :] = word
    known = [*prompt, *text][-(WORD - 1) :]
    x["recent"][:] = -1
    x["recent"][WORD - 1 - len(known) :] = known
