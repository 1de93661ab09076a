"""What real programs reach of what data sheets promise: one set of numbers for all hardware and models.

They were chosen once, to fit the TPU compiler's own estimates of the recipes' steps and published utilisations together
(``make proof plan``, docs/plan.md), and rounded; nothing is fitted to a single row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Shares of peaks, all dimensionless.

    Attributes:
        products: of FLOP/s in matrix products of whole tiles: the pipeline's fill, epilogues, the clock under load.
        attention: of FLOP/s in attention, whose products are small and wait for exponentials.
        memory: of the memory's bytes/s.
        links: of a link's bytes/s.
        hidden: of arithmetic during which gathers of weights and sums of gradients can go on.
        beside: likewise for what attention sends around its ring.
    """

    products: float = 0.80
    attention: float = 0.50
    memory: float = 0.85
    links: float = 0.85
    hidden: float = 0.80
    beside: float = 0.80


DEFAULT = Calibration()
