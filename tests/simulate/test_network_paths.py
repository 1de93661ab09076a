"""Paths of collectives in leaf-spine networks: the planner against hashes and against all assignments."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from jaxllm.simulate.network_paths import (
    FlowGroup,
    LeafSpineNetwork,
    NetworkPathError,
    Path,
    Paths,
    hashed_paths,
    job_seconds,
    link_seconds,
    planned_paths,
    ring_all_reduce,
    tree_all_reduce,
)

SMALL = 4000
"""Assignments of flows to paths that brute force tries at most."""


def drawn(seed: int, small: bool = False) -> tuple[LeafSpineNetwork, list[FlowGroup]]:
    """Random network with dead and slow links, and jobs on it; small ones have few enough assignments to try all."""
    rng = random.Random(seed)
    while True:
        racks, hosts = (2, rng.choice([1, 2])) if small else (rng.choice([2, 3, 4]), rng.choice([2, 3, 4]))
        ports, spines = rng.choice([1, 2]), rng.choice([2, 3] if small else [2, 3, 4, 8])
        shares = {
            (rng.randrange(racks * ports), rng.randrange(spines)): rng.choice([0, 0.25, 0.5])
            for _ in range(rng.randint(0, 3))
        }
        port = {(rng.randrange(racks * hosts), 0): rng.choice([0, 0.5])} if ports > 1 and rng.random() < 0.3 else {}
        network = LeafSpineNetwork(
            racks, hosts, ports, spines, 25e9, rng.choice([12.5e9, 25e9, 50e9]), port, shares
        )  # fmt: skip
        waiting = rng.sample(range(racks * hosts), racks * hosts)
        jobs: list[FlowGroup] = []
        while len(waiting) > 1:
            size = rng.randint(2, len(waiting))
            kind = rng.choice([ring_all_reduce, tree_all_reduce])
            flows = rng.randint(1, 3 if small else 6)
            jobs.append(kind(waiting[:size], rng.choice([1e9, 2e9, 3.3e9]), flows))
            waiting = waiting[size:]
        try:
            choices = [len(network.live_paths(*pair)) for job in jobs for pair in job.pairs]
        except NetworkPathError:
            continue
        if not small or 1 < math.prod(choices) <= SMALL:
            return network, jobs


def slowest(network: LeafSpineNetwork, jobs: list[FlowGroup], paths: Paths) -> float:
    """Seconds of the slowest link, apart from ``link_seconds``: by ports and switches that bytes go through."""
    ports: dict[tuple[str, int, int], float] = {}
    spines: dict[tuple[str, int, int], float] = {}
    for job, chosen in zip(jobs, paths, strict=True):
        for (source, target), path in zip(job.pairs, chosen, strict=True):
            leaves = [
                host // network.hosts * network.ports + port
                for host, port in zip((source, target), path[::2], strict=True)
            ]
            assert (leaves[0] == leaves[1]) == (path.spine == -1)
            for way in [("out", source, path.out), ("in", target, path.into)]:
                ports[way] = ports.get(way, 0.0) + job.flow_bytes
            for way in [("up", leaves[0], path.spine), ("down", leaves[1], path.spine)] if path.spine >= 0 else []:
                spines[way] = spines.get(way, 0.0) + job.flow_bytes
    times = []
    for (_, host, port), size in ports.items():
        times.append(size / network.port_bandwidth / network.port_shares.get((host, port), 1.0))
    for (_, leaf, spine), size in spines.items():
        times.append(size / network.spine_bandwidth / network.spine_shares.get((leaf, spine), 1.0))
    return max(times)


def over_hash(seed: int, hashes: int = 5) -> float:
    """Time of the planner's slowest link over that of the best of some hashes, also after one more link died."""
    network, jobs = drawn(seed)
    plan = planned_paths(network, jobs)
    ratios = [plan.seconds / min(slowest(network, jobs, hashed_paths(network, jobs, n)) for n in range(hashes))]
    assert plan.seconds == pytest.approx(slowest(network, jobs, plan.paths), rel=1e-9)
    rng = random.Random(seed)
    dead = {(rng.randrange(network.racks * network.ports), rng.randrange(network.spines)): 0.0}
    harmed = dataclasses.replace(network, spine_shares={**network.spine_shares, **dead})
    try:
        again = planned_paths(harmed, jobs, plan.paths)
    except NetworkPathError:
        return ratios[0]
    assert again.seconds >= plan.seconds * (1 - 1e-9)
    assert again.seconds == pytest.approx(slowest(harmed, jobs, again.paths), rel=1e-9)
    ratios.append(again.seconds / min(slowest(harmed, jobs, hashed_paths(harmed, jobs, n)) for n in range(hashes)))
    return max(ratios)


def brute_force_error(seed: int) -> float:
    """Relative error of the plan's slowest link, against all assignments; the moved flows must be the fewest."""
    network, jobs = drawn(seed, small=True)
    jobs = [dataclasses.replace(job, flow_bytes=jobs[0].flow_bytes) for job in jobs] if seed % 2 else jobs
    lives = [network.live_paths(*pair) for job in jobs for pair in job.pairs]

    def split(flat: tuple[Path, ...]) -> list[list[Path]]:
        flows = iter(flat)
        return [list(itertools.islice(flows, len(job.pairs))) for job in jobs]

    times = {flat: slowest(network, jobs, split(flat)) for flat in itertools.product(*lives)}
    best = min(times.values())
    before = split(random.Random(seed).choice(list(times)))
    plan = planned_paths(network, jobs, before)
    assert plan.bound == pytest.approx(best, rel=1e-6)
    old = [path for paths in before for path in paths]
    moves = [a != b for a, b in zip(old, (path for paths in plan.paths for path in paths), strict=True)]
    assert sum(moves) == plan.moved
    if len({job.flow_bytes for job in jobs}) == 1:
        optimal = (flat for flat, time in times.items() if time <= best * (1 + 1e-9))
        assert plan.moved == min(sum(a != b for a, b in zip(old, flat, strict=True)) for flat in optimal)
    return abs(plan.seconds / best - 1)


@pytest.mark.parametrize("seed", range(3))
def test_plans_are_no_slower_than_hashes(seed):
    assert over_hash(seed) <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_the_best_of_all_assignments(seed):
    assert brute_force_error(seed) <= 1e-9


NETWORK = LeafSpineNetwork(2, 2, 2, 4, 10.0, 5.0)
RING = ring_all_reduce([0, 2], 100.0, flows=4)


def test_a_ring_by_hand():
    assert RING.pairs == ((0, 2),) * 4 + ((2, 0),) * 4
    assert RING.flow_bytes == 2 * (1 / 2) * 100 / 4
    alike = [[Path(0, 1, 1)] * 8]
    found = link_seconds(NETWORK, [RING], alike)
    # All of a host's bytes are on one port, and on one link to a spine of half its bandwidth.
    assert {(link.kind, seconds) for link, seconds in found.items()} == {
        ("out", 10),
        ("in", 10),
        ("up", 20),
        ("down", 20),
    }
    plan = planned_paths(NETWORK, [RING])
    assert plan.seconds == plan.bound == pytest.approx(5.0)  # two of the four flows on each port
    assert job_seconds(NETWORK, [RING], alike) == pytest.approx([20.0])
    assert job_seconds(NETWORK, [RING], plan.paths) == pytest.approx([5.0])


def test_a_tree_sends_its_bytes_up_and_down():
    tree = tree_all_reduce([5, 3, 4, 1], 100.0)
    assert sorted(tree.pairs) == sorted([(3, 5), (5, 3), (4, 5), (5, 4), (1, 3), (3, 1)])
    assert tree.flow_bytes == 100.0


def test_jobs_share_links_by_max_min_fairness():
    network = LeafSpineNetwork(2, 3, 1, 2, 10.0, 4.0)
    jobs = [FlowGroup(((0, 3),), 8.0), FlowGroup(((1, 4),), 8.0), FlowGroup(((2, 5),), 8.0)]
    one, other = Path(0, 0, 0), Path(0, 1, 0)
    # The first two share a link of 4; the third has one to itself.
    assert job_seconds(network, jobs, [[one], [one], [other]]) == pytest.approx([4.0, 4.0, 2.0])
    assert job_seconds(network, [jobs[0], FlowGroup(((1, 0),), 8.0)], [[one], [Path(0, -1, 0)]]) == pytest.approx(
        [2, 0.8]
    )


def test_hashes_take_live_paths_with_equal_odds():
    network = dataclasses.replace(NETWORK, spine_shares={(0, 0): 0.0, (1, 2): 0.5})
    job = FlowGroup(((0, 2),) * 14000, 1.0)
    (found,) = hashed_paths(network, [job], seed=3)
    live = network.live_paths(0, 2)
    assert len(live) == 14  # of 16, two rise from leaf 0 to spine 0
    assert set(found) == set(live)
    assert all(found.count(path) == pytest.approx(1000, abs=150) for path in live)
    assert hashed_paths(network, [job], seed=3) == [found]


def test_a_plan_moves_only_what_a_dead_link_carried():
    before = planned_paths(NETWORK, [RING]).paths
    spine = before[0][0].spine
    leaf = NETWORK.leaf(0, before[0][0].out)
    plan = planned_paths(dataclasses.replace(NETWORK, spine_shares={(leaf, spine): 0.0}), [RING], before)
    lost = [
        path.spine == spine and leaf in (NETWORK.leaf(source, path.out), NETWORK.leaf(target, path.into))
        for (source, target), path in zip(RING.pairs, before[0], strict=True)
    ]
    assert 0 < sum(lost) == plan.moved
    assert [a != b for a, b in zip(before[0], plan.paths[0], strict=True)] == lost
    assert planned_paths(NETWORK, [RING], before).moved == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dataclasses.replace(NETWORK, spines=0), "spines = 0"),
        (lambda: dataclasses.replace(NETWORK, port_bandwidth=math.nan), "port_bandwidth = nan"),
        (lambda: dataclasses.replace(NETWORK, spine_shares={(4, 0): 0.5}), "4 times 4 links"),
        (lambda: dataclasses.replace(NETWORK, port_shares={(0, 1): 1.5}), r"port_shares\[0, 1\] = 1.5"),
        (lambda: FlowGroup(((0, 1),), 0.0), "flow_bytes = 0.0"),
        (lambda: FlowGroup(((2, 2),), 1.0), "host 2 to itself"),
        (lambda: ring_all_reduce([3], 1.0), "at least two hosts"),
        (lambda: tree_all_reduce([3, 3], 1.0), "twice"),
        (lambda: ring_all_reduce([3, 1], 1.0, flows=0), "flows = 0"),
        (lambda: FlowGroup((), 1.0), "without flows"),
        (lambda: planned_paths(NETWORK, []), "no jobs"),
        (lambda: planned_paths(NETWORK, [RING], [[Path(0, 0, 0)]]), "a path for each flow"),
        (lambda: planned_paths(NETWORK, [FlowGroup(((0, 4),), 1.0)]), "no host 4"),
        (
            lambda: planned_paths(dataclasses.replace(NETWORK, port_shares={(2, 0): 0.0, (2, 1): 0.0}), [RING]),
            "no path from host 0 to host 2",
        ),
        (
            lambda: link_seconds(
                dataclasses.replace(NETWORK, port_shares={(0, 0): 0.0}), [RING], [[Path(0, 1, 1)] * 8]
            ),
            "is dead",
        ),
    ],
)
def test_refused(make, says):
    with pytest.raises(NetworkPathError, match=says):
        make()
