"""Held-out loss of SparseLoCo with projected messages in no, half and all replicas: docs/train/slow_replicas.json.

    python -m benchmarks.replicas.slow_replicas [STEPS [SEEDS]]    four replicas of two stages, rank 16 of 64

Every run sees the same batches in the same order. Bytes are those between replicas, see ``outer_losses``; a slow
replica sends a quarter of the others' bytes between its stages.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.replicas.outer_losses import FILE, REPLICAS, compare

PLAIN: dict[str, Any] = {"kind": "sparseloco", "compress": "topk:0.02,int8", "stages": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole messages": PLAIN,
    "two of four slow": PLAIN | {"slow": (2, 3), "stage_rank": 16},
    "all slow": PLAIN | {"slow": (0, 1, 2, 3), "stage_rank": 16},
}
"""Outer steps by name."""


def main(steps: int = 2000, seeds: int = 3) -> None:
    """Compares ``SETTINGS``."""
    compare(SETTINGS, FILE.with_name("slow_replicas.json"), steps, seeds, 2 * REPLICAS)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
