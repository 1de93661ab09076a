"""Sizes of pieces: of the bands in plain JAX, and of the Pallas kernels' blocks by kind of device.

``pallas_kernels.tuned``, where the kind was measured, overrides fields of the result.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from pallas_kernels._pallas import round_up
from pallas_kernels.tuned import by_kind as tuned

SIZES = (1024, 512, 256, 128)
MOST_PRODUCTS = 2**29
"""Of numbers in a step on a TPU: programs are unrolled, and larger ones compile for minutes."""


BAND_TOKENS = 8192
"""Of a chunk: with fewer, gradients would be read and written for longer than products take."""
BAND_LOGITS = 2**26
"""A band's logits of one chunk (256 MiB in float32), unless that is fewer than LEAST_BAND columns."""
LEAST_BAND = 1024


def tokens_of_a_chunk(tokens: int) -> int:
    """Whose logits the bands in plain JAX hold at a time."""
    return min(tokens, BAND_TOKENS)


def vocab_of_a_band(chunk: int, vocab: int) -> int:
    """Columns: equal bands of whole tiles of the head, if fewer than twice as many as are needed are that.

    A last band of another size would be cut from the head outside the loop, in another layout, which TPUs copy.
    """
    most = max(LEAST_BAND, BAND_LOGITS // chunk)
    if vocab <= most:
        return vocab
    needed = -(-vocab // most)
    equal = [vocab // n for n in range(needed, 2 * needed) if vocab % (n * 16) == 0]
    return equal[0] if equal else most // 128 * 128


@dataclass(frozen=True)
class TpuBlocks:
    """Sizes of one step on a TPU; multiples of 128.

    Attributes:
        tokens, vocab: of the forward pass, which reads the head once for each block of tokens.
        tokens_back, vocab_back: of the head's gradient, which reads hidden once for each block of the vocabulary.
        vmem_bytes: what a kernel may take of a core's VMEM; None for the compiler's default.
    """

    tokens: int
    vocab: int
    tokens_back: int
    vocab_back: int
    vmem_bytes: int | None = 64 * 2**20


@dataclass(frozen=True)
class GpuBlocks:
    """Sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        tokens, vocab, embed: of a block of logits, and of what is added up to it at a time.
        programs: least number of them in the forward pass, which is split along the vocabulary for it.
        bands, band_logits, least_band: a band is that part of the vocabulary, or so many logits, or columns.
        together: blocks of tokens that share columns of the head while they are in the cache.
        warps, stages: of a program and of its software pipeline.
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
"""Kind -> (what blocks may take, what a kernel may take)."""


def tpu_blocks(kind: str, embed: int, item_bytes: int) -> TpuBlocks | None:
    """For a TPU's ``device_kind`` and elements of 2 or 4 bytes; None where an embedding is too large for it."""
    unknown = not kind.startswith("TPU") or kind in _VMEM
    room, limit = _VMEM.get(kind, _VMEM["TPU v4"]) if unknown else (44 * 2**20, 64 * 2**20)

    most = MOST_PRODUCTS if item_bytes == 2 else MOST_PRODUCTS // 6  # a product of float32 is six of bfloat16

    embed = round_up(embed, 128)

    def largest(kept_bytes: int, passing_bytes: int) -> tuple[int, int] | None:
        """(kept, passing) rows of the embedding, of so many bytes a number."""
        for kept, passing in itertools.product(SIZES, SIZES):
            held = embed * (kept * kept_bytes + passing * passing_bytes) + kept * passing * 16
            if held <= room and kept * passing * embed <= most and passing <= 2 * kept:
                return kept, passing
        return None

    forward = largest(2 * item_bytes + 8, 2 * item_bytes)  # two buffers of each, and of sums in float32
    backward = largest(4 * item_bytes + 4, 2 * item_bytes)
    if forward is None or backward is None:
        return None
    blocks = TpuBlocks(*forward, backward[1], backward[0], limit)
    return dataclasses.replace(blocks, **tuned("cross_entropy").get(kind, {}))


def gpu_blocks(kind: str, item_bytes: int) -> GpuBlocks:
    """For a GPU's ``device_kind`` and elements of 2 or 4 bytes."""
    blocks = GpuBlocks() if item_bytes == 2 else GpuBlocks(tokens=64, vocab=64, embed=32, stages=2)
    return dataclasses.replace(blocks, **tuned("cross_entropy").get(kind, {}))
