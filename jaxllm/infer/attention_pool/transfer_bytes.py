"""Transfer bytes: what goes between weights and attention pool in a step, by formula.

In every layer the queries, keys and values of all rows go to the devices with the pages, and the attention output comes
back (Lamina, arXiv:2405.01814, section 4). Nothing of it grows with the context.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.infer.pools.pool_argument import AttentionPoolSizes
from jaxllm.models import DecoderConfig


class TransferBytes(NamedTuple):
    """Bytes that go from one part of an engine to the other.

    Attributes:
        sent: of queries, keys, values and attention sinks, to the attention devices.
        returned: of attention outputs.
    """

    sent: int
    returned: int


def transfer_bytes(
    config: DecoderConfig, sizes: AttentionPoolSizes, rows: int, width: int, *, halves: bool = False
) -> TransferBytes:
    """Bytes of a step's transfers, padding rows included.

    Heads that are fewer than the attention devices go to several of them; with pages spread over ``context`` everything
    goes to all.

    Args:
        config: the model.
        sizes: devices of both parts.
        rows: rows of the step's program.
        width: bytes of a value in compute dtype.
        halves: the rows go in two halves, of equally many rows.
    """
    times = 2 if halves else 1
    rows = times * -(-rows // times)
    parts, spread = (sizes.attention, 1) if sizes.axis == "tensor" else (1, sizes.attention)
    sent = returned = 0
    for block in config.blocks:
        attention, spec = block.attention, block.attention.kv_spec
        kv_heads = max(spec.kv_heads, parts)
        each = attention.heads * spec.key_dim + kv_heads * (spec.key_dim + (0 if spec.latent else spec.value_dim))
        sinks = times * attention.heads if getattr(attention, "sinks", False) else 0
        sent += spread * (rows * each + sinks) * width
        returned += rows * attention.heads * spec.value_dim * width
    return TransferBytes(sent, returned)
