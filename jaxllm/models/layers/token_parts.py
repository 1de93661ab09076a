"""Token parts: rows of a batch that go through each block one part after the other.

Under tensor parallelism a sublayer ends in an all-reduce. Those of one part are not waited for by the matmuls of the
next one, so they travel while it computes: two parts of a prompt (ISO, arXiv:2409.11155) or of a batch (nano-batches,
NanoFlow, arXiv:2408.12757). A part attends to the keys of earlier parts, which are written before.

Legend: B batch, S sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array

from jaxllm.models.attention_context import AttentionContext


class TokenParts(NamedTuple):
    """Parts of an array over tokens, in order.

    Attributes:
        parts: [B S ...] each.
    """

    parts: tuple[Array, ...]


@runtime_checkable
class PartsContext(Protocol):
    """Attention context of a batch whose rows are in parts."""

    def part(self, number: int) -> AttentionContext:
        """Context of the rows of one part."""
        ...

    def after(self, part: Any) -> PartsContext:
        """The context after a part has been through a layer.

        Args:
            part: its context then.
        """
        ...


def through(block: Callable[..., tuple[Any, Any]], x: Any, positions: Any, layer: Any, ctx: Any) -> tuple[Any, Any]:
    """Output of a block and the updated attention context, of a batch that may be in parts.

    Args:
        block: ``(x, positions, layer, ctx) -> (x, ctx)``.
        x: residual stream; ``TokenParts`` of it, then ``positions`` are ``TokenParts`` and ``ctx`` a ``PartsContext``.
    """
    if not isinstance(x, TokenParts):
        return block(x, positions, layer, ctx)
    out = []
    for number, (part, places) in enumerate(zip(x.parts, positions.parts, strict=True)):
        after, own = block(part, places, layer, ctx.part(number))
        out.append(after)
        ctx = ctx.after(own)
    return TokenParts(tuple(out)), ctx
