"""Shuffle: a bijection of any range, different by seed and epoch, well mixed, and never changing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.data.shuffle import permute


@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=60)
def test_bijection(size, seed, epoch):
    order = permute(np.arange(size), size, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(1, 2**45), data=st.data())
@settings(max_examples=40)
def test_places_are_independent_of_what_else_is_asked(size, data):
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    order = permute(places, size, seed=1, epoch=2)
    assert len(set(order.tolist())) == len(places)
    assert order.min() >= 0
    assert order.max() < size
    assert [int(permute(places[n : n + 1], size, seed=1, epoch=2)[0]) for n in range(len(places))] == order.tolist()


def test_the_order_never_changes():
    """Cursors in old checkpoints rely on these very numbers."""
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == [6, 4, 3, 1, 9, 0, 7, 2, 5, 8]
    assert permute(np.arange(3), 10**12, seed=7, epoch=5).tolist() == [358000175061, 642625413889, 492905522086]


def test_epochs_and_seeds_differ():
    orders = [permute(np.arange(100), 100, seed=s, epoch=e) for s in range(3) for e in range(3)]
    assert len({tuple(order.tolist()) for order in orders}) == 9


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("size", [5, 16])
def test_every_place_is_reached_alike(size):
    """Chi-squared over where each place goes, 1,500 fixed seeds: far within what chance allows for a fair shuffle."""
    trials = 1500
    counts = np.zeros((size, size))
    for seed in range(trials):
        counts[np.arange(size), permute(np.arange(size), size, seed=seed, epoch=0)] += 1
    expected = trials / size
    chi2, freedom = ((counts - expected) ** 2 / expected).sum(), (size - 1) ** 2
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_do_not_stay_together():
    order = permute(np.arange(20_000), 20_000, seed=3, epoch=1)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert (np.abs(np.diff(order)) == 1).sum() < 15  # a fair shuffle has about 2
