"""Stored proof records agree with the registered proofs: one for each, full counts, errors within bounds."""

from __future__ import annotations

from tests.proofs import harness, stored


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
