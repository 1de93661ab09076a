"""Sizes of the fused mixture's TPU kernel: what it takes, and the part of an expert's width that passes at a time.

Legend: T tokens, D embed, F width of an expert.
"""

from __future__ import annotations

from pallas_kernels._compat import target_device

LANES = 128
VMEM_BYTES = 48 * 2**20
"""VMEM limit of the kernel: the smallest generation that it is compiled for has 64 MiB."""
SMALL = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")
"""Kinds of device with 16 MiB of VMEM, which the kernel does not take."""
PART_BYTES = 24 * 2**20
"""Most bytes of the matrices of two steps, of which one is fetched while the other is multiplied."""
MAX_TOKENS = 128
"""Most tokens: with more, the work for experts that a token did not choose takes longer than reading weights."""


def refusal(t: int, d: int, f: int, item_bytes: int) -> str:
    """Why the kernel does not take so many tokens and an expert of these sizes on the device that is compiled for;
    empty if it does.

    Args:
        t: tokens.
        d, f: embed, and width of an expert.
        item_bytes: bytes of an element.
    """
    if t > MAX_TOKENS:
        return f"pallas_tpu takes {MAX_TOKENS} tokens at most, not {t}."
    if (kind := target_device().kind) in SMALL:
        return f"pallas_tpu needs {VMEM_BYTES >> 20} MiB of VMEM; a {kind} has 16."
    if (held := vmem_bytes(t, d, f, item_bytes)) > VMEM_BYTES:
        return (
            f"pallas_tpu needs {held / 2**20:.0f} MiB of VMEM for {t} tokens of {d} columns and "
            f"{part_of_width(d, f, item_bytes)} of an expert's {f} inner columns and has {VMEM_BYTES >> 20}."
        )
    return ""


def vmem_bytes(t: int, d: int, f: int, item_bytes: int) -> int:
    """Bytes of VMEM: matrices of two steps, tokens and results twice, their sums, and inner activations in float32.

    Args:
        t: tokens.
        d, f: embed, and width of an expert.
        item_bytes: bytes of an element.
    """
    part = part_of_width(d, f, item_bytes)
    return 6 * item_bytes * d * part + (4 * item_bytes + 4) * t * d + 8 * t * part


def part_of_width(d: int, f: int, item_bytes: int) -> int:
    """Inner columns of one step: as many as keep the matrices of two steps within ``PART_BYTES``; all, where F has no
    such divisor in whole lanes.

    Args:
        d, f: embed, and width of an expert.
        item_bytes: bytes of an element.
    """
    divisors = [part for part in range(LANES, f + 1, LANES) if f % part == 0]
    fitting = [part for part in divisors if 6 * item_bytes * d * part <= PART_BYTES]
    return max(fitting, default=min(divisors, default=f))
