"""Calibration of the cost model: attained fraction of data-sheet peaks, one set of values for all hardware and models.

The values were chosen once, by hand and rounded: ``matmul``, ``attention`` and ``memory`` so that the 8B recipe takes
on a v6e:8x8 what the TPU compiler estimates; ``link``, ``weight_overlap`` and ``ring_overlap`` as collectives usually
attain. No value was fitted to a published MFU, but published MFUs were known when attention's share was chosen, as
were the programs of the ranking when the terms were chosen (docs/train/plan.md, which compares with both).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Attained fractions of peaks, all dimensionless.

    Attributes:
        matmul: of FLOP/s, in matmuls of whole tiles: pipeline fill, epilogues, clock under load.
        attention: of FLOP/s, in attention, whose matmuls are small and wait for exponentials.
        memory: of the HBM bandwidth.
        link: of a link's bandwidth.
        weight_overlap: of compute time, during which all-gathers of weights can overlap.
        ring_overlap: of attention's compute time, during which ring attention's communication can overlap.
    """

    matmul: float = 0.80
    attention: float = 0.60
    memory: float = 0.85
    link: float = 0.85
    weight_overlap: float = 0.80
    ring_overlap: float = 0.80


DEFAULT = Calibration()
"""Shipped calibration."""
