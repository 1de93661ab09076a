"""Losses of SmolLM2 in formats, on four texts: held-out plays, source code, reference text, pages of documentation."""

from __future__ import annotations

from benchmarks.serving.quantised_losses import measure
from tests.proofs.harness import proof

LIMITS = {"int8:rtn": 0.003, "fp8:rtn": 0.015, "llm_int8:rtn": 0.015, "w8a8:rtn": 0.02}
"""FORMAT:METHOD -> relative rise of the loss that is allowed on every text."""


@proof("quant", cases=list(LIMITS), quick=["int8:rtn"], sample=1, bound=1.0)
def losses_of_smollm2(cell: str) -> float:
    """The largest rise over its limit."""
    (found,) = measure("smollm2", [cell], 3, 4, 256)
    return max(found.rises.values()) / LIMITS[cell]
