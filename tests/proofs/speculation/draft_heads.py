"""Draft heads: what dynamic gating fusion learns beside a linear map of both, on a tiny model."""

from __future__ import annotations

import numpy as np

from jaxllm.infer.speculate.draft_head import FUSIONS
from tests.infer.drafts import learned_head
from tests.proofs.harness import proof

STEPS, LAST = 300, 50
"""Steps of training on random text, and the last of them that are measured: text that the head has not seen."""
COUNTS = tuple(f"{what} of {name}" for name in FUSIONS for what in ("loss", "right"))


@proof("speculation", count=3, sample=1, counts=COUNTS)
def gated_beside_concat(seed: int) -> dict[str, float]:
    """Loss and acceptance of the first drafted token, as measured; both learn, and neither is far from the other."""
    found = {}
    for name in FUSIONS:
        _, metrics = learned_head(name, STEPS, seed)
        for what in ("loss", "right"):
            found[f"{what} of {name}"] = float(np.mean([one[what] for one in metrics[-LAST:]]))
        assert found[f"right of {name}"] > 2 * metrics[0]["right"]
    assert abs(found["right of gated"] - found["right of concat"]) < 0.05
    return found
