"""Goodput of a large run whose hosts fail, with all mechanisms of recovery, and without each: a simulation.

    python -m benchmarks.replicas.failures [--devices 10000] [--rate 4.7e-4] [--hangs 0.1] [--repair 12] [--spares 12]
        [--days 365] [--histories 8] [--json FILE]

``--rate`` is failures of a device in a day: 4.7e-4 are the 419 unplanned interruptions of 54 days on 16,384 GPUs
(Llama 3, arXiv:2407.21783, table 5). ``--hangs`` is the share that ends no process, ``--repair`` the mean hours until a
host returns. ``jaxllm.simulate.training_failures`` says what is simulated; docs/train/failures.md shows the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.simulate.training_failures import DAY, FailingCluster, FailingRun, Recovery, TimeSpent

PER_HOST = 8
STEP = 10.0


@dataclass(frozen=True)
class Mechanisms:
    """Mechanisms of recovery that a run has."""

    naming: bool = True
    memory: bool = True
    restart: bool = True
    elastic: bool = True
    spares: bool = True

    def recovery(self) -> Recovery:
        """Times of a recovery, see docs/train/failures.md."""
        return Recovery(
            every=STEP if self.memory else 1800.0,
            save=0.02 * STEP if self.memory else 10.0,
            crash=1.0 if self.naming else 60.0,
            hang=max(5.0, 3 * STEP) if self.naming else 1800.0,
            restart=60.0 if self.restart else 900.0,
            elastic=self.elastic,
            rejoin=(60.0 if self.restart else 900.0) + STEP,
        )


NOTHING = Mechanisms(False, False, False, False, False)
ROWS = {
    "none: a disk, timeouts, whole restarts": NOTHING,
    "spare hosts alone": dataclasses.replace(NOTHING, spares=True),
    "all": Mechanisms(),
    "all but failures named at once": Mechanisms(naming=False),
    "all but snapshots in memory": Mechanisms(memory=False),
    "all but quick restarts": Mechanisms(restart=False),
    "all but going on with fewer hosts": Mechanisms(elastic=False),
    "all but spare hosts": Mechanisms(spares=False),
}
"""Sets of mechanisms by name."""


def simulated(mechanisms: Mechanisms, options: argparse.Namespace) -> dict[str, float]:
    """Goodput of a set of mechanisms, its spread over histories, and shares of the time by what became of it."""
    cluster = FailingCluster(
        hosts=options.devices // PER_HOST,
        failures=PER_HOST * options.rate / DAY,
        hangs=options.hangs,
        repair=3600.0 * options.repair,
        spares=options.spares if mechanisms.spares else 0,
    )
    spent, found = TimeSpent(), list[float]()
    for seed in range(options.histories):
        one = FailingRun(cluster, mechanisms.recovery(), seed).run(options.days * DAY)
        found.append(one.goodput)
        for field in dataclasses.fields(TimeSpent):
            setattr(spent, field.name, getattr(spent, field.name) + getattr(one, field.name))
    shares = {field.name: getattr(spent, field.name) / spent.total for field in dataclasses.fields(TimeSpent)}
    return {"goodput": spent.goodput, "least": min(found), "most": max(found), **shares}


def shown(name: str, row: dict[str, float]) -> str:
    """Row of the table."""
    lost = " | ".join(
        f"{100 * row[x]:.2f}" for x in ("repeated", "saving", "noticing", "restarting", "waiting", "missing")
    )
    return f"| {name} | {100 * row['goodput']:.2f} ({100 * row['least']:.2f}-{100 * row['most']:.2f}) | {lost} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10000)
    parser.add_argument("--rate", type=float, default=4.7e-4)
    parser.add_argument("--hangs", type=float, default=0.1)
    parser.add_argument("--repair", type=float, default=12.0)
    parser.add_argument("--spares", type=int, default=12)
    parser.add_argument("--days", type=float, default=365.0)
    parser.add_argument("--histories", type=int, default=8)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    print("| mechanisms | goodput, % | repeated | saving | noticing | restarting | waiting | missing |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, mechanisms in ROWS.items():
        found[name] = simulated(mechanisms, options)
        print(shown(name, found[name]), flush=True)
    if options.json:
        given = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": given, "rows": found}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
