"""Log-probabilities of rollouts beside those of training."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.infer.rollout_mismatch import rollout_mismatch


def test_equal_ones_are_trusted():
    found = rollout_mismatch([-1.0, -2.5], [-1.0, -2.5])
    assert (found.mean, found.largest, found.kl, found.effective_share) == (0, 0, 0, 1)
    assert found.rollout == found.train == (-1.0, -2.5)


def test_the_divergence_is_estimated_without_bias(rng):
    """Tokens drawn by one distribution of four, weighed by another."""
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.3, 0.3, 0.25, 0.15])
    tokens = rng.choice(4, 200_000, p=p)
    found = rollout_mismatch(np.log(p)[tokens].tolist(), np.log(q)[tokens].tolist())
    exact = float((p * np.log(p / q)).sum())
    terms = q / p - 1 - np.log(q / p)
    deviation = np.sqrt((p * terms**2).sum() - exact**2) / np.sqrt(200_000)
    assert abs(found.kl - exact) < 6 * deviation
    assert found.kl >= 0
    assert abs(found.effective_share - 1 / float((q * q / p).sum())) < 0.01
    assert found.largest == pytest.approx(np.abs(np.log(p / q)).max())


def test_figures_by_hand():
    """Two tokens: probabilities 1/2 and 1/4 as sampled, 1/4 and 1/2 in training; ratios 1/2 and 2."""
    found = rollout_mismatch(np.log([0.5, 0.25]).tolist(), np.log([0.25, 0.5]).tolist())
    assert found.mean == found.largest == pytest.approx(np.log(2))
    assert found.kl == pytest.approx(((0.5 - 1 + np.log(2)) + (2 - 1 - np.log(2))) / 2)
    assert found.effective_share == pytest.approx(2.5**2 / (2 * 4.25))
    one = rollout_mismatch([float(np.log(0.5))], [float(np.log(0.25))])
    assert one.kl == pytest.approx(0.5 - 1 + np.log(2))


def test_what_cannot_be_compared_is_refused():
    for rollout, train in (([], []), ([-1.0], [-1.0, -2.0])):
        with pytest.raises(ValueError, match="give one of each"):
            rollout_mismatch(rollout, train)
    with pytest.raises(ValueError, match="not finite"):
        rollout_mismatch([-np.inf], [-1.0])
