"""Link benchmark: attained bandwidth and latency between nodes, measured by messages of all their devices at once.

Planning with attained bandwidths instead of nominal ones is the first part of Pipette (arXiv:2405.18093, section 4).

Legend: U units, one for each node or slice; E devices of a unit; n elements of a message.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.star_sum import star_limit

AXIS = "device"
MESSAGE = 2**26
"""Bytes that each device sends at a time."""
TURNS = (2, 10)
"""Messages one after the other in two programs; the difference of their times has no cost of a program in it."""
ROUNDS = 5
"""Runs of a program, of which the fastest counts."""


@dataclass(frozen=True)
class LinkRates:
    """Measured links.

    Attributes:
        names: of the units.
        bandwidth: bytes/s each way of a device of one unit to one of another, while all of them send; on the diagonal
            to its neighbour in the unit, infinite where it has none. [U U]
        latency: seconds of a message of one element. [U U]
    """

    names: tuple[str, ...]
    bandwidth: tuple[tuple[float, ...], ...]
    latency: tuple[tuple[float, ...], ...]

    def table(self) -> str:
        """Table for people, a row for each pair."""
        pairs = list(itertools.combinations_with_replacement(enumerate(self.names), 2))
        said = [f"{one} {other if a != b else '(within)'}" for (a, one), (b, other) in pairs]
        wide = max(map(len, said))
        rows = [f"{'':{wide}}     GB/s  latency us"]
        for pair, ((a, _), (b, _)) in zip(said, pairs, strict=True):
            rows.append(f"{pair:{wide}} {self.bandwidth[a][b] / 1e9:8.2f} {1e6 * self.latency[a][b]:11.1f}")
        limit = self.star_limit()
        if limit:
            rows.append(
                f"sums over these {len(self.names)} are faster through one of them up to {limit} bytes: "
                f"--star-bytes {limit}"
            )
        return "\n".join(rows)

    def star_limit(self) -> int:
        """Most bytes whose sum over one device of each unit is faster through one of them than by a ring.

        By the longest latency and the lowest bandwidth between units; see ``sharding.star_sum``. 0: none.
        """
        pairs = list(itertools.combinations(range(len(self.names)), 2))
        if not pairs:
            return 0
        hop, link = max(self.latency[a][b] for a, b in pairs), min(self.bandwidth[a][b] for a, b in pairs)
        return star_limit(len(self.names), hop=hop, link=link)

    def toml(self) -> str:
        """Lines of ``[between]`` in the file of an unequal cluster (``unequal_cluster``)."""
        pairs = itertools.combinations(enumerate(self.names), 2)
        return "\n".join(
            ["[between]", *(f'"{one} {other}" = {self.bandwidth[a][b]:.4g}' for (a, one), (b, other) in pairs)]
        )


def measure_links(
    units: Sequence[Sequence[jax.Device]],
    names: Sequence[str],
    message: int = MESSAGE,
    tell: Callable[[str], None] = lambda _: None,
) -> LinkRates:
    """Measures the links between units; all processes of their devices call it.

    Args:
        units: devices of each unit, of equal number. [U E]
        names: of the units.
        message: bytes that a device sends at a time.
        tell: takes a line as each pair is done.

    Raises:
        ValueError: the units have not equally many devices, or there are not as many names.
    """
    sizes = {len(unit) for unit in units}
    if len(sizes) != 1 or len(names) != len(units):
        raise ValueError(
            f"{len(names)} names for units of {sorted(map(len, units))} devices: give equal units and a name each."
        )
    each = sizes.pop()
    mesh = Mesh(np.array([device for unit in units for device in unit]), (AXIS,))
    rates = np.full((len(units), len(units)), np.inf)
    delays = np.zeros((len(units), len(units)))
    for a, b in itertools.combinations_with_replacement(range(len(units)), 2):
        pairs = partners(a, b, each)
        if not pairs:
            continue
        delays[a, b] = delays[b, a] = _seconds(mesh, pairs, 1)
        rates[a, b] = rates[b, a] = message / _seconds(mesh, pairs, message)
        tell(f"{names[a]} - {names[b]}: {rates[a, b] / 1e9:.2f} GB/s, {1e6 * delays[a, b]:.1f} us")
    return LinkRates(tuple(names), tuple(map(tuple, rates.tolist())), tuple(map(tuple, delays.tolist())))


def partners(one: int, other: int, each: int) -> list[tuple[int, int]]:
    """Sender and receiver of each message: devices of the same place in two units, or neighbours within one."""
    if one != other:
        there = [(one * each + place, other * each + place) for place in range(each)]
    else:
        there = [(one * each + place, one * each + place + 1) for place in range(0, each - 1, 2)]
    return there + [(b, a) for a, b in there]


def exchange(mesh: Mesh, pairs: Sequence[tuple[int, int]], turns: int) -> Any:
    """Program that sends each device's part to its partner, so many times; the parts of others become 0."""

    def send(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, x: jax.lax.ppermute(x, AXIS, pairs), x)

    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec))


def _seconds(mesh: Mesh, pairs: Sequence[tuple[int, int]], nbytes: int) -> float:
    """Seconds of one message of so many bytes."""
    shape = (mesh.size, max(1, nbytes // 4))
    x = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)))()
    took = []
    for turns in TURNS:
        program = exchange(mesh, pairs, turns)
        jax.block_until_ready(program(x))
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            jax.block_until_ready(program(x))
            times.append(time.perf_counter() - begin)
        took.append(min(times))
    return max(took[1] - took[0], 1e-9) / (TURNS[1] - TURNS[0])
