"""What data is worth that is read more than once: arXiv:2305.16264, section 3.1."""

from __future__ import annotations

import math

from jaxllm.data.dataset import TokenDataset
from jaxllm.data.mixture import MixtureDataset

REPEAT_DECAY = 15.387756
"""R*_D, as fitted in their appendix A: after so many repeats more of them are worth little."""
FREE_EPOCHS = 4.0
"""Epochs up to which repeated data is about as good as fresh (their section 6)."""


def effective_data(amount: float, unique: float, decay: float = REPEAT_DECAY) -> float:
    """What ``amount`` is worth where only ``unique`` of it are different: D' = U + U R* (1 - exp(-R / R*)).

    Equation 5, R = amount / unique - 1. With another R* it is equation 6, of parameters.

    >>> round(worth(4.0, 1.0), 2)
    3.73
    """
    if amount <= unique:
        return amount
    return unique * (1 - decay * math.expm1(-(amount / unique - 1) / decay))


def epochs_per_source(dataset: TokenDataset | MixtureDataset, steps: int) -> dict[str, float]:
    """How often a run of so many steps reads each source."""
    if isinstance(dataset, TokenDataset):
        return {dataset.documents.name: steps * dataset.batch_size / dataset.plan.rows}
    given = dataset.rows_consumed(steps)
    return {source.name: given[source.name] / source.plan.rows for source in dataset.sources}


def repetition_warnings(dataset: TokenDataset | MixtureDataset, steps: int) -> list[str]:
    """A line for each source that is read more often than is free."""
    return [
        f"{name} is read {often:.1f} times, which is worth {effective_data(often, 1.0):.1f} times as many fresh tokens "
        "(arXiv:2305.16264)"
        for name, often in epochs_per_source(dataset, steps).items()
        if often > FREE_EPOCHS
    ]
