"""2D tensor parallelism: features over one mesh axis, heads and width over another, against one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train.compile_step import compile_for
from pallas_kernels.ring_attention.layout import LAYOUTS
from sharding import MeshSpec
from tests import environment
from tests.proofs.first_run.parity import compare
from tests.proofs.harness import proof
from tests.proofs.parallelism.traffic import GPUS, TPUS, difference, run_of

KINDS = ("dense", "grouped queries", "biases and norms", "mixture", "shared expert", "latent attention")
MESHES = (
    ("tensor=8", "2x4"),
    ("tensor=8", "4x2"),
    *((f"{axis}=2,tensor=4", "2d") for axis in ("data", "fsdp", "context", "expert", "ulysses", "local")),
)
CELLS = [(mesh, tensor, kind, rows) for mesh, tensor in MESHES for kind in KINDS for rows in ("packed", "whole rows")]
DRAWN = [CELLS[i] for i in sorted(np.random.default_rng(35).choice(len(CELLS), 24, replace=False))]
STEPS = 5


def example_of(mesh: str, tensor: str, kind: str, rows: str) -> dict[str, Any]:
    """Rest of a case, from the seed."""
    rng = np.random.default_rng(environment.derive(environment.seed(), mesh, tensor, kind, rows))

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    micro = one(1, 2)
    plain = kind == "biases and norms"
    experts = kind in ("mixture", "shared expert")
    return {
        "preset": str(ParallelConfig(tensor=tensor).factored(MeshSpec.parse(mesh))),
        "plan": {
            "zero": one(1, 2, 3),
            "sequence": one(False, True),
            "context": one("ring", "all_gather"),
            "layout": one(*LAYOUTS),
        },
        "model": {
            "heads": 8,
            "kv_heads": one(2, 4) if kind == "grouped queries" else 8,
            "head_dim": 4,
            "embed_dim": 16,
            "vocab_size": 16,
            "mlp": 32,
            "moe": (8, one(1, 2), 8, False, 8 if kind == "shared expert" else 0) if experts else None,
            "latent": 8 if kind == "latent attention" else 0,
            "bias": "all" if plain else "none",
            "qk_norm": one("head", "all") if plain else "none",
            "norm": one("layer", "rms_plus_one") if plain else "rms",
            "norms": one("post", "sandwich") if plain else "pre",
            "tied": one(False, True),
            "remat": one("none", "elementwise", "full"),
        },
        "rows": 8 * micro,
        "seq_len": 16,
        "packed": rows == "packed",
        "accumulate": micro,
        "z_loss": 1e-2,
        "routing": {"balance_loss": 0.1, "z_loss": 0.01} if experts else {},
        "seed": int(rng.integers(2**16)),
    }


@proof(
    "layouts", cases=DRAWN, sample=1, float64=True, bound={"loss": 1e-10, "gradient": 1e-10, "curve of 5 steps": 1e-10}
)
def two_tensor_axes_float64(cell: tuple[str, str, str, str]) -> dict[str, float]:
    """Loss, each leaf's gradient, routing losses included, and a 5-step AdamW curve."""
    example = example_of(*cell)
    mesh, rules = MeshSpec.parse(example["preset"]).abstract(), ParallelConfig(**example["plan"]).rules()
    assert "features" in str(rules.spec(("embed", "mlp"), mesh, gathered=True))
    assert "features" in str(rules.spec(("batch", "residual_seq", "act_embed"), mesh))
    loss, gradient, curve = compare(example, "float64", STEPS)
    return {"loss": loss, "gradient": gradient, "curve of 5 steps": curve}


PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    "2 x 4": ("tensor=8", {"tensor": "2d"}, 1),
    "4 x 2, sequence": ("tensor=8", {"tensor": "4x2", "sequence": True}, 1),
    "ZeRO-3": ("fsdp=2,tensor=4", {"tensor": "2d"}, 1),
    "ZeRO-3, sequence": ("fsdp=2,tensor=4", {"tensor": "2d", "sequence": True}, 1),
    "data, ZeRO-1, two micro-batches": ("data=2,tensor=4", {"tensor": "2d", "zero": 1}, 2),
    "ZeRO-2, sequence, two micro-batches": ("fsdp=2,tensor=4", {"tensor": "2d", "zero": 2, "sequence": True}, 2),
}


@proof("layouts", cases=[(name, on) for on in (GPUS, TPUS) for name in PLANS], sample=1, bound=1e-4)
def two_tensor_axes_traffic(case: tuple[str, str]) -> float:
    """Bytes of each kind over each number of devices in a compiled step, beside the formula's."""
    name, on = case
    mesh, plan, accumulate = PLANS[name]
    run = run_of("tensor")
    data = dataclasses.replace(run.data, batch_size=8 * accumulate)
    run = dataclasses.replace(
        run, name=name, mesh=mesh, parallel=ParallelConfig(**plan), accumulate=accumulate, data=data
    )
    return difference(run, compile_for(run, on))
