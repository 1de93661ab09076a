"""Each deliberate mistake in an implementation makes the shared test body fail."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.flash_attention import api
from tests.kernels import flash_body
from tests.kernels.flash_body import CASES
from tests.proofs.harness import ProofError, proof

PACKAGE = importlib.import_module("pallas_kernels.flash_attention")  # as an attribute, the name is the function
MODULES = ("xla", "reference", "blockwise", "pallas_tpu", "pallas_gpu")
"""Of the package, in the order in which they import each other."""
KILLERS = ("everything", "packed", "more bands than one band's length", "window over many bands")
"""Cases that a mutant is tried on, until one fails."""

_SHARED = {
    "mask off by one": ("blockwise", "seen = kv_at <= q_at", "seen = kv_at < q_at"),
    "window off by one": ("blockwise", "kv_at > q_at - window", "kv_at >= q_at - window"),
    "dropped segment": ("blockwise", "(q_in == kv_in) & ", ""),
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
    ("xla", "mask off by one"): ("xla", "seen = kv_at[:, None, :] <= q", "seen = kv_at[:, None, :] < q"),
    ("xla", "wrong scale"): ("xla", "rows, k) * options.scale,", "rows, k),"),
    ("xla", "dropped segment"): ("xla", "(q_in == kv_in) & ", ""),
    ("xla", "missing rescale"): ("xla", "carry[2] * keep + out", "carry[2] + out"),
    ("xla", "missing delta"): ("xla", "(d_weights - delta_rows)", "d_weights"),
    **{(name, what): edit for name in ("pallas_tpu", "pallas_gpu") for what, edit in _SHARED.items()},
    ("pallas_tpu", "another's keys"): ("pallas_tpu", "return head, head // layout.splits,", "return head, head * 0,"),
    ("pallas_gpu", "another's keys"): ("pallas_gpu", "(b, 0, h // shared, 0)", "(b, 0, h * 0, 0)"),
}
"""(implementation, mistake) -> (module, text, text with the mistake)."""


@contextlib.contextmanager
def mutated(module: str, text: str, mistake: str) -> Iterator[None]:
    """The package's implementations made of other source text, as new functions that nothing has compiled before."""
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            original = importlib.import_module(f"{PACKAGE.__name__}.{name}")
            source = inspect.getsource(original)
            if name == module:
                if text not in source:
                    raise ProofError(f"{original.__file__} no longer holds {text!r}: renew the mutation.")
                source = source.replace(text, mistake)
            copy = types.ModuleType(original.__name__)
            copy.__file__ = original.__file__
            exec(compile(source, f"{name} with a mistake", "exec"), vars(copy))
            patch.setitem(sys.modules, copy.__name__, copy)
            patch.setattr(PACKAGE, name, copy)
            patch.setitem(api.IMPLEMENTATIONS, name, vars(copy).get(f"attention_{name}"))
        yield


@proof(
    "kernels",
    count=len(MUTATIONS),
    sample=1,
    chunk=len(MUTATIONS),
    strategy=st.sampled_from(sorted(MUTATIONS)),
)
def flash_attention_mutants_fail(mutant: tuple[str, str]) -> None:
    """A mistake that the cases do not see is a failure."""
    with mutated(*MUTATIONS[mutant]), flash_body.small_pieces():
        for case in KILLERS:
            try:
                flash_body.check(mutant[0], CASES[case], np.random.default_rng(0))
            except AssertionError:
                return
    raise AssertionError(f"{mutant} survives {KILLERS}")
