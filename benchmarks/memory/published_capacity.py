"""Published capacities of ZeRO-Infinity (arXiv:2104.07857) beside the formulas: what fits on DGX-2 nodes, by tier.

    python -m benchmarks.memory.published_capacity

A claim says of a model, a placement and a number of nodes whether a tier holds it. ``read`` claims were read in the
place that is named. The others are cited from the paper's tables without having them at hand: their layers and widths
give the sizes that they belong to. Where a paper names a size alone, layers and widths were chosen for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.plan.formulas.tier_bytes import ZERO_PLACEMENTS, Tier, TierBytes, placed, transformer_bytes

DEVICES = 16
"""V100 of a DGX-2 node."""
LENGTH = 1024
DGX2 = TierBytes(32 * 2**30, 1.5 * 2**40 / DEVICES, 28 * 2**40 / DEVICES)
"""Memory of a device of a DGX-2 node: 32 GB, and its shares of 1.5 TB of host memory and 28 TB of NVMe (figure 2b)."""
ABSTRACT = "abstract"
OFFLOAD = "abstract of ZeRO-Offload, arXiv:2101.06840"


@dataclass(frozen=True)
class CapacityClaim:
    """Published claim that a model fits, or does not.

    Attributes:
        billions: parameters, as published, in 10^9.
        layers, width, heads: of the model.
        placement: name in ``ZERO_PLACEMENTS``.
        nodes: DGX-2 nodes of 16 devices; a fraction: fewer devices.
        fits: whether it fits, by tier that the claim is about.
        source: where it is said.
        read: whether that place was read.
        rows: rows of a device's batch.
        parts: parts that a layer is split into.
    """

    billions: float
    layers: int
    width: int
    heads: int
    placement: str
    nodes: float
    fits: dict[Tier, bool]
    source: str
    read: bool
    rows: float = 1
    parts: int = 1

    def needed(self) -> TierBytes:
        """Bytes of a device by tier, by formula."""
        model = transformer_bytes(self.layers, self.width, self.heads, self.rows, LENGTH, parts=self.parts)
        return placed(model, ZERO_PLACEMENTS[self.placement], round(self.nodes * DEVICES))

    def found(self) -> dict[Tier, bool]:
        """Whether the formulas say that it fits, by the claim's tiers."""
        lacking = self.needed().lacking(DGX2)
        return {tier: tier not in lacking for tier in self.fits}


ALL: dict[Tier, bool] = {"device": True, "host": True, "disk": True}
PLAIN, OPTIMIZER_ON_CPU = "data parallelism", "ZeRO-Offload"
SPLIT, CPU = "ZeRO-3, 3D parallelism", "ZeRO-Infinity, CPU"
CPU_AND_NVME, NVME = "ZeRO-Infinity, CPU and NVMe", "ZeRO-Infinity, NVMe"
TRILLION = (1000, 128, 25600, 256)
CLAIMS = (
    CapacityClaim(1.4, 50, 1536, 16, PLAIN, 1 / 16, {"device": True}, OFFLOAD, True),
    CapacityClaim(2.0, 40, 2048, 16, PLAIN, 1, {"device": False}, "section 8.5: 1.4 B is the limit", False),
    CapacityClaim(13, 65, 4096, 32, OPTIMIZER_ON_CPU, 1 / 16, {"device": True}, OFFLOAD, True),
    CapacityClaim(13, 65, 4096, 32, OPTIMIZER_ON_CPU, 1, ALL, "section 8.5", False),
    CapacityClaim(20, 98, 4096, 32, OPTIMIZER_ON_CPU, 1, {"device": False}, "section 8.5: 13 B is the limit", False),
    CapacityClaim(70, 87, 8192, 64, "ZeRO-Offload, model parallel", 1, ALL, OFFLOAD, True, parts=16),
    CapacityClaim(50, 62, 8192, 64, CPU, 1, ALL, "section 8.5: almost 100 B", False),
    CapacityClaim(100, 125, 8192, 64, CPU, 1, {"host": False}, "section 8.5: almost 100 B", False),
    CapacityClaim(50, 62, 8192, 64, CPU_AND_NVME, 1, ALL, "table 1", False),
    CapacityClaim(100, 125, 8192, 64, CPU_AND_NVME, 1, ALL, "table 1", False),
    CapacityClaim(175, 96, 12288, 96, NVME, 1, ALL, "slides at SC21: GPT-3 on a node", True),
    CapacityClaim(500, 124, 18432, 160, NVME, 1, ALL, "table 1", False),
    CapacityClaim(*TRILLION, NVME, 1, ALL, ABSTRACT, True),
    CapacityClaim(*TRILLION, SPLIT, 1, {"device": False}, ABSTRACT, True),
    CapacityClaim(*TRILLION, CPU, 1, {"host": False}, "section 8.5: almost 100 B", False),
    CapacityClaim(*TRILLION, SPLIT, 50, {"device": True}, "abstract: 800 V100 for a trillion", True, parts=16),
    CapacityClaim(500, 124, 18432, 160, SPLIT, 32, {"device": True}, "Microsoft's article: 3D parallelism", True),
    CapacityClaim(
        *TRILLION, SPLIT, 32, {"device": False}, "Microsoft's article: not trillions with 3D", True, parts=16
    ),
    CapacityClaim(10_000, 195, 65536, 512, NVME, 1, {"host": True}, "section 5.1: 0.76 TB of checkpoints", True, 2),
    CapacityClaim(10_000, 195, 65536, 512, NVME, 1, {"device": False}, "figure 2a: working memory", False, 2),
    CapacityClaim(32_000, 205, 114_000, 1024, NVME, 32, {"disk": True}, "slides at SC21: 32 nodes", True),
    CapacityClaim(100_000, 315, 163_840, 1024, NVME, 96, {"disk": True}, "section 5.1: 96 nodes", True),
)
"""Claims in the order of sizes. "Read" of section 5.1 means in public reading notes of the paper."""


class MemoryRow(NamedTuple):
    """Row of the paper's figure 2a, in TiB and GiB, which the figure calls TB and GB.

    Attributes:
        layers, width, heads: of the model.
        states, checkpoints: TiB of model states, and of activation checkpoints of 32 rows.
        model_working, activation_working: GiB of working memory of a device, with 4 rows; 0: not compared.
    """

    layers: int
    width: int
    heads: int
    states: float
    checkpoints: float
    model_working: float
    activation_working: float


FIGURE_2A = (
    MemoryRow(80, 10240, 128, 1.83, 0.05, 0.0, 1.63),
    MemoryRow(100, 20480, 160, 9.16, 0.12, 6.25, 2.50),
    MemoryRow(128, 25600, 256, 18.31, 0.20, 9.77, 3.56),
    MemoryRow(195, 65536, 512, 182.81, 0.76, 64.00, 8.00),
    MemoryRow(315, 163840, 1024, 1845.70, 3.08, 400.00, 18.00),
)
"""Figure 2a for models of 10^11 to 10^14 parameters; the figure was not at hand when this was written."""


def table() -> str:
    """Markdown table of the claims and the formulas' bytes."""
    rows = []
    for claim in CLAIMS:
        need = claim.needed()
        sizes = ", ".join(
            f"{tier} {getattr(need, tier) / 2**30:,.1f} of {getattr(DGX2, tier) / 2**30:,.0f}" for tier in claim.fits
        )
        said = ", ".join(sorted({"fits" if fits else "does not" for fits in claim.fits.values()}))
        agrees = "yes" if claim.found() == claim.fits else "NO"
        nodes = f"{claim.nodes:g}" if claim.nodes >= 1 else f"{round(claim.nodes * DEVICES)} device"
        rows.append(
            (
                f"{claim.billions:,g}",
                claim.placement,
                nodes,
                said,
                sizes,
                agrees,
                claim.source,
                "" if claim.read else "no",
            )
        )
    head = (
        "10^9 parameters",
        "placement",
        "DGX-2",
        "published",
        "GiB of a device, by formula",
        "agree",
        "where",
        "read",
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


if __name__ == "__main__":
    print(table())
