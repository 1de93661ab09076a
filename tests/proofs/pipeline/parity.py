"""Parity of every pipeline schedule, on every mesh of eight devices with stages, with one device."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from jaxllm.parallel.pipeline.schedule_generators import NAMES, default_chunks
from pallas_kernels.ring_attention.layout import LAYOUTS
from tests import environment
from tests.proofs.first_run.parity import compare
from tests.proofs.harness import proof

AXES = ("data", "fsdp", "context", "expert", "ulysses", "tensor")
MESHES = [
    {"stage": stages} | {axis: n for axis, n in zip(AXES, sizes, strict=True) if n > 1}
    for stages in (2, 4, 8)
    for sizes in itertools.product([1, 2, 4], repeat=len(AXES))
    if stages * math.prod(sizes) == 8
]
"""All there are of 2, 4 and 8 stages."""
GROUPED = ("gis", "gis_min")
"""Generalized interleaved schedules, whose programs are those of "interleaved" in another order."""
MATRIX = [
    (",".join(f"{axis}={n}" for axis, n in mesh.items()), schedule, kind)
    for mesh in MESHES
    for schedule in NAMES
    for kind in ("dense", "mixture")
    if kind == "mixture" or "expert" not in mesh
    if schedule not in GROUPED
]
CURVES = {"dense": 1e-8, "mixture": 1e-7}
"""Bounds of 20 steps."""
SANDWICHED = 4
"""Layers whose outputs are normalised too. More of them, with random weights, are chaotic: over 20 steps on one device
a change of 1e-14 grew by 20 in 2 layers, by 4e3 in 4, by 1e6 in 8 and by 9e10 in 16 (pre-norm: by 50 in 8)."""


def example_of(mesh: str, schedule: str, kind: str, micro_batches: int | None = None) -> dict[str, Any]:
    """Rest of a case, from the seed: split of layers and batches, ZeRO stage, remat policy."""
    sizes = {axis: int(n) for axis, _, n in (part.partition("=") for part in mesh.split(","))}
    rng = np.random.default_rng(environment.derive(environment.seed(), mesh, schedule, kind))

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    virtual = sizes["stage"] * default_chunks(schedule)
    depths: tuple[int, ...] = ()
    if one(False, True):
        depths = tuple(int(n) for n in rng.integers(1, 3, virtual))
    # Interleaved micro-batches come in groups of the stages; the others in any number, fewer than stages too.
    micro = micro_batches or (sizes["stage"] if schedule == "interleaved" else one(1, 3, 5, sizes["stage"] + 1))
    layers = sum(depths) or virtual
    rows = sizes.get("data", 1) * sizes.get("fsdp", 1) * sizes.get("expert", 1) * micro
    found: dict[str, Any] = {
        "preset": mesh,
        "plan": {
            "schedule": schedule,
            "depths": depths,
            "offload": one(0.0, 0.5, 1.0),
            "zero": one(1, 2, 3),
            "sequence": one(False, True),
            "context": "all_gather",  # XLA:CPU has no rings inside stages
            "layout": one(*LAYOUTS),
        },
        "model": {
            "heads": 4,
            "kv_heads": one(1, 2, 4),
            "head_dim": 4,
            "embed_dim": 16,
            "mlp": 8,
            "vocab_size": 16,
            "layers": layers,
            "tied": one(False, True),
            "qk_norm": one("none", "head"),
            "bias": one("none", "qkv"),
            "norms": one("pre", "sandwich") if layers <= SANDWICHED else "pre",
            "window": one(None, 5),
            "remat": one("none", "elementwise", "full"),
            "moe": one((4, 1, 8, False), (4, 2, 8, True)) if kind == "mixture" else None,
        },
        "rows": rows,
        "seq_len": 16,
        "packed": one(False, True),
        "accumulate": micro,
        "z_loss": 1e-2,
        "routing": {"balance_loss": 0.1, "z_loss": 0.01} if kind == "mixture" else {},
        "seed": int(rng.integers(2**16)),
    }
    if default_chunks(schedule) > 1 and found["plan"]["offload"]:
        found["plan"]["offload_chunks"] = one("all", "longest")
    return found


CHUNKED = [name for name in NAMES if default_chunks(name) > 1]
"""Schedules of several chunks on a stage."""


@proof(
    "pipeline",
    cases=[(name, mesh) for name in CHUNKED for mesh in ("stage=4,fsdp=2", "stage=2,tensor=2,data=2")],
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "gradient": 1e-10},
)
def longest_lived_chunks_float64(case: tuple[str, str]) -> dict[str, float]:
    """Loss and each leaf's gradient with a third of a stage's layers offloaded, of the longest-lived chunks: whole
    chunks, one of which some layers go, and some that stay."""
    schedule, mesh = case
    example = example_of(mesh, schedule, "dense")
    plan = example["plan"] | {"offload": 0.34, "offload_chunks": "longest", "depths": ()}
    stages = int(mesh[len("stage=")])
    model = example["model"] | {"layers": 3 * stages * default_chunks(schedule), "norms": "pre"}
    loss, gradient, _ = compare(example | {"plan": plan, "model": model}, "float64", 1)
    return {"loss": loss, "gradient": gradient}


@proof(
    "pipeline",
    cases=MATRIX,
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "gradient": 1e-10, **{f"curve of 20 steps, {kind}": b for kind, b in CURVES.items()}},
)
def schedules_float64(cell: tuple[str, str, str]) -> dict[str, float]:
    """Loss, each leaf's gradient and a 20-step AdamW curve, of every schedule on every mesh."""
    return _trained(cell)


@proof(
    "pipeline",
    cases=[
        (mesh, schedule, kind)
        for schedule in GROUPED
        for mesh, kind in (
            ("stage=2,data=4", "dense"),
            ("stage=4,expert=2", "mixture"),
            ("stage=8", "dense"),
            ("stage=2,tensor=2,data=2", "mixture"),
            ("stage=4,fsdp=2", "dense"),
            ("stage=4,context=2", "mixture"),
            ("stage=2,fsdp=2,expert=2", "mixture"),
            ("stage=4,ulysses=2", "dense"),
        )
    ],
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "gradient": 1e-10, **{f"curve of 20 steps, {kind}": b for kind, b in CURVES.items()}},
)
def generalized_interleaving_float64(cell: tuple[str, str, str]) -> dict[str, float]:
    """The same of generalized interleaved schedules, with two groups of micro-batches and a part of one."""
    stages = int(cell[0][len("stage=")])
    return _trained(cell, 2 * stages + 1)


def _trained(cell: tuple[str, str, str], micro_batches: int | None = None) -> dict[str, float]:
    loss, gradient, curve = compare(example_of(*cell, micro_batches), "float64", 20)
    curves = {f"curve of 20 steps, {kind}": curve if kind == cell[2] else 0.0 for kind in CURVES}
    return {"loss": loss, "gradient": gradient, **curves}
