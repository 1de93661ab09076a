"""Shared test body of every implementation of the head-wise recurrent network: cases, a numpy loop, and a check.

Legend: B batch, S sequence, N heads, G gates, H head dim.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import interpreting
from pallas_kernels.recurrent import CELLS, recurrent
from pallas_kernels.tuned import trial_fields

PACKAGE = "pallas_kernels.recurrent"
PALLAS = ("pallas_tpu", "pallas_gpu")
PLAIN = ("xla", "reference")
"""Implementations that run on any device, in any precision."""
BOUNDS = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 4e-2}
"""Largest legal error of each result and gradient, over the largest element of the reference's, by dtype."""


class Case(NamedTuple):
    cell: str
    rows: int
    tokens: int
    heads: int
    dim: int
    dtype: str = "float32"
    resets: bool = True
    initial: bool = True
    chunk: int = 2  # tokens of a TPU kernel's block


CASES = {
    "LSTM": Case("lstm", 2, 7, 2, 16),
    "GRU, one row": Case("gru", 1, 9, 3, 16),
    "sLSTM, ragged rows": Case("slstm", 19, 5, 1, 16),
    "sLSTM, one token": Case("slstm", 2, 1, 2, 16),
    "GRU, no documents, from zero": Case("gru", 3, 6, 1, 32, resets=False, initial=False),
    "sLSTM, from zero": Case("slstm", 2, 6, 2, 16, initial=False),
    "LSTM, bfloat16": Case("lstm", 3, 6, 2, 16, "bfloat16"),
}
KILLERS = ("LSTM", "GRU, one row", "sLSTM, ragged rows", "sLSTM, from zero")
_CELLS = {
    "the forget gate passes no gradient": ("cells", "(jnp.zeros_like(dh), dc * f)", "(jnp.zeros_like(dh), dc)"),
    "the candidate's gradient without the reset gate": ("cells", "(dr, dz, dn * r)", "(dr, dz, dn)"),
    "a stabiliser that is not kept": ("cells", "forget * n + i, top", "forget * n + i, 0 * top"),
    "the stabiliser of no state": ("cells", "first = n == 0", "first = n < 0"),
    "no gradient of the normaliser": ("cells", "dn - dh * o * ratio / n", "dn"),
    "matrices by the gradients of gate inputs": (
        "recurrent_loops", "found.inputs if found.terms is None else found.terms", "found.inputs"
    ),
}  # fmt: skip
MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    **{(name, what): edit for name in ("xla", *PALLAS) for what, edit in _CELLS.items()},
    ("reference", "a reset does nothing"): ("reference", "jnp.where(reset[:, None, None], 0, state)", "state"),
    ("reference", "no recurrent bias"): ("reference", " + bias.astype(dtype)", ""),
    ("xla", "a reset does nothing"): ("xla", "jnp.where(reset[:, None, None], 0, state)", "state"),
    ("xla", "a reset passes gradients"): ("xla", "jnp.where(reset[:, None, None], 0, one)", "one"),
    ("xla", "no gradient through the matrices"): ("xla", "(d_states[0] + d_h,", "(d_states[0],"),
    ("pallas_tpu", "a reset does nothing"): ("pallas_tpu", "jnp.where(keep[t] > 0, ref[...], 0.0)", "ref[...]"),
    ("pallas_tpu", "a reset passes gradients"): ("pallas_tpu", "jnp.where(keep[t] > 0, one, 0.0)", "one"),
    ("pallas_tpu", "beyond the last token"): (
        "pallas_tpu", "jnp.minimum(chunk, s - part * chunk), step", "chunk, step"
    ),
    ("pallas_tpu", "back from beyond the last token"): (
        "pallas_tpu", "size = jnp.minimum(chunk, s - part * chunk)", "size = chunk"
    ),
    ("pallas_tpu", "chunks in the order of the tokens"): ("pallas_tpu", "return chunks - 1 - k", "return k"),
    ("pallas_tpu", "no gradient through the matrices"): ("pallas_tpu", "d_states[0] + d_h,", "d_states[0],"),
    ("pallas_gpu", "a reset does nothing"): ("pallas_gpu", "jnp.where(reset[:, None] != 0, 0.0, one)", "one"),
    ("pallas_gpu", "a row fewer"): ("pallas_gpu", "dtype=jnp.int32) < b", "dtype=jnp.int32) < b - 1"),
    ("pallas_gpu", "back to the second token"): (
        "pallas_gpu", "jnp.int32(s), step, grads", "jnp.int32(s - 1), step, grads"
    ),
    ("pallas_gpu", "no gradient through the matrices"): ("pallas_gpu", "d_states[0] + back,", "d_states[0],"),
}  # fmt: skip


def operands(case: Case, seed: int) -> dict[str, Any]:
    """Random operands of a case in float64, those of the case's dtype exactly representable in it."""
    rng, kind = np.random.default_rng(seed), CELLS[case.cell]
    gates, dtype = len(kind.gates), jnp.dtype(case.dtype)

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(dtype).astype(np.float64)

    out: dict[str, Any] = {
        "x": draw(case.rows, case.tokens, case.heads, gates, case.dim),
        "matrices": draw(case.heads, gates, case.dim, case.dim, scale=case.dim**-0.5),
        "bias": draw(case.heads, gates, case.dim, scale=0.5),
        "resets": rng.random((case.rows, case.tokens)) < 0.3 if case.resets else None,
        "initial": None,
    }
    if case.initial:
        out["initial"] = [draw(case.rows, case.heads, case.dim) for _ in kind.states]
        if case.cell == "slstm":
            out["initial"][2] = 1 + np.abs(out["initial"][2])  # a normaliser is positive
    if case.cell == "slstm" and case.dtype != "bfloat16":
        out["x"][..., :2, :] *= 30  # exponentials that only the stabiliser keeps finite, and that magnify rounding
    return out


def results(case: Case, given: dict[str, Any], implementation: str, seed: int) -> Any:
    """Hidden states, last states, and the gradients of a weighted sum of them, in ``case.dtype``."""
    rng, kind, dtype = np.random.default_rng(seed), CELLS[case.cell], jnp.dtype(case.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    weights = rng.normal(size=(case.rows, case.tokens, case.heads, case.dim)).astype(wide)
    last = [rng.normal(size=(case.rows, case.heads, case.dim)).astype(wide) for _ in range(kind.grads)]
    arrays: dict[str, Any] = {name: jnp.asarray(given[name], dtype) for name in ("x", "matrices", "bias")}
    if given["initial"] is not None:
        arrays["initial"] = [jnp.asarray(one, wide) for one in given["initial"][: kind.grads]]
    resets = None if given["resets"] is None else jnp.asarray(given["resets"])

    def loss(arrays: dict[str, Any]) -> tuple[Any, Any]:
        initial = arrays.get("initial")
        if initial is not None:
            initial = [*initial, *(jnp.asarray(one, wide) for one in given["initial"][kind.grads :])]
        out, states = recurrent(
            arrays["x"],
            arrays["matrices"],
            arrays["bias"],
            cell=case.cell,  # type: ignore[arg-type]
            resets=resets,
            initial=initial,
            implementation=implementation,
        )
        total = jnp.sum(out.astype(wide) * weights)
        total += sum(jnp.sum(one * w) for one, w in zip(states[: kind.grads], last, strict=True))
        return total, (out, states)

    (_, found), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return found, grads


def oracle(case: Case, given: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Hidden states and last states by a loop over tokens in numpy, without a stabiliser."""
    x, kind = given["x"], CELLS[case.cell]
    zeros = np.zeros((case.rows, case.heads, case.dim))
    states = [np.array(one) for one in given["initial"] or [zeros] * len(kind.states)]
    if case.cell == "slstm":
        states = [states[0], *(one * np.exp(states[3]) for one in states[1:3]), states[3]]
    out = []
    for t in range(case.tokens):
        if given["resets"] is not None:
            states = [np.where(given["resets"][:, t, None, None], 0, one) for one in states]
        a = np.einsum("bni,ngih->gbnh", states[0], given["matrices"]) + given["bias"].transpose(1, 0, 2)[:, None]
        gates = x[:, t].transpose(2, 0, 1, 3)
        if case.cell == "gru":
            r, z = _sigmoid(gates[:2] + a[:2])
            states = [(1 - z) * np.tanh(gates[2] + r * a[2]) + z * states[0]]
        else:
            i, f, z, o = gates + a
            grown = _sigmoid(i) if case.cell == "lstm" else np.exp(i)
            c = _sigmoid(f) * states[1] + grown * np.tanh(z)
            if case.cell == "lstm":
                states = [_sigmoid(o) * np.tanh(c), c]
            else:
                n = _sigmoid(f) * states[2] + grown
                states = [_sigmoid(o) * c / n, c, n, states[3]]
        out.append(states[0])
    return np.stack(out, 1), states


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def check(implementation: str, case: Case, rng: np.random.Generator) -> None:
    """Asserts that an implementation gives the loop's values and the reference's gradients, forward and backward."""
    assert error(case, implementation, int(rng.integers(2**31))) <= BOUNDS[case.dtype]


def error(case: Case, implementation: str, seed: int = 0) -> float:
    """Largest error of an implementation: of hidden and last states against the loop, of gradients against autodiff of
    the reference, both in float64.

    Each array's error is over its largest element. Kernels run in interpret mode.
    """
    given = operands(case, seed)
    with jax.enable_x64(True):
        wanted = results(case._replace(dtype="float64"), given, "reference", seed)
    pallas = implementation.startswith("pallas")
    x64 = case.dtype == "float64"
    with (
        jax.enable_x64(x64),
        interpreting() if pallas else contextlib.nullcontext(),
        trial_fields("recurrent", {"rows": 16, "tokens": case.chunk}),
    ):
        found = results(case, given, implementation, seed)
    out, last = oracle(case, given)
    states = list(found[0][1])
    if case.cell == "slstm":
        # c and n are in units of the exponential of m, in which rounding to bfloat16 grows: their ratio and logarithm.
        h, c, n, m = (np.asarray(one, np.float64) for one in states)
        states, last = [h, c / n, np.log(n) + m], [last[0], last[1] / last[2], np.log(last[2])]
    found, wanted = (found[0][0], states, found[1]), (out, last, wanted[1])
    errors = jax.tree.map(
        lambda one, other: np.max(np.abs(np.asarray(one, np.float64) - other)) / max(np.max(np.abs(other)), 1e-3),
        *jax.tree.map(np.asarray, (found, wanted)),
    )
    return float(np.max(jax.tree.leaves(errors)))  # nan is an error, which Python's max can lose
