"""`make proof NAME`: the full counts of an issue's proofs. `python -m tests.proofs --help` for the options."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from concurrent.futures import BrokenExecutor

from tests import environment  # first: it sets up JAX

from rich.console import Console  # isort: skip
from rich.markup import escape  # isort: skip

from tests.proofs import covered_code, harness, runner, status, stored  # isort: skip
from tests.proofs.covered_code import Tree  # isort: skip
from tests.proofs.journal import Journal  # isort: skip

STOPPED = 130

PAGES = {
    "real_models": ("tests.hub.models_page", "tests.docs.quoted_figures"),
    "moe_models": ("tests.hub.models_page",),
    "parallelism": ("tests.parallel.page",),
    "kernels": ("tests.kernels.page",),
}
"""Modules that write what pages of documentation have from an issue's record."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs", description=__doc__)
    parser.add_argument("issue", nargs="?", help="which proofs; without it, they are listed")
    parser.add_argument("--seed", type=int, help="default: that of the unfinished run, else that of the code")
    parser.add_argument("--stale", action="store_true", help="only proofs whose code changed since their record")
    parser.add_argument("--status", action="store_true", help="write docs/proof_status.md: which records are current")
    parser.add_argument("--only", metavar="CASE", help="one case of the issue")
    parser.add_argument("--unit", type=int, metavar="I", help="one unit of that case, not recorded: a trial, a chunk")
    parser.add_argument("--examples", type=int, metavar="N", help="size of that chunk, as a failing sample prints it")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="worker processes, default 1")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)

    if options.status:
        path = status.write()
        console.print(f"{path.relative_to(environment.ROOT)}: {path.read_text().split(chr(10) * 2)[2]}")
        return 0
    if options.issue is None and not options.stale:
        for issue in harness.issues():
            for proof in harness.load(issue).values():
                console.print(f"{issue}/{proof.name}: {proof.count} {proof.kind}")
        return 0
    try:
        proofs = harness.load(options.issue) if options.issue is not None else {}
    except harness.ProofError as error:
        parser.error(str(error))
    if options.stale:
        return _renew(options, console)
    if options.only is not None and options.only not in proofs:
        parser.error(f"no case {options.only!r} in {options.issue}: there are {', '.join(proofs)}.")
    if options.unit is not None and options.only is None:
        parser.error("--unit needs --only CASE.")

    if options.unit is not None:
        seed = environment.seed() if options.seed is None else options.seed
        unit = harness.run_unit(proofs[options.only], seed, options.unit, examples=options.examples)
        console.print(escape(unit.failure or f"passed: {unit.run} run, worst {unit.worst}, {unit.seconds:.1f} s"))
        return 1 if unit.failure else 0

    return _run(options.issue, options.seed, options.jobs, console, [options.only] if options.only else list(proofs))


def _renew(options: argparse.Namespace, console: Console) -> int:
    """Runs all stale proofs, or those of one issue, one issue after the other; what is renewed is not run again."""
    stale = {i: names for i, names in status.stale().items() if options.issue in (None, i)}
    for issue, names in stale.items():
        console.print(f"stale: {issue}: {', '.join(names)}")
    if not stale:
        console.print("all records are current")
    results = []
    for issue, names in stale.items():
        results.append(_run(issue, options.seed, options.jobs, console, names))
        if results[-1] == STOPPED:
            return STOPPED
    return max(results, default=0)


def _run(issue: str, seed: int | None, jobs: int, console: Console, names: list[str]) -> int:
    """Runs what the named proofs of an issue lack, and stores those that are complete."""
    proofs = harness.load(issue)
    journal = Journal.open(issue, seed)
    os.environ["JAXLLM_SEED"] = str(journal.seed)  # for the workers
    cases = {name: runner.Case(p, [u for u in journal.units if u.case == name]) for name, p in proofs.items()}
    state = "going on" if journal.resumed else "starting"
    dirty = " with uncommitted changes" if journal.origin.dirty else ""
    console.print(f"{state}: {issue}, seed {journal.seed}, commit {journal.origin.commit[:12]}{dirty}")
    chosen = [case for name, case in cases.items() if name in names]
    tree = Tree.here()
    covers = {name: tree.covers(proof.module) for name, proof in proofs.items()}
    covered_code.keep()
    failures = 0

    def failed(unit: harness.Unit) -> None:
        nonlocal failures
        failures += 1
        console.print(escape(unit.failure or ""), style="red")
        console.print(f"FAILED: {issue}/{unit.case}, unit {unit.index}, seed {journal.seed}. To see it again:")
        console.print(f"  make proof {issue} SEED={journal.seed} ONLY={unit.case} UNIT={unit.index}")

    def completed(case: runner.Case) -> None:
        path = stored.write(issue, case.record(journal.origin, journal.seed, covers[case.proof.name]), proofs)
        console.print(
            f"passed: {case.proof.name}, {case.run} of {case.proof.count}, {case.seconds:.0f} s, {case.worst}; "
            f"stored in {path.relative_to(environment.ROOT)}"
        )
        for page in PAGES.get(issue, ()):
            importlib.import_module(page).write()

    try:
        runner.run(chosen, journal, jobs, console, failed=failed, completed=completed)
    except harness.ProofError as error:
        console.print(escape(str(error)), style="red")
        return 1
    except BrokenExecutor:
        console.print("a worker process died (out of memory?); the same command goes on from here", style="red")
        return 1
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here while the code stays the same")
        return STOPPED
    if failures:
        console.print(f"{failures} failed, see above", style="red")
        return 1
    if all(case.complete for case in cases.values()):
        journal.finish()
    if lacks := stored.shortcomings(stored.read(issue), proofs):
        console.print("the record still lacks:\n  " + "\n  ".join(map(escape, lacks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
