"""Data mixtures: shares are exact at any step, with any epochs, and end as configured."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from jaxllm.data.mixture import MixtureDataset, MixtureSource
from jaxllm.data.sequence_packing import pack_concat
from jaxllm.data.token_files import TokenDocuments
from jaxllm.files import DataError
from tests.proofs.harness import proof

WEIGHTS = st.one_of(st.integers(1, 30), st.sampled_from([0.5, 0.25, 0.1, 0.03, 0.007, 1.5]))
SOURCES = st.lists(
    st.tuples(st.integers(1, 40), WEIGHTS, st.sampled_from([None, None, 0.5, 1, 2, 3.7])), min_size=1, max_size=7
).filter(lambda sources: sum(weight for _, weight, _ in sources) <= 100)
"""Rows, weight and epochs of each source. The weights are whole thousandths, so those of a sum over 100 can have a
common denominator over 100,000, which is refused."""


def source(number: int, rows: int, weight: float, limit: float | None) -> MixtureSource:
    """Rows of two targets each."""
    tokens = np.zeros(2 * rows + 1, np.uint16)
    documents = TokenDocuments(tokens, np.array([0]), np.array([len(tokens)]), f"s{number}", "x")
    return MixtureSource(f"s{number}", documents, pack_concat(documents.starts, documents.lengths, 2), weight, limit)


@proof(
    "data",
    count=300,
    sample=8,
    strategy=st.fixed_dictionaries(
        {
            "sources": SOURCES,
            "batch_size": st.integers(1, 9),
            "renormalise": st.booleans(),
            "seed": st.integers(0, 1 << 40),
            "far": st.integers(0, 1 << 50),
        }
    ),
)
def mixture_shares(example: dict[str, Any]) -> None:
    """After every step each source has given its share of all rows since a source ended last, give or take less than
    one row; of its own rows each once in every epoch; never more than max_epochs allows. Far steps are as near ones."""
    sources = tuple(source(k, *one) for k, one in enumerate(example["sources"]))
    size, renormalise = example["batch_size"], example["renormalise"]
    data = MixtureDataset(sources, size, example["seed"], {}, renormalise)
    places, last = 120, data.phases[-1].end if data.phases else 0
    end = places if last is None else min(places, last)
    order: list[tuple[int, int]] = []
    for step in range(end // size):
        part, row = data.rows_at(step)
        order += zip(part.tolist(), row.tolist(), strict=True)
        counted = [sum(k == one for one, _ in order) for k in range(len(sources))]
        assert list(data.rows_consumed(step + 1).values()) == counted

    # Each place: the exact share since the sources last changed.
    had = [0] * len(sources)
    # Whole rows of so many epochs, counted without the data set: a source that has left has given exactly these.
    allowed = [None if limit is None else int(Fraction(repr(limit)) * rows) for rows, _, limit in example["sources"]]
    for phase in data.phases:
        began = list(had)
        for k in set(range(len(sources))) - set(phase.sources):
            assert phase.first > len(order) or began[k] == allowed[k]
        total = sum(Fraction(repr(sources[k].weight)) for k in phase.sources)
        for place in range(phase.first, min(len(order), phase.end or len(order))):
            had[order[place][0]] += 1
            for k in range(len(sources)):
                share = Fraction(repr(sources[k].weight)) / total if k in phase.sources else Fraction(0)
                assert abs(had[k] - began[k] - share * (place + 1 - phase.first)) < 1
    for k, one in enumerate(sources):
        own, rows = [row for part, row in order if part == k], one.plan.rows
        limit = allowed[k]
        assert limit is None or len(own) <= limit
        for begin in range(0, len(own) - rows + 1, rows):
            assert sorted(own[begin : begin + rows]) == list(range(rows))
        assert len(set(own[len(own) // rows * rows :])) == len(own) % rows

    if last is None:
        part, row = data.rows_at(example["far"])
        again = [data.rows_at(example["far"], shard=n, num_shards=size) for n in range(size)]
        assert np.concatenate([one for one, _ in again]).tolist() == part.tolist()
        assert np.concatenate([one for _, one in again]).tolist() == row.tolist()
        data.check_steps(1 << 60)
    else:
        data.check_steps(last // size)
        with pytest.raises(DataError, match=r"mixture: 's\d'|leaves no row"):
            data.rows_at(last // size)
        with pytest.raises(DataError):
            data.check_steps(last // size + 1)
        # One source, by name, has given all it may, or with renormalise all of them have.
        full = [
            k for k, one in enumerate(sources) if one.max_rows is not None and _given(data, k, last) == one.max_rows
        ]
        assert len(full) == len(sources) if renormalise else full


def _given(data: MixtureDataset, number: int, place: int) -> int:
    if not data.phases:
        return 0
    return data.phases[-1].rows_before(place).get(number, data.phases[-1].rows_at_start[number])
