"""GGML formats and their dequantisation: plain numbers, and blocks of 32 or 256 values such as the k-quants.

A block holds a few bits of every value and the scales to multiply them by. The layouts are those of ``ggml-common.h``
and the arithmetic, float32 throughout and in this order, that of ``ggml-quants.c`` (https://github.com/ggml-org/ggml).
Letters in the layouts: d scale, m minimum, s scales (and minima) of parts of the block, q the low bits of the values,
h their high bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

CHUNK = 1 << 16
"""Number of values decoded at a time: small enough to stay in a core's cache."""


@dataclass(frozen=True)
class GgmlFormat:
    """One number format.

    Attributes:
        name: GGML's name of it.
        layout: dtype of a block's bytes; of a plain format, of the value itself.
        values: number of values in a block.
        decode: (blocks [n], float32 [n, values] to fill); None for a plain format.
    """

    name: str
    layout: np.dtype
    values: int = 1
    decode: Callable[[np.ndarray, np.ndarray], None] | None = None

    @property
    def dtype(self) -> np.dtype:
        """Dtype of decoded values: float32, or a plain format's own."""
        return self.layout if self.decode is None else np.dtype(np.float32)


def dequantize(kind: GgmlFormat, data: UInt8[np.ndarray, " bytes"], out: Float[np.ndarray, " values"]) -> None:
    """Decodes whole blocks into ``out``, contiguous and of any float dtype; needs little memory besides.

    Float32 values are bit for bit GGML's; other dtypes are rounded from them.
    """
    assert kind.decode is not None
    blocks, rows = data.view(kind.layout), out.reshape(-1, kind.values)
    step = max(1, CHUNK // kind.values)
    buffer = None if out.dtype == np.float32 else np.empty((min(step, len(blocks)), kind.values), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # damaged scales: the caller checks the values
        for begin in range(0, len(blocks), step):
            some, into = blocks[begin : begin + step], rows[begin : begin + step]
            if buffer is None:
                kind.decode(some, into)
            else:
                kind.decode(some, buffer[: len(some)])
                into[...] = buffer[: len(some)]


def _float(field: np.ndarray) -> np.ndarray:
    """One value per block as a float32 column."""
    return field.astype(np.float32)[:, None]


def _nibbles(q: np.ndarray, out: np.ndarray) -> None:
    """Unpacks ``q`` [..., w] into ``out`` [..., 2, w]: low halves of the bytes, then high halves."""
    out[..., 0, :] = q & 15
    out[..., 1, :] = q >> 4


def _crumbs(q: np.ndarray) -> np.ndarray:
    """Unpacks ``q`` [..., w] into [..., 4, w]: its two-bit parts, lowest first."""
    return q[..., None, :] >> np.array([[0], [2], [4], [6]], np.uint8) & 3


def _bits(h: np.ndarray) -> np.ndarray:
    """Unpacks ``h`` [n, w] into [n, 8, w]: its bits, lowest first."""
    return h[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1


def scales_and_minima(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima out of 12 bytes.

    Bytes 0..3 and 4..7 hold scales and minima 0..3, and in their upper two bits those of 4..7, whose lower four bits
    are the halves of bytes 8..11.
    """
    first, second, low = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([first & 63, low & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, low >> 4 | second >> 6 << 4], axis=1)
    return scales, minima


def _q4_0(b: np.ndarray, out: np.ndarray) -> None:
    """d (q - 8), q of 4 bits."""
    _nibbles(b["q"], out.reshape(-1, 2, 16))
    out -= 8
    out *= _float(b["d"])


def _q4_1(b: np.ndarray, out: np.ndarray) -> None:
    """d q + m, q of 4 bits."""
    _nibbles(b["q"], out.reshape(-1, 2, 16))
    out *= _float(b["d"])
    out += _float(b["m"])


def _q5_0(b: np.ndarray, out: np.ndarray) -> None:
    """d (q - 16), q of 5 bits; bit i of h is the highest of value i."""
    _nibbles(b["q"], out.reshape(-1, 2, 16))
    out += np.unpackbits(b["h"], axis=1, bitorder="little") << 4
    out -= 16
    out *= _float(b["d"])


def _q5_1(b: np.ndarray, out: np.ndarray) -> None:
    """d q + m, q of 5 bits as in Q5_0."""
    _nibbles(b["q"], out.reshape(-1, 2, 16))
    out += np.unpackbits(b["h"], axis=1, bitorder="little") << 4
    out *= _float(b["d"])
    out += _float(b["m"])


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    """d q, q of 8 bits with sign."""
    np.multiply(b["q"], _float(b["d"]), out=out)


def _q2_k(b: np.ndarray, out: np.ndarray) -> None:
    """d s q - m t, q of 2 bits; s and t of 4 bits for each 16 values, the halves of one byte."""
    out.reshape(-1, 2, 4, 32)[...] = _crumbs(b["q"].reshape(-1, 2, 32))
    parts = out.reshape(-1, 16, 16)
    parts *= (_float(b["d"]) * (b["s"] & 15))[:, :, None]
    parts -= (_float(b["m"]) * (b["s"] >> 4))[:, :, None]


def q3_k_scales(s: np.ndarray) -> np.ndarray:
    """Sixteen 6-bit scales less 32, float32, out of 12 bytes."""
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    return (low | _crumbs(s[:, 8:]).reshape(-1, 16) << 4).astype(np.float32) - 32


def _q3_k(b: np.ndarray, out: np.ndarray) -> None:
    """d (s - 32) (q - 4), q of 3 bits; s of 6 bits for each 16 values.

    The low halves of s are the halves of its first 8 bytes, the upper two bits the two-bit parts of its last 4.
    """
    scales = q3_k_scales(b["s"])
    high = _bits(b["h"]).reshape(-1, 2, 4, 32)
    out.reshape(-1, 2, 4, 32)[...] = _crumbs(b["q"].reshape(-1, 2, 32)) | high << 2
    out -= 4
    parts = out.reshape(-1, 16, 16)
    parts *= (_float(b["d"]) * scales)[:, :, None]


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    """d s q - m t, q of 4 bits; s and t of 6 bits for each 32 values."""
    scales, minima = scales_and_minima(b["s"])
    _nibbles(b["q"].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    parts = out.reshape(-1, 8, 32)
    parts *= (_float(b["d"]) * scales)[:, :, None]
    parts -= (_float(b["m"]) * minima)[:, :, None]


def _q5_k(b: np.ndarray, out: np.ndarray) -> None:
    """Like Q4_K with q of 5 bits; bit i of h is the highest bit of the values of part i."""
    scales, minima = scales_and_minima(b["s"])
    _nibbles(b["q"].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    parts = out.reshape(-1, 8, 32)
    parts += _bits(b["h"]) << 4
    parts *= (_float(b["d"]) * scales)[:, :, None]
    parts -= (_float(b["m"]) * minima)[:, :, None]


def _q6_k(b: np.ndarray, out: np.ndarray) -> None:
    """d s (q - 32), q of 6 bits; s of 8 bits with sign for each 16 values."""
    _nibbles(b["q"].reshape(-1, 2, 64), out.reshape(-1, 2, 2, 64))
    parts = out.reshape(-1, 2, 4, 32)
    parts += _crumbs(b["h"].reshape(-1, 2, 32)) << 4
    out -= 32
    parts = out.reshape(-1, 16, 16)
    parts *= (_float(b["d"]) * b["s"])[:, :, None]


def _block(name: str, values: int, decode: Callable[[np.ndarray, np.ndarray], None], layout: str) -> GgmlFormat:
    """A quantised format from its layout: ``field:type`` or ``field:type*count``, in the order of the bytes."""
    fields = []
    for part in layout.split():
        field, _, type_ = part.partition(":")
        base, _, count = type_.partition("*")
        fields.append((field, base, (int(count),)) if count else (field, base))
    return GgmlFormat(name, np.dtype(fields), values, decode)


KINDS: dict[int, GgmlFormat] = {
    0: GgmlFormat("F32", np.dtype("<f4")),
    1: GgmlFormat("F16", np.dtype("<f2")),
    2: _block("Q4_0", 32, _q4_0, "d:<f2 q:u1*16"),
    3: _block("Q4_1", 32, _q4_1, "d:<f2 m:<f2 q:u1*16"),
    6: _block("Q5_0", 32, _q5_0, "d:<f2 h:u1*4 q:u1*16"),
    7: _block("Q5_1", 32, _q5_1, "d:<f2 m:<f2 h:u1*4 q:u1*16"),
    8: _block("Q8_0", 32, _q8_0, "d:<f2 q:i1*32"),
    10: _block("Q2_K", 256, _q2_k, "s:u1*16 q:u1*64 d:<f2 m:<f2"),
    11: _block("Q3_K", 256, _q3_k, "h:u1*32 q:u1*64 s:u1*12 d:<f2"),
    12: _block("Q4_K", 256, _q4_k, "d:<f2 m:<f2 s:u1*12 q:u1*128"),
    13: _block("Q5_K", 256, _q5_k, "d:<f2 m:<f2 s:u1*12 h:u1*32 q:u1*128"),
    14: _block("Q6_K", 256, _q6_k, "q:u1*128 h:u1*64 s:i1*16 d:<f2"),
    24: GgmlFormat("I8", np.dtype("i1")),
    25: GgmlFormat("I16", np.dtype("<i2")),
    26: GgmlFormat("I32", np.dtype("<i4")),
    27: GgmlFormat("I64", np.dtype("<i8")),
    28: GgmlFormat("F64", np.dtype("<f8")),
    30: GgmlFormat("BF16", np.dtype(ml_dtypes.bfloat16)),
}
"""Supported formats by their number in a file."""

UNSUPPORTED_FORMATS = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
"""Names of unsupported formats, for the error message."""
