"""Uneven optimizer state in several processes: four of two devices each train what one process does of even shards."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.proofs.harness import proof
from tests.proofs.parallelism.processes import finish

CASES = (
    ("data=4,tensor=2", "--parallel.state-shares 3 3 1 1"),
    ("data=2,fsdp=2,tensor=2", "--parallel.zero 1 --parallel.state-shares 5 2 1 1 --parallel.micro-batches 2 3 1 2"),
)


@proof(
    "layouts", cases=CASES, sample=1, float64=True, parallel=False, bound={"curve": 1e-10, "parameters": 1e-10}
)  # fmt: skip
def processes_of_uneven_state(case: tuple[str, str]) -> dict[str, float]:
    """Processes that hold different shares of the optimizer state, which save it together: one process's curve."""
    mesh, options = case
    more = ("--accumulate", "2") if "micro-batches" in options else ()
    with tempfile.TemporaryDirectory() as folder:
        return finish(Path(folder), mesh, (*more, *options.split()))
