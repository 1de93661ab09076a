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
    reads = re.compile(r"^from tests\.proofs import .*\bstored\b|^(import|from) tests\.proofs\.stored\b", re.MULTILINE)
    makers = {
        ".".join(path.relative_to(environment.ROOT).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if not path.is_relative_to(folder / "proofs")
        and not path.name.startswith("test_")
        and reads.search(path.read_text())
    }
    assert makers == {module for modules in PAGES.values() for module in modules}
    assert all(callable(importlib.import_module(module).write) for module in makers)
