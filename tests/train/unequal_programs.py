"""Collectives of a compiled step with uneven rows: mesh axes that they join inside and outside of its loops."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxllm.compiler import hlo, replica_groups
from tests.train.by_need import reachable

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def joined_axes(text: str, mesh: Mesh) -> tuple[set[str], set[str]]:
    """Mesh axes that the collectives of a compiled program join: in the bodies of its loops, and outside of them.

    Args:
        text: of the program.
        mesh: that it runs on.
    """
    module, placed = hlo.parse(text), replica_groups.Placement.of(mesh)
    loops = [
        module.computations[called]
        for computation in module.computations.values()
        for one in computation.instructions.values()
        if one.opcode == "while"
        for called in (one.callee("body"), one.callee("condition"))
        if called is not None
    ]
    assert loops, "the program has no loop over micro-batches"
    inside = {one.name for loop in loops for one in reachable(module, loop)}
    found: tuple[set[str], set[str]] = set(), set()
    for computation in module.computations.values():
        for one in computation.instructions.values():
            if one.opcode.removesuffix("-start") in COLLECTIVES:
                groups = replica_groups.groups(one.attributes, mesh.size)
                found[computation.name not in inside].update(placed.joins(groups)[0])
    return found
