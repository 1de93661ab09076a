"""Program walker and live ranges on programs of real compilers, against counts by hand and the compilers' sizes."""

from __future__ import annotations

from sharding.isolate import run_isolated
from tests.proofs.harness import proof

LAYERS, WIDTH, ROWS = 6, 2048, 2048
GPUS = ("h100:1x8", "h200:1x8", "b200:1x8")
TPUS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")


def counted(topology: str) -> dict:
    """A scanned stack with recomputation, whose counts are known; asserts those that hold everywhere."""
    sizes = {"layers": LAYERS, "width": WIDTH, "rows": ROWS}
    found = run_isolated("tests.compiler.programs:walked", topology, sizes)
    # Two products forward; again the first alone, since gradients do not need what the last one gives; four backward.
    product = 2 * ROWS * WIDTH * 4 * WIDTH
    assert found["flops"] == LAYERS * (2 + 1 + 4) * product
    assert found["unknown"] == {}
    assert found["collectives"], "the walker and the reader of collectives disagree"
    assert {where for _, where, _ in found["exchanges"]} == {"fsdp"}
    assert ["all-gather", "fsdp", LAYERS] in found["exchanges"]
    assert found["kept"] >= LAYERS * ROWS * WIDTH * 2, "each layer's input is kept for the backward pass"
    return found


@proof("plan", cases=GPUS, sample=1, bound={"memory": 0.02})
def walked_gpu(topology: str) -> dict[str, float]:
    """FLOPs and collectives exactly; the peak of the temporaries over the compiler's, less one."""
    found = counted(topology)
    assert found["cycles"] is None
    return {"memory": abs(found["live"] / found["temp"] - 1)}


@proof("plan", cases=TPUS, sample=1, bound={"missing": 0.4})
def walked_tpu(topology: str) -> dict[str, float]:
    """The same; live ranges are a lower bound there: what of the compiler's temporaries they leave unexplained.

    Buffers are packed into the memory by the compiler, and the gaps between them are no one's: a third at most so far.
    """
    found = counted(topology)
    assert found["cycles"] > 0
    assert found["live"] <= found["temp"]
    return {"missing": 1 - found["live"] / found["temp"]}
