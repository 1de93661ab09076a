"""docs/proof_status.md: whether each stored record still covers the current code.

A record is current if its digest of covered code is that of the working tree. Else it is stale: since the first commit
after its own with another digest, or because it was made of code that no commit has. Stale is no failure: the claim was
true of that code, and samples of it run before others. `make proof STALE=1` renews what is stale.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import environment
from tests.proofs import covered_code, harness, stored
from tests.proofs.covered_code import Tree
from tests.proofs.harness import Proof

HEADER = """# Which records are current

Written by `make proof STATUS=1`; not by hand. A record of [what is proven](proofs.md) counts for the code that it ran:
the module of its trial and what that imports of this repository, without docstrings and comments. It is current while
that code is the same, and else stale since the first commit that changed it; `make proof STALE=1` renews what is stale.

"""
TABLE = """| record | of | run | state |
|---|---|---|---|
"""
CURRENT = "current"
MISSING = "not stored"


def is_current(record: Mapping[str, Any] | None, covers: str) -> bool:
    """Whether a record was made by the code that its proof covers now, whose digest is `covers`."""
    return record is not None and not record["dirty"] and record.get("covers") == covers


def state(record: Mapping[str, Any] | None, proof: Proof, here: Tree) -> str:
    """One line: current; or stale, and since when."""
    if record is None:
        return MISSING
    if record["dirty"]:
        return "stale: made of code that was not committed"
    if is_current(record, here.covers(proof.module)):
        return CURRENT
    try:
        changed = next(_changes(record, proof.module), None)
    except LookupError:
        return f"stale: its commit {record['commit'][:8]} is not in this repository's history"
    return f"stale since {changed[:8]}" if changed else "stale: changed, but not committed"


def _changes(record: Mapping[str, Any], module: str) -> Iterator[str]:
    """Commits after a record's that give other covered code than it has."""
    history = _history()
    before = _tree(record["commit"]).covered(module)
    for commit, files in list(history.items())[_since(record["commit"], list(history)) :]:
        # Only a covered file can import another one; a new file may fit a pattern or be what an import had meant.
        if files & before or not before:
            if _tree(commit).covers(module) != record.get("covers"):
                yield commit
            before = before | _tree(commit).covered(module)


def _since(commit: str, history: Sequence[str]) -> int:
    """The index in `history` of what follows a commit: the next one, or the merge that brought it from a branch."""
    if commit in history:
        return history.index(commit) + 1
    if environment.git("cat-file", "-t", commit) != "commit":
        raise LookupError(commit)

    def has_it(later: str) -> bool:
        return not environment.git("rev-list", "-1", commit, "--not", later)

    first = bisect.bisect(history, False, key=has_it)
    if first == len(history):
        raise LookupError(commit)
    return first


@functools.cache
def _history() -> dict[str, frozenset[str]]:
    """Commits up to this one, oldest first, with the files that each changed."""
    text = environment.git("log", "--reverse", "--first-parent", "-m", "--name-only", "--format=%x00%H")
    entries = (entry.split("\n") for entry in text.split("\0") if entry.strip())
    return {commit: frozenset(filter(None, files)) for commit, *files in entries}


@functools.cache
def _tree(commit: str) -> Tree:
    return Tree.at(commit)


def page(states: Mapping[str, Mapping[str, tuple[Mapping[str, Any] | None, str]]]) -> str:
    """The page's text. `states`: issue -> proof -> its record and state."""
    every = [line for proofs in states.values() for _, line in proofs.values()]
    text = HEADER + f"{every.count(CURRENT)} of {len(every)} are current.\n"
    for issue, proofs in states.items():
        text += f"\n## {issue}\n\n{TABLE}"
        for name, (record, line) in proofs.items():
            made = ("", "") if record is None else (record["finished"][:10], f"`{record['commit'][:8]}`")
            text += f"| `{name}` | {' '.join(made).strip()} | {'' if record is None else record['run']} | {line} |\n"
    return text


def stale() -> dict[str, list[str]]:
    """Proofs without a current record, by issue."""
    here = Tree.here()
    found = {}
    for issue in harness.issues():
        records = {case["name"]: case for case in stored.read(issue)["cases"]}
        proofs = harness.load(issue)
        found[issue] = [n for n, p in proofs.items() if not is_current(records.get(n), here.covers(p.module))]
    covered_code.keep()
    return {issue: names for issue, names in found.items() if names}


def write() -> Path:
    """Renews the page."""
    here = Tree.here()
    states = {}
    for issue in harness.issues():
        records = {case["name"]: case for case in stored.read(issue)["cases"]}
        proofs = harness.load(issue)
        states[issue] = {n: (records.get(n), state(records.get(n), p, here)) for n, p in sorted(proofs.items())}
    covered_code.keep()
    path = stored.FOLDER.parent / "proof_status.md"
    part = path.with_suffix(".part")
    part.write_text(page(states))
    os.replace(part, path)
    return path
