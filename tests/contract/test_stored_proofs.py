"""Stored proof records agree with the registered proofs: one for each, full counts, errors within bounds."""

from __future__ import annotations

import importlib
import re

from tests import environment
from tests.proofs import harness, stored
from tests.proofs.__main__ import PAGES


def test_stored_proofs_are_complete():
    issues = {path.stem for path in stored.FOLDER.glob("*.json")} | set(harness.issues())
    found = []
    for issue in sorted(issues):
        if issue not in harness.issues():
            found.append(f"{issue}.json: no proofs of that name in tests/proofs")
            continue
        record = stored.read(issue)
        assert record["proof"] == issue
        found += [f"{lack} (make proof {issue})" for lack in stored.shortcomings(record, harness.load(issue))]
    assert not found, "\n" + "\n".join(found)


def test_what_is_made_of_a_record_is_written_with_it():
    folder = environment.ROOT / "tests"
    makers = {
        ".".join(path.relative_to(environment.ROOT).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if path.parent.name != "proofs" and re.search(r"^def write\(\)", path.read_text(), re.MULTILINE)
    }
    written = {module for modules in PAGES.values() for module in modules}
    of_records = {module for module in makers if hasattr(importlib.import_module(module), "stored")}
    assert of_records == written
