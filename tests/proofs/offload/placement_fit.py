"""Solved placements: the linear program is a grid search of its own cost model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxllm.infer.streaming.placement_fit import (
    BatchBlock,
    DoesNotFitError,
    ModelBytes,
    TierLimits,
    fit,
    room,
    solve,
    terms,
)
from jaxllm.infer.streaming.tier_rates import TierRates
from tests.proofs.harness import proof

GRID = 200
ON_DEVICE = (1.0, 0.0, 0.0)


def drawn(rng: np.random.Generator) -> tuple[ModelBytes, TierRates, TierLimits]:
    """A model, a machine and limits at random, in which any part of a step may be the longest."""
    units = tuple(int(rng.integers(50, 200)) for _ in range(int(rng.integers(2, 40))))
    total = sum(units)
    model = ModelBytes(units, int(rng.integers(0, total // 2)), int(rng.integers(0, 20)))
    seconds = np.sort(10 ** rng.uniform(-3, 0, 3))
    rates = TierRates(
        "drawn",
        (1, 4, 32),
        tuple(seconds.tolist()),
        tuple(rng.uniform(0, 0.1, 3).tolist()),
        host=float(total * 10 ** rng.uniform(-1, 3)),
        disk=tuple(np.sort(total * 10 ** rng.uniform(-2, 2, 2)).tolist()),
    )
    limits = TierLimits(
        float(rng.uniform(0.2, 2) * total), float(rng.uniform(0.1, 1.2) * total),
        Path("d") if rng.random() < 0.7 else None, length=int(rng.integers(1, 10)),
        loaders=int(rng.integers(1, 4)), page=1,
    )  # fmt: skip
    return model, rates, limits


@proof("offload", count=100, sample=3, bound={"above": 1e-6, "below": 1e-9})
def program_is_grid_search(seed: int) -> dict[str, float]:
    """Step time by the linear program, against the best of a grid of shares within the same limits, by ``terms``.

    How far it is above the grid's, and below it, as a share of the step. The grid has the limits themselves among its
    points. The layers of what is chosen keep to the limits.
    """
    rng = np.random.default_rng(seed)
    worst = {"below": 0.0, "above": 0.0}
    found = 0
    while not found:  # draws that nothing fits are checked too, and another is made
        model, rates, limits = drawn(rng)
        total = float(sum(model.units))
        step = lambda d, c, n: terms(d, c, model, rates, limits, BatchBlock(n))  # noqa: E731, B023
        for batch, window in ((1, 1), (8, 2), (32, 4)):
            device, host = room(model, limits, BatchBlock(batch), window)
            ways = []
            if min(device, host) >= 0:
                for d in np.linspace(0, min(1.0, device / total), GRID + 1):
                    most = min(1 - d, host / total)
                    some = np.linspace(0, most, GRID + 1)
                    if limits.disk is None:
                        some = [1 - d] if 1 - d <= most + 1e-12 else []
                    ways += [max(step((d, h, max(0.0, 1 - d - h)), ON_DEVICE, batch).values()) for h in some]
            shares = solve(model, rates, limits, BatchBlock(batch), window)
            assert (shares is None) == (not ways)
            if shares is None:
                continue
            found += 1
            best = min(ways)
            worst["above"] = max(worst["above"], (shares.seconds - best) / best)
            worst["below"] = max(worst["below"], (best - shares.seconds) / shares.seconds)
    try:
        fitted = fit(model, rates, limits, (1, 8, 32))
    except DoesNotFitError:
        assert limits.disk is None  # shares fit, and whole layers do not
        fitted = []
    for one in fitted:
        device, host = room(model, limits, BatchBlock(one.batch), one.budget.window)
        assert one.bytes["device"] <= device * (1 + 1e-5)
        assert one.bytes["host"] <= host
        assert one.limit in ("computing", "copies from the host", "the disk")
    return worst
