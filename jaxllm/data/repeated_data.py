"""Value of repeated data: how many fresh tokens several epochs are worth (arXiv:2305.16264, section 3.1)."""

from __future__ import annotations

import math

from jaxllm.data.data_source import DataSource
from jaxllm.data.dataset import TokenDataset
from jaxllm.data.mixture import MixtureDataset

REPEAT_DECAY = 15.387756
"""R*_D, as fitted in the paper's appendix A: repetitions beyond this number add little."""
FREE_EPOCHS = 4.0
"""Epochs up to which repeated data is about as good as fresh data (the paper's section 6)."""


def effective_data(amount: float, unique: float, decay: float = REPEAT_DECAY) -> float:
    """Effective amount of unique data that repeated data is worth: D' = U + U R* (1 - exp(-R / R*)).

    ``amount`` D is read in all, of which ``unique`` U is distinct; R = amount / unique - 1 (equation 5). With another
    R* the formula is equation 6, for parameters.

    >>> round(worth(4.0, 1.0), 2)
    3.73
    """
    if amount <= unique:
        return amount
    return unique * (1 - decay * math.expm1(-(amount / unique - 1) / decay))


def epochs_per_source(dataset: DataSource, steps: int) -> dict[str, float]:
    """Epochs of each text source, by name, that a run of ``steps`` steps reads; empty for other data sources."""
    if isinstance(dataset, TokenDataset):
        return {dataset.documents.name: steps * dataset.batch_size / dataset.plan.rows}
    if not isinstance(dataset, MixtureDataset):
        return {}
    given = dataset.rows_consumed(steps)
    return {source.name: given[source.name] / source.plan.rows for source in dataset.sources}


def repetition_warnings(dataset: DataSource, steps: int) -> list[str]:
    """Warnings for a log: data of less than one batch, and each source that is read more than `FREE_EPOCHS` times."""
    small = []
    if isinstance(dataset, TokenDataset) and dataset.plan.rows < dataset.batch_size:
        small = [
            f"{dataset.documents.name} is too short to learn from: {len(dataset.documents.tokens):,} tokens fill "
            f"{dataset.plan.rows} of the {dataset.batch_size} rows of one batch, so every step repeats them."
        ]
    return small + [
        f"{name} is read {often:.1f} times, which is worth {effective_data(often, 1.0):.1f} times as many fresh tokens "
        "(arXiv:2305.16264)"
        for name, often in epochs_per_source(dataset, steps).items()
        if often > FREE_EPOCHS
    ]
