"""Expert folding: attention and experts factor eight devices in two ways, and compute what one device computes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from pallas_kernels.ring_attention.layout import LAYOUTS
from sharding.folding import FOLDED, Folding, legal
from tests import environment
from tests.proofs.first_run.parity import compare
from tests.proofs.harness import proof

KINDS = ("mixture", "shared expert", "latent attention")
CELLS = [
    (stages, tuple((axis, n) for axis, n in zip(FOLDED, sizes, strict=True) if n > 1))
    for stages in (1, 2)
    for sizes in itertools.product([1, 2, 4, 8], repeat=len(FOLDED))
    if stages * math.prod(sizes) == 8
]


def _is_refused(stages: int, mesh: tuple[tuple[str, int], ...], folding: Folding) -> bool:
    """Whether runs refuse a folding that fits its mesh: a stage sees its own rows alone."""
    table = folding.table(dict(mesh))
    return stages > 1 and not {"data", "fsdp"}.isdisjoint((*table["experts"], *table["expert_mlp"]))


FOLDINGS = [
    (",".join(f"{axis}={n}" for axis, n in ((("stage", 2), *mesh) if stages > 1 else mesh)), str(folding), kind, rows)
    for stages, mesh in CELLS
    for folding in legal(mesh)
    if (folding.expert, folding.tensor) != (dict(mesh).get("expert", 1), dict(mesh).get("tensor", 1))
    and not _is_refused(stages, mesh, folding)
    for kind in KINDS
    for rows in ("packed", "one document a row")
]
"""All foldings that are not what the mesh has anyway, nor refused."""
DRAWN = [FOLDINGS[i] for i in sorted(np.random.default_rng(0).choice(len(FOLDINGS), 120, replace=False))]


def example_of(mesh: str, folding: str, kind: str, rows: str) -> dict[str, Any]:
    """Rest of a case, from the seed."""
    sizes = {axis: int(n) for axis, _, n in (part.partition("=") for part in mesh.split(","))}
    rng = np.random.default_rng(environment.derive(environment.seed(), mesh, folding, kind, rows))

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    stages = "stage" in sizes
    micro = one(2, 3) if stages else one(1, 2)
    return {
        "preset": mesh,
        "plan": {
            "experts": folding,
            "zero": one(1, 2, 3),
            "sequence": one(False, True),
            "context": "all_gather" if stages else one("ring", "all_gather"),
            "layout": one(*LAYOUTS),
        },
        "model": {
            "heads": 8,
            "kv_heads": 8,
            "head_dim": 4,
            "embed_dim": 16,
            "vocab_size": 16,
            "moe": (8, one(1, 2), 8, False, 8 if kind == "shared expert" else 0),
            "latent": 8 if kind == "latent attention" else 0,
            "remat": one("none", "full"),
        },
        "rows": 8 * micro,
        "seq_len": 16,
        "packed": rows == "packed",
        "accumulate": micro,
        "z_loss": 1e-2,
        "routing": {"balance_loss": 0.1, "z_loss": 0.01},
        "seed": int(rng.integers(2**16)),
    }


@proof(
    "layouts",
    cases=DRAWN,
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "gradient": 1e-10, "curve of 20 steps": 1e-7},
)
def folded_experts_float64(cell: tuple[str, str, str, str]) -> dict[str, float]:
    """Loss, each leaf's gradient, routing losses included, and a 20-step AdamW curve, dropless."""
    loss, gradient, curve = compare(example_of(*cell), "float64", 20)
    return {"loss": loss, "gradient": gradient, "curve of 20 steps": curve}
