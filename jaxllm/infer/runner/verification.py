"""Verification on the device: which of the tokens that a proposer proposed would have been sampled.

The proposed tokens of a request are the last rows of its chunk. A token is sampled after each of these rows, with the
seed of its position, so a token that is sampled after accepted ones is the very token that plain decoding samples,
greedy or not (the sampling of arXiv:2211.17192 for a proposal without probabilities).

Legend: S requests, G last rows of a request, T rows of the flat batch, V vocab, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.infer.runner.logits_processors import SAMPLES


def last_rows(hidden: Float[Array, "T D"], ends: Int[Array, " S"], rows: int) -> Float[Array, "_ D"]:
    """Last ``rows`` rows of each request, request by request; rows before the batch are its first row."""
    if rows == 1:
        return hidden[jnp.maximum(ends - 1, 0)]
    at = ends[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)
    return hidden[jnp.maximum(at, 0).reshape(-1)]


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
