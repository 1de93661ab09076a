"""GGML formats: bit for bit equal to the gguf package's decoding of random blocks."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.hub.gguf import ggml_formats

QUANTISED = [kind for kind in ggml_formats.KINDS.values() if kind.decode is not None]


def blocks(kind: ggml_formats.GgmlFormat, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` blocks of random bytes, but for the half-precision scales, which are finite."""
    data = rng.integers(0, 256, count * kind.layout.itemsize, dtype=np.uint8)
    record = data.view(kind.layout)
    for field in {"d", "m"} & set(kind.layout.names or ()):
        bits = rng.integers(0, 1 << 16, count, dtype=np.uint16)
        # The exponent of all ones is what infinities and nans have; subnormals and zeros of both signs stay.
        record[field] = np.where(bits >> 10 & 31 == 31, bits ^ 1 << 10, bits).astype(np.uint16).view(np.float16)
    return data


def decoded(kind: ggml_formats.GgmlFormat, data: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    out = np.full(data.size // kind.layout.itemsize * kind.values, np.nan, dtype)
    ggml_formats.dequantize(kind, data, out)
    return out


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_random_blocks_decode_to_the_same_bits(kind: ggml_formats.GgmlFormat, rng: np.random.Generator) -> None:
    more_than_a_chunk = ggml_formats.CHUNK // kind.values + 7
    data = blocks(kind, more_than_a_chunk, rng)
    theirs = gguf.quants.dequantize(data[None], GGMLQuantizationType[kind.name])
    ours = decoded(kind, data)
    assert np.isfinite(ours).all()
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_other_types_are_rounded_from_float32(kind: ggml_formats.GgmlFormat, rng: np.random.Generator) -> None:
    data = blocks(kind, 300, rng)
    exact = decoded(kind, data)
    assert decoded(kind, data, np.float64).tobytes() == exact.astype(np.float64).tobytes()
    assert decoded(kind, data, ml_dtypes.bfloat16).tobytes() == exact.astype(ml_dtypes.bfloat16).tobytes()


def test_numbers_names_and_sizes_are_those_of_ggml() -> None:
    for number, kind in ggml_formats.KINDS.items():
        theirs = GGMLQuantizationType(number)
        assert (kind.name, kind.values, kind.layout.itemsize) == (theirs.name, *GGML_QUANT_SIZES[theirs])
    assert all(GGMLQuantizationType(number).name == name for number, name in ggml_formats.UNSUPPORTED_FORMATS.items())
    assert not ggml_formats.KINDS.keys() & ggml_formats.UNSUPPORTED_FORMATS.keys()
