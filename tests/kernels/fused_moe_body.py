"""Shared test body of every implementation of the fused mixture of experts: cases, a loop over tokens, a check.

Legend: T tokens, A experts per token, E experts, D embed, F width of an expert.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import interpreting
from pallas_kernels.fused_moe import config, fused_moe

PALLAS = ("pallas_tpu",)
PLAIN = ("reference",)


class Case(NamedTuple):
    tokens: int
    per_token: int
    experts: int
    d: int = 24
    f: int = 20
    seen: tuple[int, ...] | None = None  # experts that tokens choose from; None: all
    none: int = 0  # every so many tokens, the last choice is none


CASES = {
    "one token, one expert": Case(1, 1, 1),
    "two of eight": Case(13, 2, 8),
    "few experts are chosen": Case(9, 2, 16, 40, 24, seen=(3, 4, 11)),
    "the first and the last": Case(5, 2, 6, seen=(0, 5)),
    "one expert of many": Case(7, 1, 12, seen=(9,)),
    "some choose none": Case(17, 3, 7, none=2),
    "nobody chooses any": Case(4, 1, 5, none=1),
    "a width of several parts": Case(16, 2, 5, 130, 384, seen=(4, 1, 2)),
    "most tokens": Case(128, 4, 9, 64, 256),
}
KILLERS = ("a width of several parts", "some choose none", "few experts are chosen", "nobody chooses any")
_EDITS = {
    "reference": {
        "weights of others": ("jnp.where(experts == index, weights.astype(dtype), 0)", "weights"),
        "not added up": ("return out + (inner", "return 0 * out + (inner"),
        "without the gate": ("activation(tokens @ first) *", "(tokens @ first) *"),
    },
    "pallas_tpu": {
        "weights of others": ("jnp.where(own, weights[...], 0.0)", "weights[...]"),
        "not added up": ("acc[...] += dot((inner", "acc[...] = dot((inner"),
        "another part of the width": ("return visits[i], part_at(i, j, number), 0", "return visits[i], 0 * j, 0"),
        "last expert left out": ("@pl.when(i < number[0])", "@pl.when(i < number[0] - 1)"),
        "computed again": ("@pl.when(i < number[0])", "@pl.when(i >= 0)"),
        "unchosen experts first": ("jnp.argsort(1 - chosen", "jnp.argsort(chosen"),
        "without the gate": ("activation(dot(x[...], gate[...], (1, 0)))", "dot(x[...], gate[...], (1, 0))"),
        "not begun at zero": ("acc[...] = jnp.zeros_like(acc)", "pass"),
    },
}
MUTATIONS = {(name, what): (name, *edit) for name, edits in _EDITS.items() for what, edit in edits.items()}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Parts of 128 inner columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "PART_BYTES", 0)
        yield


def draw(rng: np.random.Generator, case: Case, dtype: Any = np.float64) -> tuple[jax.Array, ...]:
    """Arguments of ``fused_moe`` but for the activation; expert E is none."""
    t, a, e = case.tokens, case.per_token, case.experts
    seen = np.arange(e) if case.seen is None else np.array(case.seen)
    chosen = np.stack([rng.permutation(seen)[:a] for _ in range(t)])
    if case.none:
        chosen[:: case.none, -1] = e
    shapes = (t, case.d), (e, case.d, case.f), (e, case.d, case.f), (e, case.f, case.d)
    draws = [rng.normal(size=shape) / np.sqrt(shape[-2] if i else 1) for i, shape in enumerate(shapes)]
    arrays = [jnp.asarray(one, dtype) for one in draws]
    weights = jnp.asarray(rng.uniform(0.1, 1, chosen.shape), jnp.promote_types(dtype, jnp.float32))
    return *arrays, jnp.asarray(chosen, jnp.int32), weights


def oracle(x: Any, gate: Any, up: Any, down: Any, experts: Any, weights: Any) -> np.ndarray:
    """Token by token and choice by choice, in float64, with SiLU."""
    x, gate, up, down, weights = (np.asarray(one, np.float64) for one in (x, gate, up, down, weights))
    out = np.zeros_like(x)
    for t, row in enumerate(np.asarray(experts)):
        for a, e in enumerate(row):
            if e < gate.shape[0]:
                first = x[t] @ gate[e]
                out[t] += weights[t, a] * ((first / (1 + np.exp(-first)) * (x[t] @ up[e])) @ down[e])
    return out


def program(implementation: str) -> Any:
    """Compiled mixture with SiLU."""
    return jax.jit(lambda *arrays: fused_moe(*arrays, jax.nn.silu, implementation=implementation))


def error(got: Any, want: np.ndarray) -> float:
    """||got - want|| / ||want||; absolute where nothing is to be."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / (np.linalg.norm(want) or 1.0))


def check(
    implementation: str, case: Case, rng: np.random.Generator, dtype: Any = np.float32, bound: float = 1e-6
) -> float:
    """Result, twice, against float64; Pallas kernels are interpreted. A token's nan stays its own."""
    arguments = draw(rng, case, dtype)
    with interpreting() if implementation in PALLAS else contextlib.nullcontext():
        run = program(implementation)
        got, again = (np.asarray(run(*arguments)) for _ in range(2))
        spoiled = np.asarray(run(arguments[0].at[0].set(jnp.nan), *arguments[1:]))
    np.testing.assert_array_equal(got, again)
    np.testing.assert_array_equal(got[1:], spoiled[1:])
    assert got.dtype == dtype
    worst = error(got, oracle(*arguments))
    assert worst <= bound, worst
    return worst
