"""Uneven rows in several processes: four of two devices each train what one process does of equal rows."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.proofs.harness import proof
from tests.proofs.parallelism.processes import finish

CASES = (
    ("data=2,fsdp=2,tensor=2", "--parallel.micro-batches 3 1"),
    ("data=2,fsdp=2,tensor=2", "--parallel.zero 1 --parallel.micro-batches 2 3 1 2"),
)


@proof(
    "layouts", cases=CASES, sample=1, float64=True, parallel=False, bound={"curve": 1e-10, "parameters": 1e-10}
)  # fmt: skip
def processes_of_uneven_rows(case: tuple[str, str]) -> dict[str, float]:
    """Processes with different numbers of micro-batches: the curve of one process whose rows are all split alike."""
    mesh, options = case
    with tempfile.TemporaryDirectory() as folder:
        return finish(Path(folder), mesh, ("--accumulate", "2", *options.split()))
