"""Shared test body of every implementation of the packed matmul: cases, a product in float64, a check.

Legend: M rows, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import interpreting
from pallas_kernels.packed_matmul import PackedCodes, packed_matmul

PACKAGE = "pallas_kernels.packed_matmul"
PALLAS = ("pallas_tpu", "pallas_gpu")
PLAIN = ("xla", "reference")
"""Implementations that run on any device, in any precision."""
NATIVE = ("native",)
"""Implementations in machine code, which run where they were built."""
TABLE = tuple(float(x) for x in np.random.default_rng(0).normal(size=16))
BYTES = tuple(float(x) for x in np.random.default_rng(1).normal(size=256))


class Case(NamedTuple):
    m: int
    k: int
    n: int
    groups: int
    form: PackedCodes = PackedCodes(4)
    exponents: bool = False
    half: bool = False  # activations in bfloat16, where a kernel checks in float32
    block: int = 0  # scales that share a block; 0: none do


CASES = {
    "one row, one output": Case(1, 64, 1, 1),
    "decode in groups of 64": Case(1, 576, 200, 9),
    "groups of 32": Case(16, 256, 70, 8),
    "128 rows": Case(128, 512, 130, 4),
    "one group over many tiles": Case(5, 1280, 40, 1),
    "a table, no multiple of anything": Case(37, 1152, 203, 18, PackedCodes(4, TABLE)),
    "int8 in groups": Case(19, 192, 150, 6, PackedCodes(8)),
    "int8 by channel, levels": Case(3, 96, 20, 1, PackedCodes(8, BYTES)),
    "groups of whole registers over many tiles": Case(3, 2048, 40, 64),
    "exponents over many tiles": Case(2, 2048, 40, 64, PackedCodes(4, TABLE), True),
    "exponents of few groups": Case(5, 1280, 40, 5, exponents=True),
    "int2": Case(9, 512, 140, 4, PackedCodes(2)),
    "int2 with levels": Case(9, 256, 33, 4, PackedCodes(2, TABLE[:4])),
    "int3 with levels, groups of 8 tuples": Case(9, 512, 140, 8, PackedCodes(3, TABLE[:8])),
    "int3 over many tiles": Case(2, 3072, 40, 48, PackedCodes(3)),
    "int6": Case(5, 512, 33, 8, PackedCodes(6)),
    "scales in blocks": Case(3, 512, 64, 8, PackedCodes(4, TABLE), block=16),
    "scales in blocks over many tiles": Case(2, 768, 203, 12, PackedCodes(4, TABLE), block=29),
    "scales in blocks, groups of 8 tuples": Case(5, 128, 96, 8, PackedCodes(4, TABLE), block=32),
    "int8 by row": Case(19, 192, 150, 1, PackedCodes(8, by_row=True)),
    "int4 by row in groups": Case(3, 1280, 70, 20, PackedCodes(4, by_row=True)),
    "int3 by row": Case(2, 512, 40, 4, PackedCodes(3, by_row=True)),
    "wide, groups of 32": Case(16, 256, 70, 8, PackedCodes(4, wide=True), half=True),
    "wide int8 over many tiles": Case(3, 1280, 140, 1, PackedCodes(8, wide=True), half=True),
}
KILLERS = (
    "scales in blocks over many tiles",
    "int4 by row in groups",
    "wide, groups of 32",
    "wide int8 over many tiles",
    "int3 with levels, groups of 8 tuples",
    "a table, no multiple of anything",
    "decode in groups of 64",
    "one group over many tiles",
    "128 rows",
    "int2",
    "groups of whole registers over many tiles",
)
_CODES = {
    "lanes in the wrong order": ("codes", "form.bits * lane)", "form.bits * (form.lanes - 1 - lane))"),
    "middle code off by one": ("codes", "codes - 2 ** (form.bits - 1)", "codes - 2 ** (form.bits - 1) + 1"),
    "levels of the other half": ("codes", "high = (codes >> bit & 1) == 1", "high = (codes >> bit & 1) == 0"),
    "inputs of a lane are neighbours": (
        "codes",
        "jnp.moveaxis(x.reshape(x.shape[0], -1, lanes), -1, 0)",
        "jnp.moveaxis(x.reshape(x.shape[0], lanes, -1), 1, 0)",
    ),
}
MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    **{(name, what): edit for name in ("xla", *PALLAS) for what, edit in _CODES.items()},
    ("reference", "scales by turns"): ("reference", "jnp.repeat(wide, values.shape[0] // wide.shape[0], axis=0)",
                                       "jnp.tile(wide, (values.shape[0] // wide.shape[0], 1))"),
    ("reference", "lanes after one another"): ("reference", "axis=1)", "axis=0)"),
    ("xla", "one group's scale"): ("xla", "scale_values(scales)[:, None]", "scale_values(scales)[:1, None]"),
    ("xla", "not added up"): ("xla", "out += jnp.matmul", "out = jnp.matmul"),
    ("pallas_tpu", "not added up"): ("pallas_tpu", "acc[...] += dot", "acc[...] = dot"),
    ("pallas_tpu", "not begun at zero"): ("pallas_tpu", "jnp.zeros_like(acc)", "jnp.ones_like(acc)"),
    ("pallas_tpu", "scales of the first groups"): (
        "pallas_tpu", "(i * tiles.inner // size // held, 0, c)", "(0, 0, c)"
    ),
    ("pallas_tpu", "scales of the first whole registers"): (
        "pallas_tpu", "(i * tiles.inner // size // held, c)", "(0, c)"
    ),
    ("pallas_tpu", "scales by turns"): (
        "pallas_tpu", "jnp.broadcast_to(scales, (groups, rows // groups, columns)).reshape(rows, columns)",
        "jnp.tile(scales[:, 0], (rows // groups, 1))",
    ),
    ("pallas_tpu", "columns of the first tile"): (
        "pallas_tpu", "lambda r, c, i: (i, c)),", "lambda r, c, i: (i, 0)),"
    ),
    ("pallas_tpu", "last tile dropped"): ("pallas_tpu", "@pl.when(i == last)", "@pl.when(i == last - (last > 0))"),
    ("pallas_gpu", "scale of the first group"): ("pallas_gpu", "jnp.minimum(start // size, groups - 1)", "0 * start"),
    ("pallas_gpu", "scales of tuples by turns"): (
        "pallas_gpu", "_from(start, tiles.inner) // size", "_from(start, tiles.inner) % size"
    ),
    ("pallas_gpu", "bytes of a tuple backwards"): ("pallas_gpu", "<< 8 * b", "<< 8 * (form.bytes - 1 - b)"),
    ("pallas_gpu", "first lane's inputs"): ("pallas_gpu", "jnp.int32(lane)", "jnp.int32(0)"),
    ("pallas_gpu", "last tile dropped"): (
        "pallas_gpu", "-(-rows // tiles.inner), more", "rows // tiles.inner - 1, more"
    ),
    ("pallas_gpu", "not added up"): ("pallas_gpu", "else sums\n", "else sums - acc\n"),
    ("pallas_gpu", "wide sums of one scale"): ("pallas_gpu", "acc += sums * scale if", "acc += sums * scale[:, :1] if"),
    ("pallas_gpu", "numbers of the first block"): ("pallas_gpu", "column // block * (block + EXTRA)", "0 * column"),
    ("pallas_gpu", "a block's numbers swapped"): ("pallas_gpu", "for start in (0, 4))", "for start in (4, 0))"),
    ("pallas_gpu", "scales of the first row"): (
        "pallas_gpu", "at(scales, group, column, mask)", "at(scales, 0 * group, column, mask)"
    ),
    ("pallas_gpu", "numbers' bytes backwards"): ("scales", "<< 8 * i for i, byte", "<< 24 - 8 * i for i, byte"),
    ("pallas_gpu", "small float8 as normal"): (
        "scales", "jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 2.0**-9, normal)", "normal"
    ),
    ("pallas_gpu", "float8 without signs"): ("scales", "jnp.where(wide >> 7 == 1, -magnitude, magnitude)", "magnitude"),
    ("xla", "mean of a block left out"): ("scales", " + mean.astype(dtype)", ""),
    ("pallas_tpu", "wide sums without scales"): ("pallas_tpu", "acc[...] * own[:, 0] if", "acc[...] if"),
    ("pallas_tpu", "wide weights rounded"): ("pallas_tpu", "if wide and not last_scales", "if False"),
}  # fmt: skip
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Tiles so small that small shapes cross many of them."""
    config = importlib.import_module(f"{PACKAGE}.config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "measured", lambda *_: {"rows": 32, "inner": 128, "columns": 128})
        yield


def draw(rng: np.random.Generator, case: Case, dtype=np.float64):
    """x, bytes, scales."""
    rows = case.k // case.form.lanes * case.form.bytes
    x = jnp.asarray(rng.normal(size=(case.m, case.k)), dtype)
    packed = rng.integers(0, 256, (rows, case.n), dtype=np.uint8)
    if case.exponents:
        scales = rng.integers(124, 131, (case.groups, case.n), dtype=np.uint8)
    elif case.block:
        values = rng.normal(size=(case.groups, case.n // case.block, case.block)).astype(ml_dtypes.float8_e4m3fn)
        numbers = rng.uniform(0.5, 2, (*values.shape[:2], 2)).astype(np.float32)
        scales = np.concatenate([values.view(np.uint8), numbers.view(np.uint8)], -1).reshape(case.groups, -1)
    else:
        scales = rng.uniform(0.2, 2, (case.groups, case.n)) * 2.0 ** rng.integers(-3, 3, (case.groups, 1))
        scales = scales.astype(jnp.promote_types(dtype, jnp.float32))
    return x, *(jnp.asarray(a.T if case.form.by_row else a) for a in (packed, scales))


def matrix(packed, scales, case: Case) -> np.ndarray:
    """The dequantised matrix, code by code."""
    bits = case.form.bits
    levels = np.arange(2**bits) - 2.0 ** (bits - 1) if case.form.levels is None else np.asarray(case.form.levels)
    packed, scales = (np.asarray(a).T if case.form.by_row else np.asarray(a) for a in (packed, scales))
    if case.exponents:
        scales = np.ldexp(1.0, scales.astype(int) - 127)
    if case.block:
        rows = scales.reshape(case.groups, -1, case.block + 8)
        unit, mean = (rows[..., i : i + 4].copy().view(np.float32).astype(float) for i in (case.block, case.block + 4))
        values = rows[..., : case.block].copy().view(ml_dtypes.float8_e4m3fn).astype(float)
        scales = (values * unit + mean).reshape(case.groups, -1)
    out = np.zeros((case.k, case.n))
    for i in range(case.k):
        first = i // case.form.lanes * case.form.bytes
        whole = sum(packed[first + b].astype(int) << 8 * b for b in range(case.form.bytes))
        codes = whole >> (bits * (i % case.form.lanes)) & 2**bits - 1
        out[i] = levels[codes] * np.asarray(scales, np.float64)[i * case.groups // case.k]
    return out


def error(got, one, other) -> float:
    """Error of a product, in units of its size without chance cancellations: ``|| |one| |other| || / sqrt(terms)``."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    usual = np.linalg.norm(np.abs(one) @ np.abs(other)) / np.sqrt(len(other))
    return float(np.linalg.norm(np.asarray(got, np.float64) - one @ other) / (usual or 1.0))


def program(implementation: str, case: Case):
    """Compiled product, and its gradient of x for a cotangent."""

    def run(x, packed, scales, cotangent):
        y, back = jax.vjp(lambda x: packed_matmul(x, packed, scales, case.form, implementation=implementation), x)
        return y, back(cotangent)[0]

    return jax.jit(run)


def check(
    implementation: str, case: Case, rng: np.random.Generator, dtype: Any = np.float32, bound: float = 2e-6
) -> float:
    """Result and gradient, twice, against float64; Pallas kernels are interpreted.

    Sums of a thousand terms in float32 are off by 1.0e-6 in the median of 120 draws, and by 1.4e-6 at most.
    """
    if case.half and dtype == np.float32:
        dtype, bound = jnp.bfloat16, 2e-5
    x, packed, scales = draw(rng, case, dtype)
    result = jnp.promote_types(dtype, jnp.float32) if case.form.wide else jnp.dtype(dtype)
    cotangent = jnp.asarray(rng.normal(size=(case.m, case.n)), result)
    with interpreting() if implementation.startswith("pallas") else contextlib.nullcontext():
        run = program(implementation, case)
        (got, dx), again = (run(x, packed, scales, cotangent) for _ in range(2))
    np.testing.assert_array_equal(got, again[0])
    assert (got.dtype, dx.dtype) == (result, dtype)
    dense = matrix(packed, scales, case)
    worst = error(got, x, dense)
    if got.dtype != dx.dtype:  # a gradient has the dtype of activations, and is rounded as they are
        assert error(dx, cotangent, dense.T) < float(jnp.finfo(dtype).eps)
    else:
        worst = max(worst, error(dx, cotangent, dense.T))
    assert worst <= bound, worst
    return worst
