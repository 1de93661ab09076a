"""Time of all-reduces in a leaf-spine network with paths by a planner, and by hash: a simulation.

    python -m benchmarks.replicas.network_paths [--racks 8] [--hosts 8] [--ports 2] [--spines 8] [--port 25e9]
        [--oversubscription 1] [--flows 4] [--size 1e9] [--seeds 20] [--json FILE]

``--port`` is bytes per second of a host's port, ``--oversubscription`` the bandwidth of a leaf's hosts over that of its
links to spines, ``--flows`` the flows that each pair of hosts has, ``--size`` the bytes that are reduced, and
``--seeds`` the hashes that are averaged. ``jaxllm.simulate.network_paths`` says what is simulated;
docs/train/network_paths.md shows the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.simulate.network_paths import (
    FlowGroup,
    LeafSpineNetwork,
    NetworkPathError,
    hashed_paths,
    job_seconds,
    link_seconds,
    planned_paths,
    ring_all_reduce,
    tree_all_reduce,
)


def one_ring(network: LeafSpineNetwork, size: float, flows: int) -> list[FlowGroup]:
    """A ring over two hosts of each rack, in turns, so that every hop crosses racks."""
    hosts = [rack * network.hosts + host for host in range(min(2, network.hosts)) for rack in range(network.racks)]
    return [ring_all_reduce(hosts, size, flows)]


def rings(network: LeafSpineNetwork, size: float, flows: int) -> list[FlowGroup]:
    """Rings over one host of every rack, as many as a rack has hosts."""
    return [
        ring_all_reduce([rack * network.hosts + host for rack in range(network.racks)], size, flows)
        for host in range(network.hosts)
    ]


def tree(network: LeafSpineNetwork, size: float, flows: int) -> list[FlowGroup]:
    """A binary tree over all hosts, in random order."""
    hosts = list(range(network.racks * network.hosts))
    random.Random(0).shuffle(hosts)
    return [tree_all_reduce(hosts, size, flows)]


def mixed(network: LeafSpineNetwork, size: float, flows: int) -> list[FlowGroup]:
    """Four rings and trees of unequal sizes over random hosts."""
    hosts = list(range(network.racks * network.hosts))
    random.Random(1).shuffle(hosts)
    kinds = [ring_all_reduce, tree_all_reduce, ring_all_reduce, tree_all_reduce]
    return [kind(hosts[n::4], size / 2**n, flows) for n, kind in enumerate(kinds)]


JOBS: dict[str, Callable[[LeafSpineNetwork, float, int], list[FlowGroup]]] = {
    "one ring": one_ring,
    "rings": rings,
    "tree": tree,
    "mixed": mixed,
}
CHANGES: dict[str, dict[str, dict[tuple[int, int], float]]] = {
    "healthy": {},
    "a dead spine link": {"spine_shares": {(0, 0): 0.0}},
    "four dead spine links": {"spine_shares": {(0, 0): 0.0, (0, 1): 0.0, (3, 2): 0.0, (5, 2): 0.0}},
    "a spine link at half speed": {"spine_shares": {(0, 0): 0.5}},
    "a dead port": {"port_shares": {(0, 0): 0.0}},
}


HEAD = """| jobs | network | slowest link by hash, ms | planned | planned / hash | a job by hash, ms | planned | moved |
|---|---|---:|---:|---:|---:|---:|---:|"""


def compared(healthy: LeafSpineNetwork, job: str, change: str, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the slowest link and of a job on average, by hash and planned, and flows that the plan moves."""
    jobs = JOBS[job](healthy, options.size, options.flows)
    # Smaller networks have the same number of dead links, or fewer, at other places.
    leaves = healthy.racks * healthy.ports
    shares = {
        name: {(one % leaves, other % healthy.spines): share for (one, other), share in links.items()}
        for name, links in CHANGES[change].items()
    }
    network = dataclasses.replace(healthy, **shares)
    before = planned_paths(healthy, jobs)
    plan = planned_paths(network, jobs, before.paths)
    hashed = [hashed_paths(network, jobs, seed) for seed in range(options.seeds)]
    links = [1e3 * max(link_seconds(network, jobs, one).values()) for one in hashed]
    return {
        "flows": sum(len(one.pairs) for one in jobs),
        "hash": statistics.mean(links),
        "hash_least": min(links),
        "hash_most": max(links),
        "planned": 1e3 * plan.seconds,
        "bound": 1e3 * plan.bound,
        "hash_job": 1e3 * statistics.mean(time for one in hashed for time in job_seconds(network, jobs, one)),
        "planned_job": 1e3 * statistics.mean(job_seconds(network, jobs, plan.paths)),
        "moved": plan.moved,
    }


def shown(job: str, change: str, row: dict[str, float]) -> str:
    """Row of the table."""
    return (
        f"| {job} | {change} | {row['hash']:.0f} ({row['hash_least']:.0f}-{row['hash_most']:.0f}) | "
        f"{row['planned']:.0f} | {row['planned'] / row['hash']:.2f} | {row['hash_job']:.0f} | "
        f"{row['planned_job']:.0f} | {row['moved']:.0f} of {row['flows']:.0f} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--racks", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--ports", type=int, default=2)
    parser.add_argument("--spines", type=int, default=8)
    parser.add_argument("--port", type=float, default=25e9)
    parser.add_argument("--oversubscription", type=float, default=1.0)
    parser.add_argument("--flows", type=int, default=4)
    parser.add_argument("--size", type=float, default=1e9)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    try:
        spine = options.hosts * options.port / max(options.spines, 1) / options.oversubscription
        network = LeafSpineNetwork(options.racks, options.hosts, options.ports, options.spines, options.port, spine)
        print(HEAD)
        for job in JOBS:
            for change in CHANGES:
                row = found.setdefault(job, {})[change] = compared(network, job, change, options)
                print(shown(job, change, row), flush=True)
    except NetworkPathError as error:
        parser.error(str(error))
    if options.json:
        given = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": given, "rows": found}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
