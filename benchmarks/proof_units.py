"""Numbers of proof units drawn at random, so that two commits can be compared.

    python -m benchmarks.proof_units write FILE --count 20 --seed 7     runs the units and writes their worst errors
    python -m benchmarks.proof_units write NEW --like OLD               runs the units that OLD has
    python -m benchmarks.proof_units compare OLD NEW                    exit status 1 where a number differs

The draw depends on the seed and on the names of the proofs alone. Proofs that are marked costly, and those without an
error to compare, are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from tests import environment  # first: it sets up JAX
from tests.proofs import harness


def drawn(count: int, seed: int) -> list[tuple[harness.Proof, int]]:
    """Proofs with the index of one unit of each."""
    proofs = [proof for issue in harness.issues() for proof in harness.load(issue).values()]
    legal = sorted((p for p in proofs if p.bounds and not p.costly), key=lambda p: (p.issue, p.name))
    draw = random.Random(environment.derive(seed, "units"))
    chosen = draw.sample(legal, count)
    return [(p, draw.randrange(p.count if p.strategy is None else 1)) for p in chosen]


def named(old: Path) -> list[tuple[harness.Proof, int]]:
    """The proofs and units of a file that was written."""
    names = [name.split("/") for name in json.loads(old.read_text()) if name != "commit"]
    return [(harness.load(issue)[proof], int(index)) for issue, proof, index in names]


def write(file: Path, units: list[tuple[harness.Proof, int]], seed: int) -> None:
    """Runs the units, one after the other; a unit that is in the file already is not run again."""
    found = json.loads(file.read_text()) if file.exists() else {"commit": environment.git("rev-parse", "HEAD")}
    for proof, index in units:
        name = f"{proof.issue}/{proof.name}/{index}"
        if name in found:
            continue
        unit = harness.run_unit(proof, seed, index, examples=proof.sample)
        found[name] = {"worst": unit.worst, "run": unit.run, "failure": unit.failure}
        file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {unit.run} run in {unit.seconds:.0f} s, {unit.failure or unit.worst}", flush=True)


def compare(old: Path, new: Path) -> int:
    """Prints the units with their numbers; returns how many differ."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    differ = 0
    for name in sorted((before.keys() | after.keys()) - {"commit"}):
        equal = before.get(name) == after.get(name)
        differ += not equal
        print(f"{'equal' if equal else 'DIFFERENT'}  {name}  {before.get(name)} {'' if equal else after.get(name)}")
    print(f"{before['commit'][:12]} and {after['commit'][:12]}: {differ} of {len(before) - 1} units differ")
    return differ


def main() -> int:
    """Entry point of ``python -m benchmarks.proof_units``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("file", type=Path)
    writing.add_argument("--count", type=int, default=20)
    writing.add_argument("--seed", type=int, default=7)
    writing.add_argument("--like", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args()
    if options.command == "write":
        units = named(options.like) if options.like else drawn(options.count, options.seed)
        write(options.file, units, options.seed)
        return 0
    return int(compare(options.old, options.new) > 0)


if __name__ == "__main__":
    sys.exit(main())
