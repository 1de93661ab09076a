"""What real programs reach of what data sheets promise: one set of numbers for all hardware and models.

They were chosen once, by hand and rounded: ``products``, ``attention`` and ``memory`` so that the 8B recipe takes on a
v6e:8x8 what the TPU compiler estimates; ``links``, ``hidden`` and ``beside`` as what collectives usually reach. No
number was fitted to a published utilisation, but those were in sight when attention's share was chosen, as programs of
the ranking were when terms were (docs/train/plan.md, which compares with both).
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
    attention: float = 0.60
    memory: float = 0.85
    links: float = 0.85
    hidden: float = 0.80
    beside: float = 0.80


DEFAULT = Calibration()
