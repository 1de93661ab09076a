"""Residual streams: which sublayers' outputs the input of a sublayer has.

plain   those of all sublayers before it
ladder  those of all but the one just before it, so that under tensor parallelism the matmuls of a sublayer do not wait
        for the all-reduce of that one's output (Ladder Residual, arXiv:2501.06589)

``DecoderConfig.residual`` names one, or several by layers, such as "plain=8,ladder=8". The parameters are the same.

Legend: B batch, S sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.models.layers.token_parts import TokenParts
from jaxllm.models.layers.values_by_layers import parse_by_layers, split_by_segment

KINDS = ("plain", "ladder")


class LadderStream(NamedTuple):
    """Residual stream of ladder blocks.

    Attributes:
        reduced: the stream without the output of the last sublayer.
        pending: that output.
    """

    reduced: Float[Array, "B S D"]
    pending: Float[Array, "B S D"]


class GatedStream(NamedTuple):
    """Plain residual stream, with what the next router reads where routers read the input of the mixture before.

    Attributes:
        plain: the stream.
        gate: input of the last mixture of experts.
        known: whether there has been one.
    """

    plain: Float[Array, "B S D"]
    gate: Float[Array, "B S D"]
    known: Bool[Array, ""]

    def gate_input(self, h: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Input of the router of a layer whose own input is ``h``."""
        return jnp.where(self.known, self.gate, h)


LayerStream = Float[Array, "B S D"] | GatedStream
"""Streams that programs of single layers pass on."""
Stream = Float[Array, "B S D"] | LadderStream | GatedStream | TokenParts
"""Plain, ladder, plain with the input of the last mixture, or plain in parts."""


def residual_by_segment(residual: str, segments: Sequence[tuple[Sequence[Any], int]]) -> list[list[tuple[str, int]]]:
    """Kind of residual stream of each segment's layers in order, each with its number of repeats.

    Args:
        residual: ``DecoderConfig.residual``.
        segments: ``DecoderConfig.segments``.

    Raises:
        ValueError: it is neither a kind nor a list of them that fits the layers.
    """
    try:
        kinds = parse_by_layers(residual)
        if unknown := [kind for kind, _ in kinds if kind not in KINDS]:
            raise ValueError(f"there is no {unknown[0]!r}")
        return split_by_segment(kinds, segments)
    except ValueError as error:
        raise ValueError(
            f"model: residual = {residual!r}: {error}. Give one of {', '.join(KINDS)}, or both with their numbers of "
            'layers, such as "plain=8,ladder=8".'
        ) from None


def whole(x: Stream) -> Float[Array, "B S D"] | TokenParts:
    """The residual stream with the outputs of all sublayers, in parts as before."""
    if isinstance(x, GatedStream):
        return x.plain
    return x.reduced + x.pending if isinstance(x, LadderStream) else x


def plain_of(x: LayerStream) -> Float[Array, "B S D"]:
    """The plain stream."""
    return x.plain if isinstance(x, GatedStream) else x


def gated(x: Float[Array, "B S D"]) -> GatedStream:
    """The stream at the first layer of a model whose routers read the input of the mixture before."""
    return GatedStream(x, jnp.zeros_like(x), jnp.asarray(False))


def as_kind(x: Stream, kind: str) -> Stream:
    """The residual stream as blocks of a kind read it. What a plain block reads waits for all sublayers before it."""
    if isinstance(x, GatedStream):
        return x
    if kind == "plain":
        return whole(x)
    assert not isinstance(x, TokenParts), "an engine refuses the two together"
    return x if isinstance(x, LadderStream) else LadderStream(x, jnp.zeros_like(x))
