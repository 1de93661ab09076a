"""Stored loss curves, begun again."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.curves import FOLDER, read
from tests.proofs.harness import proof
from tests.recipes.curves import BOUND, differences

STORED = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@proof("front", cases=STORED, sample=1, bound={"loss": BOUND}, costly=True)
def curves(name: str) -> dict[str, float]:
    """The largest difference of the first three losses, nats per token."""
    with tempfile.TemporaryDirectory() as folder:
        return {"loss": max(differences(read(name), 3, Path(folder)))}
