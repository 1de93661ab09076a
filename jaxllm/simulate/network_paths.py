"""Path planning for collectives in a leaf-spine network: paths by a planner, or by hash as switches choose them.

A simulation after C4 (arXiv:2406.04594), whose C4P probes the paths of a network, keeps to those that work, and gives
the few large flows of collectives paths that share the links evenly, where switches would choose by a hash of each
flow's header (ECMP). Steering real traffic is below JAX; this says what it is worth.

The network has racks of hosts. A host is one network interface with one or more ports, and a rack has one leaf switch
for each port: port p of its hosts is joined to leaf p. Every leaf is joined to every spine switch. A flow leaves its
source by one of the ports, enters its target by one, and crosses a spine unless both ports are at the same leaf. All
links are full duplex. A collective is a group of flows of equal size between pairs of hosts.

    hashed_paths    every flow takes one of its live paths at random: switches know dead links, but not slow ones
    planned_paths   flows are distributed over paths by an integer linear program, so that the slowest link takes the
                    least time; with paths from before, the fewest flows are moved

``python -m benchmarks.replicas.network_paths`` compares them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

NODE_LIMIT = 500
"""Nodes of branch and bound after which the planner keeps its best plan."""
SLACK = 1e-9
"""Relative rounding that the second program allows the slowest link of the first."""


class NetworkPathError(ValueError):
    """The network, a collective or the paths cannot be."""


class Link(NamedTuple):
    """One direction of a link.

    Attributes:
        kind: "out" and "in" of a host's port, "up" from a leaf to a spine, "down" from a spine to a leaf.
        switch: the host, or the leaf.
        port: the host's port, or the spine.
    """

    kind: str
    switch: int
    port: int


class Path(NamedTuple):
    """Path of a flow.

    Attributes:
        out: port of the source.
        spine: -1: both ports are at the same leaf.
        into: port of the target.
    """

    out: int
    spine: int
    into: int


@dataclass(frozen=True)
class LeafSpineNetwork:
    """Leaf-spine network of two levels.

    Attributes:
        racks, hosts: racks, and hosts in each; hosts are numbered rack by rack.
        ports: ports of a host, and leaves of a rack.
        spines: spine switches.
        port_bandwidth, spine_bandwidth: bytes per second, in each direction, of a host's port and of a leaf's link to a
            spine.
        port_shares: share of the bandwidth that is left, 0 for a dead one, by (host, port).
        spine_shares: the same of links between leaves and spines by (leaf, spine); leaf = rack * ports + port.

    Raises:
        NetworkPathError: a number is not positive, or a share is not in [0, 1] or of no link.
    """

    racks: int
    hosts: int
    ports: int
    spines: int
    port_bandwidth: float
    spine_bandwidth: float
    port_shares: Mapping[tuple[int, int], float] = field(default_factory=dict)
    spine_shares: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("racks", "hosts", "ports", "spines", "port_bandwidth", "spine_bandwidth"):
            if not getattr(self, name) > 0:
                raise NetworkPathError(f"{name} = {getattr(self, name)}: give a number above 0.")
        limits = {
            "port_shares": (self.racks * self.hosts, self.ports),
            "spine_shares": (self.racks * self.ports, self.spines),
        }
        for name, (first, second) in limits.items():
            for (one, other), share in getattr(self, name).items():
                if not (0 <= one < first and 0 <= other < second):
                    raise NetworkPathError(f"{name} names ({one}, {other}); there are {first} times {second} links.")
                if not 0 <= share <= 1:
                    raise NetworkPathError(f"{name}[{one}, {other}] = {share}: give a share from 0 (dead) to 1.")

    @cached_property
    def bandwidth(self) -> dict[Link, float]:
        """Bytes per second of every direction of every link."""
        found: dict[Link, float] = {}
        for host in range(self.racks * self.hosts):
            for port in range(self.ports):
                share = self.port_shares.get((host, port), 1.0)
                for kind in ("out", "in"):
                    found[Link(kind, host, port)] = share * self.port_bandwidth
        for leaf in range(self.racks * self.ports):
            for spine in range(self.spines):
                share = self.spine_shares.get((leaf, spine), 1.0)
                for kind in ("up", "down"):
                    found[Link(kind, leaf, spine)] = share * self.spine_bandwidth
        return found

    def links(self, source: int, target: int, path: Path) -> tuple[Link, ...]:
        """Links that a path from one host to another takes."""
        ends = (Link("out", source, path.out), Link("in", target, path.into))
        if path.spine < 0:
            return ends
        up = Link("up", self.leaf(source, path.out), path.spine)
        return (*ends, up, Link("down", self.leaf(target, path.into), path.spine))

    def leaf(self, host: int, port: int) -> int:
        """Leaf that a host's port is joined to."""
        return host // self.hosts * self.ports + port

    @cached_property
    def _found(self) -> dict[tuple[int, int], list[Path]]:
        return {}

    def live_paths(self, source: int, target: int) -> list[Path]:
        """Paths between two hosts on which no link is dead.

        Raises:
            NetworkPathError: there is none, or no such host.
        """
        if (source, target) not in self._found:
            self._found[source, target] = self._live_paths(source, target)
        return self._found[source, target]

    def _live_paths(self, source: int, target: int) -> list[Path]:
        if strange := [host for host in (source, target) if not 0 <= host < self.racks * self.hosts]:
            raise NetworkPathError(f"there is no host {strange[0]}: hosts are 0 to {self.racks * self.hosts - 1}.")
        every = [
            Path(out, spine, into)
            for out in range(self.ports)
            for into in range(self.ports)
            for spine in ([-1] if self.leaf(source, out) == self.leaf(target, into) else range(self.spines))
        ]
        found = [path for path in every if all(self.bandwidth[link] for link in self.links(source, target, path))]
        if not found:
            raise NetworkPathError(f"no path from host {source} to host {target} is left: leave out one of them.")
        return found


@dataclass(frozen=True)
class FlowGroup:
    """Flows of equal size that a job sends together, over and over.

    Attributes:
        pairs: source and target host of each flow; a pair is listed once for each of its flows.
        flow_bytes: bytes of a flow.
    """

    pairs: tuple[tuple[int, int], ...]
    flow_bytes: float

    def __post_init__(self) -> None:
        if not self.flow_bytes > 0:
            raise NetworkPathError(f"flow_bytes = {self.flow_bytes}: give a number above 0.")
        if not self.pairs:
            raise NetworkPathError("a collective without flows: give pairs of hosts.")
        if alone := [source for source, target in self.pairs if source == target]:
            raise NetworkPathError(f"a flow from host {alone[0]} to itself uses no network.")


def ring_all_reduce(hosts: Sequence[int], size: float, flows: int = 1) -> FlowGroup:
    """Ring all-reduce: each host sends 2 (n - 1) / n of the bytes to the next one.

    Args:
        hosts: in the order of the ring.
        size: bytes that are reduced.
        flows: flows that each host splits its bytes into.

    Raises:
        NetworkPathError: there are fewer than two hosts, one is listed twice, or there are no flows.
    """
    _check_members(hosts, flows)
    pairs = [pair for pair in zip(hosts, [*hosts[1:], hosts[0]], strict=True) for _ in range(flows)]
    return FlowGroup(tuple(pairs), 2 * (len(hosts) - 1) / len(hosts) * size / flows)


def tree_all_reduce(hosts: Sequence[int], size: float, flows: int = 1) -> FlowGroup:
    """All-reduce over a binary tree: partial sums go up every edge, and the sum comes down.

    Args:
        hosts: the root, then level by level.
        size: bytes that are reduced.
        flows: flows that each edge's bytes are split into, in each direction.

    Raises:
        NetworkPathError: as in ``ring_all_reduce``.
    """
    _check_members(hosts, flows)
    edges = [(hosts[place], hosts[(place - 1) // 2]) for place in range(1, len(hosts))]
    return FlowGroup(tuple(pair for a, b in edges for pair in ((a, b), (b, a)) for _ in range(flows)), size / flows)


def _check_members(hosts: Sequence[int], flows: int) -> None:
    if len(hosts) < 2:
        raise NetworkPathError(f"an all-reduce needs at least two hosts, not {len(hosts)}.")
    if len(set(hosts)) < len(hosts):
        raise NetworkPathError(f"an all-reduce over {list(hosts)} has a host twice.")
    if flows < 1:
        raise NetworkPathError(f"flows = {flows}: give 1 or more.")


Paths = Sequence[Sequence[Path]]
"""Path of each flow of each collective."""


def hashed_paths(network: LeafSpineNetwork, jobs: Sequence[FlowGroup], seed: int = 0) -> list[list[Path]]:
    """Paths by hash: every flow takes one of its live paths with equal odds.

    Raises:
        NetworkPathError: a pair has no live path.
    """
    rng = random.Random(seed)
    return [[rng.choice(network.live_paths(*pair)) for pair in job.pairs] for job in jobs]


def link_seconds(network: LeafSpineNetwork, jobs: Sequence[FlowGroup], paths: Paths) -> dict[Link, float]:
    """Seconds that each link needs for the bytes of one collective of every job; links without flows are left out.

    Raises:
        NetworkPathError: a path uses a dead link.
    """
    load: dict[Link, float] = {}
    for job, chosen in zip(jobs, paths, strict=True):
        for pair, path in zip(job.pairs, chosen, strict=True):
            for link in network.links(*pair, path):
                load[link] = load.get(link, 0.0) + job.flow_bytes
    if dead := [link for link in load if not network.bandwidth[link]]:
        raise NetworkPathError(f"the link {dead[0]} is dead: plan or hash the paths again.")
    return {link: size / network.bandwidth[link] for link, size in load.items()}


def job_seconds(network: LeafSpineNetwork, jobs: Sequence[FlowGroup], paths: Paths) -> list[float]:
    """Seconds of a collective of each job while all jobs send: links are shared by max-min fairness over flows.

    All flows of a collective advance at the rate of its slowest one, since each host waits for what it passes on. The
    rates of all jobs rise together, and a job's stays where one of its links is full.

    Raises:
        NetworkPathError: a path uses a dead link.
    """
    link_seconds(network, jobs, paths)
    counts = [
        Counter(
            link for pair, path in zip(job.pairs, chosen, strict=True) for link in network.links(*pair, path)
        )
        for job, chosen in zip(jobs, paths, strict=True)
    ]  # fmt: skip
    left = {link: network.bandwidth[link] for one in counts for link in one}
    rates = [0.0] * len(jobs)
    rising = set(range(len(jobs)))
    while rising:
        flows = Counter[Link]()
        for job in rising:
            flows.update(counts[job])
        rise = {link: left[link] / number for link, number in flows.items()}
        least = min(rise.values())
        full = {link for link, value in rise.items() if value <= least * (1 + SLACK)}
        for link, number in flows.items():
            left[link] = max(left[link] - least * number, 0.0)
        for job in rising:
            rates[job] += least
        rising = {job for job in rising if not full & counts[job].keys()}
    return [job.flow_bytes / rate for job, rate in zip(jobs, rates, strict=True)]


@dataclass(frozen=True)
class PathPlan:
    """Plan of paths.

    Attributes:
        paths: path of each flow of each collective.
        seconds: time of the slowest link.
        bound: no assignment of flows to paths has a slowest link that is faster than this.
        moved: flows whose path is not the one from before.
    """

    paths: list[list[Path]]
    seconds: float
    bound: float
    moved: int


def planned_paths(
    network: LeafSpineNetwork, jobs: Sequence[FlowGroup], before: Paths | None = None, *, nodes: int = NODE_LIMIT
) -> PathPlan:
    """Paths by the planner: the slowest link takes the least time for the bytes of one collective of every job.

    Of these plans it takes one whose slowest flow has the largest share of its links, which differs where flows of
    jobs differ in size, and of those one that moves the fewest flows. Flows of a job between the same hosts are
    interchangeable, so the integer linear programs (HiGHS) have a number of flows for each of their paths.

    Args:
        network: with its dead and slow links.
        jobs: collectives of all jobs.
        before: paths until now, such as from before a link died; None: there are none.
        nodes: of branch and bound; with more to search the best plan until then is kept.

    Raises:
        NetworkPathError: a pair has no live path, there are no jobs, ``before`` is of other jobs, or no plan was found
            within the nodes.
    """
    if not jobs:
        raise NetworkPathError("no jobs to plan paths for: give at least one collective.")
    if before is not None and [len(paths) for paths in before] != [len(job.pairs) for job in jobs]:
        raise NetworkPathError("before does not list a path for each flow of each job: give the paths of these jobs.")
    program = _PathProgram(network, jobs, before, nodes)
    bound = program.level(program.bytes)
    if len({job.flow_bytes for job in jobs}) > 1:
        program.level(program.flows)
    if before is not None:
        program.keep()
    paths, moved = program.paths()
    seconds = max(link_seconds(network, jobs, paths).values())
    return PathPlan(paths, seconds, min(bound, seconds), moved)


class _PathProgram:
    """The planner's integer linear programs: a number of flows for each path of each job's each pair of hosts.

    Each program has the optimum of those before it as a limit.
    """

    def __init__(self, network: LeafSpineNetwork, jobs: Sequence[FlowGroup], before: Paths | None, nodes: int):
        from scipy.sparse import csr_matrix

        self._jobs, self._before, self._nodes = jobs, before, nodes
        self._places: dict[tuple[int, tuple[int, int]], list[int]] = {}  # flows, by job and pair of hosts
        for number, job in enumerate(jobs):
            for place, pair in enumerate(job.pairs):
                self._places.setdefault((number, pair), []).append(place)
        self._columns = [
            (group, path) for group, (_, pair) in enumerate(self._places) for path in network.live_paths(*pair)
        ]
        counts = np.asarray([len(own) for own in self._places.values()], float)
        owner = np.asarray([group for group, _ in self._columns])
        size, groups = len(owner), list(self._places)
        self._most = counts[owner]
        self._numbers = np.zeros(size)
        links = [(n, link) for n, (g, path) in enumerate(self._columns) for link in network.links(*groups[g][1], path)]
        rows = {link: row for row, link in enumerate(network.bandwidth)}
        place = ([rows[link] for _, link in links], [n for n, _ in links])
        slowness = np.asarray([1 / network.bandwidth[link] for _, link in links])
        sizes = np.asarray([jobs[groups[owner[n]][0]].flow_bytes for n, _ in links])
        self.bytes = csr_matrix((sizes * slowness, place), shape=(len(rows), size))
        self.flows = csr_matrix((slowness, place), shape=(len(rows), size))
        # Constraints (matrix, least, most) on the numbers of flows.
        self._limits: list[tuple[Any, Any, Any]] = [
            (csr_matrix((np.ones(size), (owner, np.arange(size)))), counts, counts)
        ]

    def level(self, load: Any) -> float:
        """Minimises the largest of the links' loads, of so much for each flow of a path; returns a bound of it."""
        from scipy.sparse import csr_matrix

        unit = float(load.max())  # solvers have absolute tolerances
        found = self._solved(load / unit, csr_matrix(-np.ones((load.shape[0], 1))), [1.0], [np.inf])
        if found is not None:
            self._numbers = np.rint(found.x[:-1])
        elif not self._numbers.any():
            raise NetworkPathError(f"no plan was found within nodes = {self._nodes}: give more.")
        largest = (load @ self._numbers).max()
        self._limits.append((load / unit, -np.inf, largest / unit * (1 + SLACK)))
        return largest if found is None else float(found.mip_dual_bound) * unit

    def keep(self) -> None:
        """Maximises the flows that stay on their path from before."""
        from scipy.sparse import identity

        size = len(self._columns)
        found = self._solved(-identity(size), identity(size), -np.ones(size), self._had())
        if found is not None:
            self._numbers = np.rint(found.x[:size])

    def paths(self) -> tuple[list[list[Path]], int]:
        """Path of each flow, which keeps its own if it can, and how many do not."""
        left: list[Counter[Path]] = [Counter() for _ in self._places]
        for (group, path), number in zip(self._columns, self._numbers, strict=True):
            left[group][path] += int(number)
        out: list[list[Path]] = [[Path(0, 0, 0)] * len(job.pairs) for job in self._jobs]
        moved = 0
        for group, ((job, _), own) in enumerate(self._places.items()):
            homeless = []
            for place in own:
                path = None if self._before is None else self._before[job][place]
                if path is not None and left[group][path] > 0:
                    left[group][path] -= 1
                    out[job][place] = path
                else:
                    homeless.append(place)
            for place, path in zip(homeless, left[group].elements(), strict=True):
                out[job][place] = path
            moved += len(homeless)
        return out, 0 if self._before is None else moved

    def _had(self) -> np.ndarray:
        """Flows that each path had before."""
        assert self._before is not None
        had = Counter(
            (group, self._before[job][place])
            for group, ((job, _), own) in enumerate(self._places.items())
            for place in own
        )
        return np.asarray([had[column] for column in self._columns], float)

    def _solved(self, rows: Any, more: Any, cost: Any, most: Any) -> Any:
        """Minimises the cost of further variables, with numbers of flows that are integers; None: none was found.

        Args:
            rows, more: coefficients of the numbers of flows and of the further variables in sums that are at most 0.
            cost, most: of the further variables; they are at least 0.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix, hstack

        size, further = len(self._columns), len(cost)
        constraints = [
            LinearConstraint(hstack([matrix, csr_matrix((matrix.shape[0], further))]), least, largest)
            for matrix, least, largest in self._limits
        ]
        constraints.append(LinearConstraint(hstack([rows, more]), -np.inf, 0.0))
        found = milp(
            np.append(np.zeros(size), cost),
            constraints=constraints,
            bounds=Bounds(0, np.append(self._most, most)),  # type: ignore[arg-type]
            integrality=np.append(np.ones(size), np.zeros(further)),
            options={"mip_rel_gap": 0.0, "node_limit": self._nodes},
        )
        return None if found.x is None else found
