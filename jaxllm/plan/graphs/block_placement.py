"""Placement of a block's kept values over device and host with the fewest moved bytes, as a policy of ``model.remat``.

The graph that ``tensor_placement`` orders and places (COSMA, arXiv:2311.18246) has the block's forward pass, from its
input through the kept values to its output; one operation in which all other layers run, beside which the device has
``room`` bytes for values of this block; and the backward pass, which reads the values in reverse. What is on the device
during that operation is kept, what is fetched behind it is moved: ``save:attention+qkv@host``. The compiler orders the
operations of the program itself.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.models.remat import Policy, save_policy, saved_values
from jaxllm.plan.graphs.block_graph import BlockGraph
from jaxllm.plan.graphs.tensor_placement import place
from jaxllm.plan.graphs.value_graph import GraphError, Operation, ValueGraph

ROOMS = (0.25, 0.5, 0.75)
"""Shares of the bytes of a block's values for which placements are offered to the remat solver."""
SECONDS = 10.0
"""Time of the solver for one placement."""


class BlockPlacement(NamedTuple):
    """Placement of a block's values.

    Attributes:
        policy: that keeps and moves them.
        device: bytes on the device between the passes, the block's input included.
        moved: bytes that are written to the host, and fetched back.
        optimal: whether no placement moves less.
    """

    policy: Policy
    device: int
    moved: int
    optimal: bool


def place_block(block: BlockGraph, policy: Policy, room: int, seconds: float | None = SECONDS) -> BlockPlacement:
    """Placement of the values that "save" keeps, and of the block's input, with the fewest moved bytes.

    Args:
        block: the block.
        policy: "full", or "save" with values.
        room: bytes of the device for the values between the passes.
        seconds: after which the best placement so far is taken.

    Raises:
        GraphError: ``room`` is negative, or the policy keeps values that have no names.
        TimeoutError: no placement was found in time.
    """
    values = saved_values(policy) if policy != "full" else ()
    if room < 0 or values is None:
        raise GraphError(f"policy {policy!r} in {room:,} bytes; give full or save:VALUES, and no bytes below zero.")
    names = ["input", *(name for name in block.values() if name in values)]
    sizes = [block.stream, *(block.bytes_of(name) for name in names[1:])]
    whole, count = sum(sizes), len(names)
    operations = [
        Operation(name, tuple(range(i)[-1:]), size) for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    operations.append(Operation("output", (count - 1,), 0))
    operations.append(Operation("other layers", (count,), 0, scratch=max(0, whole - room)))
    for i in reversed(range(count)):
        operations.append(Operation(f"gradient of {names[i]}", (len(operations) - 1, i), 0))
    found = place(ValueGraph(tuple(operations)), whole, seconds=seconds)
    moved = {one.operation for one in found.moves if one.kind == "fetch"}
    here = [names[i] for i in range(1, count) if i not in moved]
    return BlockPlacement(
        save_policy(here, [names[i] for i in sorted(moved)]),
        sum(size for i, size in enumerate(sizes) if i not in moved),
        sum(sizes[i] for i in moved),
        found.optimal,
    )


def placed_policies(blocks: list[BlockGraph]) -> list[Policy]:
    """Policies of blocks that recompute no matmul which keeping named values avoids, for each of ``ROOMS``."""
    found: list[Policy] = []
    for block in blocks:
        every = sum(block.bytes_of(name) for name in block.values())
        policy = block.best(every)
        kept = block.kept_by(policy)
        assert kept is not None
        for share in ROOMS:
            try:
                found.append(place_block(block, policy, int(share * (kept.bytes + block.stream))).policy)
            except TimeoutError:
                continue  # the solver has other candidates
    return list(dict.fromkeys(found))
