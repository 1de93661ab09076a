"""Verification on the device: which of the tokens that a proposer proposed would have been sampled.

The proposed tokens of a request are the last rows of its chunk. A token is sampled after each of these rows, with the
seed of its position, so a token that is sampled after accepted ones is the very token that plain decoding samples,
greedy or not (the sampling of arXiv:2211.17192 for a proposal without probabilities).

The proposed tokens may be a tree: a token is then sampled after the one before them, the child that has that token is
followed, and so on (SpecExec, arXiv:2406.02532: the tree is a cache of the model's probabilities).

Legend: S requests, G last rows of a request, T rows of the flat batch, V vocab, D embed, U words of a token mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.infer.runner.logits_processors import SAMPLES
from jaxllm.infer.runner.sampler import logprobs
from jaxllm.infer.runner.step.step_shape import StepShape


def last_rows(hidden: Float[Array, "T D"], ends: Int[Array, " S"], rows: int) -> Float[Array, "_ D"]:
    """Last ``rows`` rows of each request, request by request; rows before the batch are its first row."""
    if rows == 1:
        return hidden[jnp.maximum(ends - 1, 0)]
    at = ends[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)
    return hidden[jnp.maximum(at, 0).reshape(-1)]


def likeliest(logits: Float[Array, "_ V"], shape: StepShape) -> tuple[dict[str, Array], Int[Array, " S"]]:
    """Likeliest tokens after each row, for a draft tree: outputs of every row, [G, S, ...], and the last row's token.

    Args:
        logits: of ``last_rows``.
        shape: shape of the step, with ``branches``.
    """
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    _, ids, logs = logprobs(logits, tokens, shape.branches)

    def by_row(array: Array) -> Array:
        return array.reshape(-1, shape.rows, *array.shape[1:]).swapaxes(0, 1)

    out = {"tokens": by_row(tokens), "branch_ids": by_row(ids), "branch_logs": by_row(logs)}
    return out, out["tokens"][-1]


def sample_proposed(
    sample: Callable[..., tuple[dict[str, Array], Any]],
    rows: int,
    logits: Float[Array, "_ V"],
    x: dict[str, Array],
    state: Any,
    masks: Int[Array, "_ U"] | None,
    *,
    every_row: bool = False,
) -> tuple[dict[str, Array], Int[Array, " S"], Any]:
    """Samples after each of the last rows, one after the other, while the tokens sampled are those proposed.

    Logits processors record a token only if it is accepted, so that nothing has to be taken back from their state.

    Args:
        sample: (logits, inputs, positions, state, masks) -> (outputs, state), for one row of each request.
        rows: G.
        logits: of ``last_rows``.
        x: inputs of the step, see ``StepShape.inputs``.
        state, masks: of the logits processors; masks of each row.
        every_row: samples after all of the rows, whatever is sampled.

    Returns:
        outputs of every row, [G, S, ...]; the last token of each request; the state.
    """
    ends, first = x["starts"][1:], rows - 1 - x["proposed"]

    def by_row(array: Array) -> Array:
        return array.reshape(-1, rows, array.shape[1]).swapaxes(0, 1)

    def one(carry: Any, row: Any) -> Any:
        state, accepted, newest = carry
        j, logits, masks = row
        active = accepted & (j >= first)
        own = dict(x)
        if "kind" in own:
            own["kind"] = jnp.where(active, own["kind"], own["kind"] & ~SAMPLES)
        out, state = sample(logits, own, x["kv_lens"] - (rows - 1 - j), state, masks)
        following = x["tokens"][jnp.clip(ends - (rows - 1 - j), 0, x["tokens"].shape[0] - 1)]
        newest = jnp.where(active, out["tokens"], newest)
        if not every_row:
            accepted = accepted & ((j < first) | (out["tokens"] == following))
        return (state, accepted, newest), out

    every = jnp.arange(rows, dtype=jnp.int32), by_row(logits), None if masks is None else by_row(masks)
    # Made from an input, so that they vary over the same mesh axes.
    begin = state, first == first, jnp.zeros_like(first)
    (state, _, newest), out = jax.lax.scan(one, begin, every)
    return out, newest, state


def sample_tree(
    sample: Callable[..., tuple[dict[str, Array], Any]],
    rows: int,
    logits: Float[Array, "_ V"],
    x: dict[str, Array],
    state: Any,
    masks: Int[Array, "_ U"] | None,
) -> tuple[dict[str, Array], Int[Array, " S"], Any, Int[Array, "S G"]]:
    """Samples along the branch of a draft tree whose tokens are sampled.

    Args:
        sample, rows, logits, x, state, masks: see ``sample_proposed``.

    Returns:
        outputs by the number of tokens before, [G, S, ...]; the last token of each request; the state; the branch:
        which of the proposed tokens, from 1 on, were followed, -1 behind the last.
    """
    ends, proposed, requests = x["starts"][1:], x["proposed"], x["proposed"].shape[0]
    number = jnp.arange(1, rows, dtype=jnp.int32)
    at = jnp.clip(ends[:, None] - proposed[:, None] - 1 + number, 0, x["tokens"].shape[0] - 1)
    drafts, there = x["tokens"][at], number <= proposed[:, None]

    def of_row(array: Array, row: Array) -> Array:
        rows_of = array.reshape(requests, rows, -1)
        return jnp.take_along_axis(rows_of, row[:, None, None], axis=1)[:, 0]

    def one(depth: Array, here: Array, active: Array, state: Any) -> tuple[dict[str, Array], Any, Array]:
        row, own = rows - 1 - proposed + here, dict(x)
        if "kind" in own:
            own["kind"] = jnp.where(active, own["kind"], own["kind"] & ~SAMPLES)
        mask = None if masks is None else of_row(masks, row)
        out, state = sample(of_row(logits, row), own, x["kv_lens"] - proposed + depth, state, mask)
        follows = there & (x["parents"] == here[:, None]) & (drafts == out["tokens"][:, None])
        following = jnp.where(jnp.any(follows, axis=1), jnp.argmax(follows, axis=1).astype(jnp.int32) + 1, -1)
        return out, state, jnp.where(active, following, -1)

    def more(carry: Any) -> Any:
        depth, here, newest, state, outputs, branch = carry
        active = here >= 0
        out, state, following = one(depth, jnp.maximum(here, 0), active, state)
        outputs = jax.tree.map(lambda every, own: every.at[depth].set(own), outputs, out)
        newest = jnp.where(active, out["tokens"], newest)
        return depth + 1, following, newest, state, outputs, branch.at[:, depth].set(following)

    # The first is always sampled. What the loop carries is made of inputs, so that it varies over the same mesh axes.
    here = jnp.zeros_like(proposed)
    out, state, following = one(jnp.int32(0), here, here == 0, state)
    outputs = jax.tree.map(lambda own: jnp.zeros_like(jnp.stack([own] * rows)).at[0].set(own), out)
    branch = jnp.zeros_like(jnp.stack([following] * rows, axis=1)).at[:].set(-1).at[:, 0].set(following)
    begin = jnp.int32(1), following, out["tokens"], state, outputs, branch
    _, _, newest, state, outputs, branch = jax.lax.while_loop(
        lambda carry: (carry[0] < rows) & jnp.any(carry[1] >= 0), more, begin
    )
    return outputs, newest, state, branch
