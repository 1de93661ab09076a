"""Losses of SmolLM2 in formats, on four texts: held-out plays, source code, reference text, pages of documentation."""

from __future__ import annotations

from benchmarks.serving.quantised_losses import measure
from tests.proofs.harness import proof

LIMITS = {
    "int8:rtn": (0.003, 3), "fp8:rtn": (0.015, 3), "llm_int8:rtn": (0.015, 3), "w8a8:rtn": (0.02, 3),
    "int4_g64:gptq_act_order": (0.04, 12), "int4_g64:gptq_learned_scales": (0.04, 12),
}  # fmt: skip
"""FORMAT:METHOD -> relative rise of the loss that is allowed on every text, and rows of calibration text."""


@proof("quant", cases=list(LIMITS), quick=["int8:rtn"], sample=1, bound=1.0)
def losses_of_smollm2(cell: str) -> float:
    """The largest rise over its limit."""
    limit, rows = LIMITS[cell]
    (found,) = measure("smollm2", [cell], rows, 4, 256)
    return max(found.rises.values()) / limit
