"""Shared test body of every implementation of flash attention: cases, a loop over queries in float64, one check.

Legend: B batch, S queries, T keys, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import interpreting
from pallas_kernels.flash_attention import config, flash_attention_and_lse
from tests import environment
from tests.kernels import gpu_simulation, races

PACKAGE = "pallas_kernels.flash_attention"
PLAIN = ("xla", "reference")
"""Implementations that run on any device, in any precision."""


class Case(NamedTuple):
    b: int
    s: int
    t: int
    n: int
    k: int
    h: int
    mask: str = "index"  # index, packed, positions, both
    v: int | None = None  # head dim of values, where it differs
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = {
    "one token": Case(1, 1, 1, 1, 1, 2),
    "one band": Case(2, 3, 3, 2, 2, 4),
    "whole bands": Case(1, 8, 8, 2, 1, 4),
    "odd length": Case(2, 13, 13, 4, 2, 3),
    "more bands than one band's length": Case(1, 43, 43, 2, 2, 2),
    "three queries a kv head": Case(1, 9, 9, 6, 2, 4),
    "one kv head": Case(2, 10, 10, 4, 1, 4),
    "packed": Case(3, 17, 17, 4, 2, 4, "packed"),
    "packed, one token": Case(2, 1, 1, 2, 1, 2, "packed"),
    "positions": Case(2, 14, 14, 2, 1, 4, "positions"),
    "positions and segments": Case(2, 19, 23, 2, 2, 4, "both"),
    "more queries than keys": Case(2, 21, 5, 2, 1, 4, "positions"),
    "one query, many keys": Case(3, 1, 29, 6, 2, 4, "positions"),
    "few queries, many keys": Case(2, 3, 29, 4, 2, 4, "both"),
    "window within a band": Case(2, 19, 19, 2, 1, 4, window=3),
    "window of one": Case(1, 9, 9, 2, 1, 4, window=1),
    "window over many bands": Case(2, 31, 31, 4, 2, 2, window=13),
    "window longer than the row": Case(1, 11, 11, 2, 1, 4, window=50),
    "window, packed": Case(2, 23, 23, 2, 2, 4, "packed", window=5),
    "window, positions": Case(2, 9, 25, 2, 1, 4, "both", window=6),
    "window, few queries": Case(2, 2, 25, 4, 2, 4, "positions", window=4),
    "softcap": Case(2, 13, 13, 4, 2, 4, "packed", softcap=0.7),
    "softcap, few queries": Case(2, 3, 29, 4, 2, 4, "both", softcap=0.7),
    "sinks": Case(2, 13, 13, 4, 2, 4, "packed", sinks=True),
    "sinks, few queries": Case(2, 3, 29, 4, 2, 4, "both", sinks=True),
    "values of another size": Case(2, 15, 15, 4, 2, 6, v=4),
    "values of another size, few queries": Case(1, 2, 15, 4, 2, 4, "positions", v=6),
    "everything": Case(2, 21, 33, 6, 2, 4, "both", v=3, window=17, softcap=1.3, sinks=True),
    "everything, heads that fill lanes": Case(2, 21, 33, 6, 2, 8, "both", v=16, window=17, softcap=1.3, sinks=True),
    "only values fill lanes": Case(1, 23, 23, 2, 1, 12, "packed", v=8),
}


KILLERS = ("everything", "packed", "more bands than one band's length", "window over many bands")
"""Cases that a mutant is tried on, until one fails; see tests/proofs/kernels/mutants.py."""

_SHARED = {
    "mask off by one": ("blockwise", "seen = kv_pos <= q_pos", "seen = kv_pos < q_pos"),
    "window off by one": ("blockwise", "kv_pos > q_pos - window", "kv_pos >= q_pos - window"),
    "dropped segment": ("blockwise", "(q_seg == kv_seg) & ", ""),
    "wrong scale": ("blockwise", "scores, slope = products * options.scale,", "scores, slope = products,"),
    "wrong slope": ("blockwise", "(1.0 - part * part)", "1.0"),
    "missing rescale": ("blockwise", "keep = jnp.exp(top - highest)", "keep = jnp.ones_like(top)"),
    "missing delta": ("blockwise", "(d_weights - delta)", "d_weights"),
    "last block skipped": ("blockwise", "jnp.where(live, j + 1, 0)", "jnp.where(live, j, 0)"),
    "mask skipped in a block too many": ("blockwise", "whole = (kv_last <= q_first)", "whole = (kv_first <= q_first)"),
}
MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("reference", "mask off by one"): ("reference", "kv_positions[:, None, :] <= q", "kv_positions[:, None, :] < q"),
    ("reference", "wrong scale"): ("reference", "k.astype(dtype)) * scale", "k.astype(dtype)) * scale * 1.01"),
    ("reference", "dropped segment"): ("reference", "(q_segments == kv_segments) & ", ""),
    ("reference", "missing rescale"): ("reference", "weights / safe", "weights"),
    ("xla", "mask off by one"): ("xla", "seen = kv_pos[:, None, :] <= q", "seen = kv_pos[:, None, :] < q"),
    ("xla", "wrong scale"): ("xla", "rows, k) * options.scale,", "rows, k),"),
    ("xla", "dropped segment"): ("xla", "(q_seg == kv_seg) & ", ""),
    ("xla", "missing rescale"): ("xla", "carry[2] * keep + out", "carry[2] + out"),
    ("xla", "missing delta"): ("xla", "(d_weights - delta_rows)", "d_weights"),
    **{(name, what): edit for name in ("pallas_tpu", "pallas_gpu") for what, edit in _SHARED.items()},
    ("pallas_tpu", "another's keys"): ("tpu_grid", "return head, head // layout.splits,", "return head, head * 0,"),
    ("pallas_gpu", "another's keys"): ("pallas_gpu", "(b, 0, h // shared, 0)", "(b, 0, h * 0, 0)"),
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Bands and blocks so small that short sequences cross many of them, and no limits of a device's matmuls."""
    from pallas_kernels import _mosaic_gpu
    from pallas_kernels.flash_attention import blockwise, mosaic_gpu, tpu_grid, xla

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "MIN_BAND", 4)
        patch.setattr(xla, "KV_BLOCK", 6)
        patch.setattr(xla, "FEW_QUERIES", 3)
        patch.setattr(tpu_grid, "LANES", 8)
        patch.setattr(config, "tpu_blocks", lambda *_: config.FlashTpuBlocks(rows=32, kv=16))
        patch.setattr(config, "gpu_blocks", lambda *_: config.FlashGpuBlocks(q=8, kv=4, own_back=8, inner_back=4))
        patch.setattr(config, "hopper_blocks", lambda *_: config.FlashHopperBlocks(rows=4, kv=4, inner_back=4))
        # What holds for wgmma does not hold for its simulation: float32 tells more.
        patch.setattr(mosaic_gpu, "HEAD_DIMS", range(1, blockwise.MAX_HEAD_DIM + 1))
        patch.setattr(_mosaic_gpu, "DTYPES", ("bfloat16", "float16", "float32"))
        yield


def draw(rng, case: Case, dtype=np.float64):
    """(q, k, v, gradient of the output), and the other arguments; segment 0 and rows that see nothing occur."""
    b, s, t, n, k, h, mask = case[:7]
    q, keys, values, d_out = (
        rng.normal(size=shape).astype(dtype)
        for shape in ((b, s, n, h), (b, t, k, h), (b, t, k, case.v or h), (b, s, n, case.v or h))
    )
    extra = {}
    if mask in ("positions", "both"):
        extra["q_positions"] = rng.integers(0, t, (b, s)).astype(np.int32)
        extra["kv_positions"] = rng.permuted(np.broadcast_to(np.arange(t, dtype=np.int32), (b, t)), axis=1)
    if mask in ("packed", "both"):
        q_segments = np.sort(rng.integers(0, 4, (b, s)).astype(np.int32), axis=1)
        extra["q_segment_ids"] = q_segments
        extra["kv_segment_ids"] = q_segments if s == t else rng.integers(0, 4, (b, t)).astype(np.int32)
    if case.sinks:
        extra["sinks"] = rng.normal(size=n).astype(dtype)
    return [jnp.asarray(x) for x in (q, keys, values, d_out)], {name: jnp.asarray(x) for name, x in extra.items()}


def static(case: Case) -> dict:
    """The arguments that are not arrays."""
    return {"window": case.window, "softcap": case.softcap}


def oracle(
    q,
    k,
    v,
    q_positions=None,
    kv_positions=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    sinks=None,
    window=None,
    softcap=None,
):
    """One query at a time, in float64: (output, logsumexp)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, s, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        place = s if q_positions is None else q_positions[b, s]
        places = np.arange(k.shape[1]) if kv_positions is None else kv_positions[b]
        seen = places <= place
        if window is not None:
            seen = seen & (place - places < window)
        if q_segment_ids is not None:
            seen = seen & (kv_segment_ids[b] == q_segment_ids[b, s]) & (q_segment_ids[b, s] != 0)
        seen = np.flatnonzero(seen)
        scores = k[b, seen, head] @ q[b, s, n] / np.sqrt(q.shape[3])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if sinks is not None:
            scores = np.append(scores, sinks[n])
        if len(scores):
            weights = np.exp(scores - scores.max())
            lse[b, s, n] = scores.max() + np.log(weights.sum())
            out[b, s, n] = weights[: len(seen)] @ v[b, seen, head] / weights.sum()
    return out, lse


def program(implementation: str, with_lse: bool, **options):
    """Compiled: (q, k, v, d_out, d_lse or None, other arrays) -> output, and gradients of q, k, v and of the sinks.

    With ``with_lse``, the logsumexp and what reaches back through it too.
    """

    @jax.jit
    def run(q, k, v, d_out, d_lse, extra):
        sinks = {name: extra[name] for name in extra if name == "sinks"}
        rest = {name: extra[name] for name in extra if name != "sinks"}

        def call(q, k, v, sinks):
            out, lse = flash_attention_and_lse(q, k, v, **sinks, **rest, implementation=implementation, **options)
            return (out, lse) if with_lse else out

        out, pull = jax.vjp(call, q, k, v, sinks)
        return out, *pull((d_out, d_lse) if with_lse else d_out)

    return run


def forward_and_vjp(implementation, inputs, extra, d_lse=None, **options):
    """One run of ``program``."""
    return program(implementation, d_lse is not None, **options)(*inputs, d_lse, extra)


def error(got, want) -> float:
    """||got - want|| / ||want|| over all leaves."""
    got, want = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(y)]) for y in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), np.finfo(np.float64).tiny))


def lse_error(got, want) -> float:
    """The largest absolute error: a logarithm rounds as its scores do, which are about one, and may be near 0."""
    return float(np.max(np.abs(np.asarray(got, np.float64) - want), initial=0.0))


def check(implementation: str, case: Case, rng: np.random.Generator, bound: float = 2e-6) -> dict[str, float]:
    """Output, logsumexp and gradients in float32, twice, against float64; Pallas kernels are interpreted.

    Something reaches back through the logsumexp too: nan where a query sees nothing, which must go nowhere.
    """
    inputs, extra = draw(rng, case, np.float32)
    plain = {name: np.asarray(x) for name, x in extra.items()}
    want, want_lse = oracle(*inputs[:3], **plain, **static(case))
    nothing = want_lse == -np.inf
    d_lse = np.where(nothing, 0.0, rng.normal(size=want_lse.shape)).astype(np.float32)
    few = implementation == "xla" and case.s <= 3 < case.t  # these may be answered with nan
    dirty = d_lse if few or implementation == "reference" else np.where(nothing, np.nan, d_lse)
    with contextlib.ExitStack() as stack:
        if implementation not in PLAIN:
            stack.enter_context(interpreting())
        if implementation == "pallas_tpu":
            stack.enter_context(races.none_found())
        if implementation == "mosaic_gpu":
            stack.enter_context(gpu_simulation.no_races())
        run = program(implementation, True, **static(case))
        got, again = (jax.block_until_ready(run(*inputs, jnp.asarray(dirty), extra)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, got, again)
    (out, lse), *gradients = got
    np.testing.assert_array_equal(np.asarray(out)[(want == 0).all(-1)], 0.0)
    np.testing.assert_array_equal(np.asarray(lse)[nothing], -np.inf)
    with environment.x64():
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in (*inputs, d_lse)]
        floats = {n: jnp.asarray(x, jnp.float64) if n == "sinks" else jnp.asarray(x) for n, x in plain.items()}
        _, *want_gradients = forward_and_vjp("reference", exact[:4], floats, exact[4], **static(case))
        want_gradients = jax.device_get(want_gradients)
    errors = {
        "out": error(out, want),
        "lse": lse_error(np.where(nothing, 0.0, lse), np.where(nothing, 0.0, want_lse)),
        "gradients": error(gradients, want_gradients),
    }
    assert all(e <= bound for e in errors.values()), errors
    return errors
