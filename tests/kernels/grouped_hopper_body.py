"""Test body of the grouped matmul for Hopper GPUs, whose tiles are not cut smaller: groups of tens of rows.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import interpreting
from tests.kernels.gpu_simulation import no_races
from tests.kernels.grouped_body import PACKAGE, Case, draw, error, oracle, program

__all__ = ["CASES", "KILLERS", "MUTATIONS", "PACKAGE", "check"]

CASES = {
    "groups end in tiles": Case((37, 0, 120, 60), 39, 192, 64),
    "many in a tile": Case((5, 1, 0, 30, 64, 28), 0, 64, 128),
    "one group has all": Case((0, 256, 0), 0, 64, 64),
    "no group has a row": Case((0, 0), 128, 64, 64),
    "whole tiles": Case((128, 64, 64), 0, 192, 64),
}
KILLERS = ("groups end in tiles", "many in a tile")
BOUND = 2**-8
"""Rounding of the result to bfloat16 is up to 2^-9 of each element."""

MUTATIONS = {
    ("mosaic_gpu", what): ("mosaic_gpu", text, mistake)
    for what, text, mistake in (
        ("a row of the next group", "(row < ends[group])", "(row <= ends[group])"),
        ("a group's first row lost", "(row >= begins[group])", "(row > begins[group])"),
        ("last group of a tile lost", "last[tile] - first[tile], keep", "last[tile] - first[tile] - 1, keep"),
        ("first group of every tile", "group = first[tile] + i", "group = first[0] + i"),
        ("another's columns", "jnp.where(own, found.astype", "jnp.where(True, found.astype"),
        ("columns of the first tile", "pl.ds(column * wide, wide)", "pl.ds(0, wide)"),
        ("gradient sums another's rows", "(row < end), ref[...]", "(row <= end), ref[...]"),
        ("gradient of whole tiles alone", "(end + INNER - 1) // INNER - first", "end // INNER - first"),
        ("one operand not masked", "((a, high), (b, wide)):", "((a, high),):"),
        ("inner dimension cut short", "inner // INNER, 0)", "inner // INNER - 1, 0)"),
    )
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


def check(
    implementation: str, case: Case, rng: np.random.Generator, dtype: str = "bfloat16", bound: float = BOUND
) -> dict[str, float]:
    """Outputs and gradients, interpreted, against float64; what is after the last group is nan, which goes nowhere."""
    of_dtype: Any = jnp.dtype(dtype)
    lhs, rhs, d_out, sizes = draw(rng, case, of_dtype, dirty=True)
    with interpreting(), no_races():
        got = jax.block_until_ready(program(implementation)(lhs, rhs, d_out, sizes))
    assert all(x.dtype == dtype for x in got)
    want = oracle(lhs, rhs, d_out, sizes)
    errors = {name: error([got[i]], [want[i]]) for i, name in enumerate(("out", "d_lhs", "d_rhs"))}
    assert all(e <= bound for e in errors.values()), errors
    return errors
