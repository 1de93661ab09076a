"""Tile sizes of the fused cross-entropy: vocabulary bands in plain JAX, and blocks of the Pallas kernels by device
kind.

Measured fields in ``pallas_kernels.tuned`` override those of the result.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from pallas_kernels._pallas import round_up
from pallas_kernels.tuned import measured

SIZES = (1024, 512, 256, 128)
MAX_STEP_MACS = 2**29
"""Most multiply-accumulates of one grid step on a TPU: programs are unrolled, and larger steps compile for minutes."""


BAND_TOKENS = 8192
"""Tokens of a chunk: with fewer, reading and writing the gradients takes longer than the matmuls."""
BAND_LOGITS = 2**26
"""Logits of one band and chunk (256 MiB in float32), unless that is fewer than MIN_BAND columns."""
MIN_BAND = 1024


def chunk_tokens(tokens: int) -> int:
    """Number of tokens whose logits the plain-JAX bands hold at a time."""
    return min(tokens, BAND_TOKENS)


def band_vocab(chunk: int, vocab: int) -> int:
    """Vocabulary columns of a band: equal bands of whole tiles of the head, if at most twice the needed number of
    bands.

    A last band of another size would be sliced from the head outside the loop, in another layout, which TPUs copy.
    """
    most = max(MIN_BAND, BAND_LOGITS // chunk)
    if vocab <= most:
        return vocab
    needed = -(-vocab // most)
    equal = [vocab // n for n in range(needed, 2 * needed) if vocab % (n * 16) == 0]
    return equal[0] if equal else most // 128 * 128


@dataclass(frozen=True)
class CrossEntropyTpuBlocks:
    """Block sizes of one grid step on a TPU; multiples of 128.

    Attributes:
        tokens, vocab: block of the forward pass, which reads the head once for each block of tokens.
        tokens_back, vocab_back: block of the head's gradient, which reads hidden once for each block of the vocabulary.
        vmem_bytes: VMEM limit of a kernel; None for the compiler's default.
    """

    tokens: int
    vocab: int
    tokens_back: int
    vocab_back: int
    vmem_bytes: int | None = 64 * 2**20


@dataclass(frozen=True)
class CrossEntropyGpuBlocks:
    """Block sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        tokens, vocab, embed: block of logits, and the slice of the embedding that is accumulated at a time.
        programs: least number of programs in the forward pass; the vocabulary is split to reach it.
        bands, band_logits, least_band: a band of the backward pass is the vocabulary over ``bands``, at most
            ``band_logits`` logits, and at least ``least_band`` columns.
        together: blocks of tokens that share columns of the head while these are in the L2 cache.
        warps, stages: warps of a program and stages of its software pipeline.
    """

    tokens: int = 128
    vocab: int = 128
    embed: int = 64
    programs: int = 1024
    bands: int = 8
    band_logits: int = 2**25
    least_band: int = 1024
    together: int = 8
    warps: int = 8
    stages: int = 3


_VMEM = {"TPU v4": (11 * 2**20, None), "TPU7x": (36 * 2**20, 48 * 2**20)}
"""Device kind -> (VMEM bytes for blocks, VMEM limit of a kernel)."""


def tpu_blocks(kind: str, embed: int, item_bytes: int) -> CrossEntropyTpuBlocks | None:
    """Block sizes for a TPU's ``device_kind`` and elements of 2 or 4 bytes; None if the embedding is too large for
    VMEM.
    """
    unknown = not kind.startswith("TPU") or kind in _VMEM
    room, limit = _VMEM.get(kind, _VMEM["TPU v4"]) if unknown else (44 * 2**20, 64 * 2**20)

    most = MAX_STEP_MACS if item_bytes == 2 else MAX_STEP_MACS // 6  # a float32 matmul is six bfloat16 passes

    embed = round_up(embed, 128)

    def largest(kept_bytes: int, passing_bytes: int) -> tuple[int, int] | None:
        """Largest (resident, streamed) rows of the embedding, each of so many bytes an element; None if none fit."""
        for kept, passing in itertools.product(SIZES, SIZES):
            held = embed * (kept * kept_bytes + passing * passing_bytes) + kept * passing * 16
            if held <= room and kept * passing * embed <= most and passing <= 2 * kept:
                return kept, passing
        return None

    forward = largest(2 * item_bytes + 8, 2 * item_bytes)  # double buffering of both, and of float32 partial sums
    backward = largest(4 * item_bytes + 4, 2 * item_bytes)
    if forward is None or backward is None:
        return None
    blocks = CrossEntropyTpuBlocks(*forward, backward[1], backward[0], limit)
    return dataclasses.replace(blocks, **measured("cross_entropy", kind))


def gpu_blocks(kind: str, item_bytes: int) -> CrossEntropyGpuBlocks:
    """Block sizes for a GPU's ``device_kind`` and elements of 2 or 4 bytes."""
    blocks = (
        CrossEntropyGpuBlocks() if item_bytes == 2 else CrossEntropyGpuBlocks(tokens=64, vocab=64, embed=32, stages=2)
    )
    return dataclasses.replace(blocks, **measured("cross_entropy", kind))
