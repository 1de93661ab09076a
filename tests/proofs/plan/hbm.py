"""HBM by formula beside programs compiled now: thirty runs on TPU slices and GPU nodes."""

from __future__ import annotations

from tests.proofs.harness import proof
from tests.proofs.plan.points import POINTS, compile_point, predicted, stored

QUICK = ("8b elementwise h100", "8b zero2 h200", "llama3_8b h100:8x8", "8b accumulate h100", "8b data h100")
"""Compiled in about a minute each; a test run compiles one of them."""


@proof("plan", cases=tuple(POINTS), sample=1, quick=QUICK, bound={"arguments": 1e-3, "total": 0.10, "stored": 0.02})
def hbm(name: str) -> dict[str, float]:
    """A whole step compiled now: predicted over compiled, and compiled over stored, less one.

    tests/plan holds the median to 5%.
    """
    report, found = compile_point(name), predicted(name)
    return {
        "arguments": abs(found.arguments / report.argument_bytes - 1),
        "total": abs(found.total / report.total_bytes - 1),
        "stored": abs(report.total_bytes / stored()[name].total - 1),
    }
