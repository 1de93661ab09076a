"""Every mesh of eight devices over the axes that training has gives what one device gives."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import strategies as st

from pallas_kernels.ring_attention.layout import LAYOUTS
from tests import tiny
from tests.proofs.first_run.parity import compare
from tests.proofs.harness import proof

AXES = ("data", "fsdp", "context", "tensor")
MESHES = [
    dict(zip(AXES, sizes, strict=True))
    for sizes in itertools.product([1, 2, 4, 8], repeat=len(AXES))
    if math.prod(sizes) == 8
]


@st.composite
def runs(draw: st.DrawFn, float32: bool = False) -> dict[str, Any]:
    """A mesh, an architecture that fits it, a layout, and a batch that divides over it."""
    sizes = draw(st.sampled_from(MESHES))
    accumulate = draw(st.sampled_from([1, 2]))
    # Zigzag cuts a row into twice as many parts as there are shards.
    parts = 2 * sizes["context"]
    return {
        "preset": ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "model": draw(tiny.architectures(sizes["tensor"], sizes["fsdp"], float32)),
        "rows": sizes["data"] * sizes["fsdp"] * accumulate * draw(st.integers(1, 2)),
        "seq_len": parts * draw(st.integers(1, max(1, 12 // parts))),
        "packed": draw(st.booleans()),
        "accumulate": accumulate,
        "z_loss": draw(st.sampled_from([0.0, 1e-2])),
        "seed": draw(st.integers(0, 2**16)),
    }


@proof(
    "parallelism",
    count=100,
    sample=2,
    chunk=4,
    float64=True,
    strategy=runs(),
    bound={"loss": 1e-10, "gradient": 1e-10, "curve": 1e-8},
)
def meshes_float64(example: dict[str, Any]) -> dict[str, float]:
    """Loss, each leaf's gradient and a 20-step AdamW curve."""
    loss, gradient, curve = compare(example, "float64", 20)
    return {"loss": loss, "gradient": gradient, "curve": curve}


@proof("parallelism", count=50, sample=2, chunk=4, strategy=runs(float32=True), bound={"loss": 5e-6, "gradient": 5e-6})
def meshes_float32(example: dict[str, Any]) -> dict[str, float]:
    """One step in float32."""
    loss, gradient, _ = compare(example, "float32", 1)
    return {"loss": loss, "gradient": gradient}
