"""Self-check: each deliberate mistake in a kernel that its samples can show keeps it from being chosen."""

from __future__ import annotations

import contextlib

import jax

from pallas_kernels import _self_check
from pallas_kernels._compat import interpreting
from tests.kernels.gpu_simulation import no_races
from tests.proofs.harness import proof
from tests.proofs.kernels.mutants import bodies, mutated

KERNELS = {
    "flash": ("flash_attention", "pallas_gpu"),
    "flash_hopper": ("flash_attention", "mosaic_gpu"),
    "grouped": ("grouped_matmul", "pallas_gpu"),
    "grouped_hopper": ("grouped_matmul", "mosaic_gpu"),
    "fused_moe": ("fused_moe", "pallas_tpu"),
    "lora": ("grouped_lora", "pallas_gpu"),
    "packed": ("packed_matmul", "pallas_gpu"),
    "paged": ("paged_attention", "pallas_gpu"),
    "cross_entropy": ("linear_cross_entropy", "pallas_gpu"),
    "recurrent": ("recurrent", "pallas_gpu"),
}
"""Test body -> operation, and its kernel with mistakes."""
UNSEEN = {
    ("grouped_hopper", "one operand not masked"): "shown by infinite gradients alone, which no sample gives",
    ("flash_hopper", "keys let go before their last matmul"): "a race, which values need not show",
}
"""Mistake that samples cannot show -> why."""


def _package(name: str) -> str:
    return getattr(bodies()[name], "PACKAGE", f"pallas_kernels.{name}")


NONE = "no mistake"
MUTANTS = tuple((name, NONE) for name in KERNELS) + tuple(
    (name, what)
    for name, body in bodies().items()
    if name in KERNELS
    for kernel, what in body.MUTATIONS
    if kernel == KERNELS[name][1] and (name, what) not in UNSEEN
)


@proof("kernels", cases=MUTANTS, sample=1)
def self_check_sees_mutants(mutant: tuple[str, str]) -> None:
    """Each kernel in its own interpreter, with the block sizes of a device; without a mistake they pass."""
    name, what = mutant
    operation, implementation = KERNELS[name]
    jax.clear_caches()
    edit, races = contextlib.nullcontext(), contextlib.nullcontext()
    if what != NONE:
        edit = mutated(_package(name), *bodies()[name].MUTATIONS[implementation, what])
    if implementation == "mosaic_gpu":
        races = no_races()
    with edit, interpreting(), races:
        verdict = _self_check.check(operation, implementation, jax.devices()[0])
    assert verdict.passed == (what == NONE), verdict
