"""Decode programs of packed weights for absent devices: what they hold is planned, what they move is packed."""

from __future__ import annotations

from benchmarks import engine_bytes
from sharding.isolate import run_isolated
from tests.proofs.harness import proof

FORMATS = ("int4", "int8", "lut4", "mxfp4", "nf4", "lut3", "w4a8", "llm_int8")
CELLS = [
    *[("v6e:1x1", form, "apart", 1) for form in FORMATS],
    *[("v6e:1x1", form, "stacked", 1) for form in ("int4", "w8a8")],
    *[("h100:1x1", form, "apart", 1) for form in (*FORMATS, "w8a8")],
    *[(device, "int4", "apart", 16) for device in ("v6e:1x1", "h100:1x1")],
]  # fmt: skip
"""(topology, format, layers, batch): every format on both devices. In the other layout some move more, see
docs/serve/quantise.md: unstacked layers of w8a8 and stacked ones of int8 on TPUs, stacked layers on GPUs."""
OTHERS = [("v6e:1x1", "int8"), ("h100:1x1", "nf4")]


def compiled(topology: str, weights: str, batch: int, layers: str) -> dict[str, float]:
    """The decode program of Llama-3-8B for one device, with 1,024 tokens of context: its bytes."""
    given = {"batch": batch, "context": 1024, "layers": layers, "weights": weights}
    return run_isolated(f"{engine_bytes.__name__}:compiled", topology, given)


@proof("quant", cases=CELLS, sample=1, bound={"arguments": 0.01, "moved": 1.05})
def decode_programs_move_packed_bytes(cell: tuple[str, str, str, int]) -> dict[str, float]:
    """Bytes of arguments over the plan's, less 1; bytes that a step moves over those of packed weights and cache.

    A call's work before its first step counts by an eighth: it has up to eight steps.
    """
    topology, weights, layers, batch = cell
    found = compiled(topology, weights, batch, layers)
    # Those of paged attention, one a layer, whose traffic is the cache.
    assert found["kernels"] == 32
    assert found["data_loops"] == 0
    return {
        "arguments": abs(found["arguments"] / found["planned"] - 1),
        "moved": (found["moved"] + found["before"] / 8) / (found["weights"] + found["cache"]),
    }


@proof("quant", cases=OTHERS, sample=1, bound=0.01)
def arguments_of_decode_programs_are_planned(cell: tuple[str, str]) -> float:
    """Bytes of arguments over the plan's, less 1, where steps move more than 1.05 of the packed bytes."""
    found = compiled(*cell, batch=1, layers="stacked")
    return abs(found["arguments"] / found["planned"] - 1)
