"""Stored records, docs/proofs/<issue>.json: the last complete run of each proof, and when a record is insufficient.

Each proof has its own commit, seed and versions, so that one can run again without the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tests import environment
from tests.proofs.harness import Errors, Proof

FOLDER = environment.ROOT / "docs" / "proofs"


def flat(errors: Errors) -> float | Errors | None:
    """One error as a number, several by name, none as null."""
    return None if not errors else errors["error"] if set(errors) == {"error"} else errors


def read(issue: str, folder: Path | None = None) -> dict[str, Any]:
    """The record of an issue, empty before its first."""
    path = (folder or FOLDER) / f"{issue}.json"
    return json.loads(path.read_text()) if path.exists() else {"proof": issue, "cases": []}


def write(issue: str, case: Mapping[str, Any], registered: Collection[str], folder: Path | None = None) -> Path:
    """Puts one proof's record in the place of its last one, and drops proofs no longer registered."""
    folder = folder or FOLDER
    cases = {known["name"]: known for known in read(issue, folder)["cases"]} | {case["name"]: case}
    record = {"proof": issue, "cases": [cases[name] for name in sorted(cases) if name in registered]}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{issue}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(part, path)
    return path


def shortcomings(record: Mapping[str, Any], proofs: Mapping[str, Proof]) -> list[str]:
    """Why a stored record does not prove what is registered now; empty if it does."""
    cases = {case["name"]: case for case in record["cases"]}
    found = [f"{name}: is registered, but has no stored result" for name in sorted(set(proofs) - set(cases))]
    found += [f"{name}: is stored, but no longer registered" for name in sorted(set(cases) - set(proofs))]
    for name, proof in proofs.items():
        if name not in cases:
            continue
        case = cases[name]
        if case["run"] < proof.count or case["asked"] < proof.count:
            found.append(f"{name}: {case['run']} of {case['asked']} asked were run, {proof.count} are registered")
        worst = case["worst_error"]
        errors = {} if worst is None else worst if isinstance(worst, dict) else {"error": worst}
        if set(errors) != set(proof.bounds):
            found.append(f"{name}: errors {sorted(errors)} are stored, bounds {sorted(proof.bounds)} registered")
        for measure, bound in proof.bounds.items():
            if not errors.get(measure, 0.0) <= bound:
                found.append(f"{name}: {measure} {errors[measure]:.3g} exceeds its bound {bound:.3g}")
    return found
