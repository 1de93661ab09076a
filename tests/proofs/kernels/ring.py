"""Ring attention on TPUs: values with races detected, memory that falls with the ring, copies that overlap."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.ring_attention.layout import LAYOUTS
from sharding.isolate import run_isolated
from tests.kernels import ring_body
from tests.kernels.ring_aot import Shape
from tests.proofs.harness import proof

CASES = tuple(
    (name, layout)
    for name, case in ring_body.CASES.items()
    for layout in LAYOUTS
    if case.cores == 1 or layout == case.layout
)
"""Devices of two cores, which are simulated slowly, with one layout each."""
SEQUENCE = 2048
SLACK = 1.25
"""What a device takes may be this times its share: positions, segments and blocks do not shrink."""


@proof("kernels", cases=CASES, sample=1, bound={"out": 2e-6, "gradients": 2e-6})
def ring_kernels_on_simulated_devices(case: tuple[str, str]) -> dict[str, float]:
    """Remote copies between up to eight simulated devices: values, no race, no memory read before it is written."""
    name, layout = case
    with ring_body.small_pieces():
        chosen = ring_body.CASES[name]._replace(layout=layout)
        return ring_body.check("pallas_tpu", chosen, np.random.default_rng(len(name)))


@proof("kernels", cases=(0, 1, 2), sample=1, bound={"out": 2e-6, "gradients": 2e-6})
def rings_of_a_part_on_simulated_devices(ring: int) -> dict[str, float]:
    """Documents in slots of four devices, in rings of one, two or four of them, which one program has; no race."""
    return ring_body.check_rings("pallas_tpu", np.random.default_rng(ring), cases=(ring,))


@proof("kernels", cases=(4, 8), sample=1, bound=SLACK)
def ring_bytes_fall(shards: int) -> float:
    """Bytes of a device's arguments, results and temporaries, of one sequence over so many devices of a v5e, by 2's."""
    taken = {}
    for n in (2, shards):
        shape = dataclasses.asdict(Shape(SEQUENCE // n, 4, 2, 128, packed=True))
        arguments = {"shape": shape, "implementation": "pallas_tpu", "shards": n}
        result = run_isolated("tests.kernels.ring_aot:compile_on", "v5e:2x4", arguments)
        taken[n] = result["bytes"] + result["temp_bytes"]
    return taken[shards] * shards / (2 * taken[2])


@proof("kernels", cases=LAYOUTS, sample=1, bound=0.2)
def ring_copies_overlap(layout: str) -> float:
    """Plain JAX compiled for a v5e: in both loops all copies start before a step's attention and end after it."""
    forward, backward = run_isolated("tests.kernels.ring_aot:overlap_on", "v5e:2x4", {"layout": layout})
    for loop in (forward, backward):
        assert loop["waited"] == 0
        assert loop["branches"] == (-1 if layout == "striped" else 0)
    # A branch's cycles are not counted in the loop's: where a step branches, the branch being covered is what is told.
    return max(forward["uncovered"], backward["uncovered"]) if layout == "striped" else 0.0
