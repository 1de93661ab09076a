"""Seconds of a step of peers with unequal bandwidths, by planned roles, an all-reduce and a server: a simulation.

    python -m benchmarks.replicas.averaging_roles [--size 72e6] [--batch 4096] [--json FILE]
    python -m benchmarks.replicas.averaging_roles --peers 8x1000/1000/20 16x20/100/5 4x20/100/5/client

``--size`` is bytes of the gradients, ``--batch`` the global batch in rows. ``--peers`` are your own, as
``[COUNTx]UPLOAD/DOWNLOAD/ROWS[/client]`` with megabits per second and rows per second; ROWS 0 is a peer that only
averages, and others cannot reach a client. Its plan is printed peer by peer. ``jaxllm.train.outer.averaging_roles``
says what is computed; docs/train/low_communication.md shows the table.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.train.outer.averaging_roles import (
    AveragingPeer,
    averaging_roles,
    averaging_seconds,
    averaging_shares,
    uniform_shares,
)

MEGABIT = 1e6 / 8
PEERS = {
    "16 alike": ["16x200/200/10"],
    "8 servers, 8 workstations": ["8x1000/1000/20", "8x200/200/10"],
    "2 servers, 14 homes": ["2x1000/1000/20", "14x20/100/10"],
    "homes, 8 of 16 behind firewalls": ["8x20/100/10", "8x20/100/10/client"],
    "15 workstations, a server without GPU": ["15x100/100/10", "1x2500/2500/0"],
}
"""Groups of peers by name."""


def peers_of(groups: Sequence[str]) -> list[AveragingPeer]:
    """Peers of groups as ``--peers`` has them.

    Raises:
        ValueError: a group is not written as it should be, or a number of it cannot be.
    """
    found = []
    for group in groups:
        match = re.fullmatch(r"(?:(\d+)x)?([\d.e+]+)/([\d.e+]+)/([\d.e+]+)(/client)?", group)
        if not match:
            raise ValueError(f"--peers {group}: give [COUNTx]UPLOAD/DOWNLOAD/ROWS[/client], such as 8x20/100/5.")
        count, upload, download, rows, client = match.groups()
        peer = AveragingPeer(MEGABIT * float(upload), MEGABIT * float(download), float(rows), client is None)
        found += int(count or 1) * [peer]
    return found


def compared(peers: list[AveragingPeer], size: float, batch: int) -> dict[str, float]:
    """Seconds of averaging by an all-reduce, the best parameter server and the plan, and of a step with the roles."""
    servers = [
        averaging_seconds(peers, [float(other == one) for other in range(len(peers))], size)
        for one, peer in enumerate(peers)
        if peer.reachable
    ]
    plan = averaging_roles(peers, size, batch)
    return {
        "all_reduce": averaging_seconds(peers, uniform_shares(peers), size),
        "server": min(servers),
        "planned": averaging_seconds(peers, averaging_shares(peers, size), size),
        "computing": batch / sum(peer.rows for peer in peers),
        "step": plan.seconds,
        "compute": sum(plan.computes),
        "peers": len(peers),
    }


def shown(name: str, row: dict[str, float]) -> str:
    """Row of the table."""
    return (
        f"| {name} | {row['all_reduce']:.1f} | {row['server']:.1f} | {row['planned']:.1f} | "
        f"{row['all_reduce'] / row['planned']:.2f} | {row['computing']:.1f} | {row['step']:.1f} | "
        f"{row['compute']:.0f} of {row['peers']:.0f} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=72e6)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--peers", nargs="+", help="your own peers")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    try:
        groups = {
            name: peers_of(own) for name, own in ({"your own": options.peers} if options.peers else PEERS).items()
        }
    except ValueError as error:
        parser.error(str(error))
    print("| peers | all-reduce, s | parameter server | planned | gain | computing | step | compute |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    found: dict[str, Any] = {}
    for name, peers in groups.items():
        found[name] = compared(peers, options.size, options.batch)
        print(shown(name, found[name]), flush=True)
    if options.peers:
        plan = averaging_roles(groups["your own"], options.size, options.batch)
        print("\n| peer | computes | share |\n|---:|---|---:|")
        for number, (computes, share) in enumerate(zip(plan.computes, plan.shares, strict=True)):
            print(f"| {number} | {'yes' if computes else 'no'} | {share:.4f} |")
    if options.json:
        given = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": given, "rows": found}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
