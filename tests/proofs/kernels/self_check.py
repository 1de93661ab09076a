"""Self-check: each deliberate mistake in a kernel that its samples can show keeps it from being chosen."""

from __future__ import annotations

import contextlib

import jax

from pallas_kernels import _self_check
from pallas_kernels._compat import interpreting
from tests.proofs.harness import proof
from tests.proofs.kernels.mutants import bodies, mutated

OPERATIONS = {
    "flash": "flash_attention",
    "grouped": "grouped_matmul",
    "lora": "grouped_lora",
    "packed": "packed_matmul",
    "paged": "paged_attention",
    "cross_entropy": "linear_cross_entropy",
}
"""Test body -> operation."""


def _package(name: str) -> str:
    return getattr(bodies()[name], "PACKAGE", f"pallas_kernels.{name}")


NONE = "no mistake"
MUTANTS = tuple((name, NONE) for name in OPERATIONS) + tuple(
    (name, what)
    for name, body in bodies().items()
    if name in OPERATIONS
    for kernel, what in body.MUTATIONS
    if kernel == "pallas_gpu"
)


@proof("kernels", cases=MUTANTS, sample=1)
def self_check_sees_mutants(mutant: tuple[str, str]) -> None:
    """The GPU kernels, in Pallas' interpreter, with the block sizes of a device; without a mistake they pass."""
    name, what = mutant
    jax.clear_caches()
    edit = contextlib.nullcontext()
    if what != NONE:
        edit = mutated(_package(name), *bodies()[name].MUTATIONS["pallas_gpu", what])
    with edit, interpreting():
        verdict = _self_check.check(OPERATIONS[name], "pallas_gpu", jax.devices()[0])
    assert verdict.passed == (what == NONE), verdict
