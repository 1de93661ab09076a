"""Shared test body of every implementation of RMS norm: cases, the formula, one check."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rms_norm import rms_norm

PACKAGE = "pallas_kernels.rms_norm"


class Case(NamedTuple):
    rows: tuple[int, ...]
    shape: tuple[int, ...]  # of the gain
    eps: float = 1e-6
    plus_one: bool = False


CASES = {
    "one number": Case((1,), (1,), 0.5),
    "one row": Case((), (7,), 0.1),
    "odd": Case((3, 5), (9,)),
    "gain less one": Case((2, 3), (8,), 0.5, True),
    "gain of two dimensions": Case((2, 5), (3, 4), 0.1),
    "a part of Llama-3.1-8B": Case((2, 65), (4096,), 1e-5),
}
KILLERS = ("gain less one", "odd")
"""Cases that a mutant is tried on, until one fails; see tests/proofs/kernels/mutants.py."""

MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("reference", "eps missing"): ("reference", "rsqrt(mean + eps)", "rsqrt(mean)"),
    ("reference", "one missing"): ("reference", "(1 if plus_one else 0)", "0"),
    ("xla", "eps missing"): ("xla", "keepdims=True) + eps)", "keepdims=True))"),
    ("xla", "one missing"): ("xla", "(1 if plus_one else 0)", "0"),
    ("xla", "rows not kept from growing"): ("xla", "(d_normed - normed * along)", "d_normed"),
    ("xla", "gain's gradient of x"): ("xla", "jnp.sum(d_out * normed,", "jnp.sum(d_out * x,"),
    ("xla", "gain missing backward"): ("xla", "d_normed = d_out * _scale(gain, plus_one, x)", "d_normed = d_out"),
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


def draw(rng, case: Case, dtype=np.float64):
    """x, gain, gradient of the result; x is far from zero, where without eps there is no derivative."""
    whole = *case.rows, *case.shape
    x, d_out = rng.uniform(0.5, 2.0, size=whole) * rng.choice([-1, 1], whole), rng.normal(size=whole)
    return [jnp.asarray(x, dtype), jnp.asarray(rng.normal(size=case.shape), dtype), jnp.asarray(d_out, dtype)]


def oracle(x, gain, d_out, case: Case):
    """(out, d_x, d_gain), in float64, from the derivative of each element by each other."""
    x, gain, d_out = (np.asarray(a, np.float64) for a in (x, gain, d_out))
    shape, size = x.shape, gain.size
    x, d_out, scale = x.reshape(-1, size), d_out.reshape(-1, size), gain.reshape(-1) + case.plus_one
    root = np.sqrt(np.mean(x**2, axis=1, keepdims=True) + case.eps)
    d_normed = d_out * scale
    d_x = d_normed / root - x * np.sum(d_normed * x, axis=1, keepdims=True) / (size * root**3)
    return (x / root * scale).reshape(shape), d_x.reshape(shape), np.sum(d_out * x / root, 0).reshape(gain.shape)


def program(implementation: str, case: Case):
    """Compiled: (x, gain, d_out) -> (out, d_x, d_gain)."""

    @jax.jit
    def run(x, gain, d_out):
        options = {"eps": case.eps, "plus_one": case.plus_one, "implementation": implementation}
        out, pull = jax.vjp(lambda x, gain: rms_norm(x, gain, **options), x, gain)
        return out, *pull(d_out)

    return run


def errors(got, want, arguments, case: Case) -> dict[str, float]:
    """||got - want|| of each against what is added up in it, which may cancel."""
    _, gain, d_out = (np.asarray(a, np.float64) for a in arguments)
    # Where the gain plus one is near zero, it is still rounded as one.
    scales = np.sqrt(d_out.size), np.linalg.norm(d_out) * (np.abs(gain).max() + 1), np.linalg.norm(d_out)
    names = "out", "d_x", "d_gain"
    return {
        name: float(np.linalg.norm(np.asarray(g, np.float64) - w) / max(np.linalg.norm(w), scale))
        for name, g, w, scale in zip(names, got, want, scales, strict=True)
    }


def check(
    implementation: str, case: Case, rng: np.random.Generator, dtype=np.float32, bound: float = 1e-6
) -> dict[str, float]:
    """Result and gradients, twice, against float64."""
    arguments = draw(rng, case, dtype)
    run = program(implementation, case)
    got, again = run(*arguments), run(*arguments)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    assert all(x.dtype == dtype for x in got)
    found = errors(got, oracle(*arguments, case), arguments, case)
    assert all(e <= bound for e in found.values()), found
    return found
