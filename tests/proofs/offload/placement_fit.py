"""Solved placements: the linear program, and the number of slots for experts, are a grid search of their cost model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxllm.infer.streaming.experts.slot_fit import MixtureBytes, experts_on_host
from jaxllm.infer.streaming.experts.slot_rates import SlotRates
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.placement_fit import (
    BatchBlock,
    DoesNotFitError,
    ModelBytes,
    TierLimits,
    fit,
    predict,
    room,
    solve,
    terms,
)
from jaxllm.infer.streaming.streamed_weights import spread
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


def drawn_mixture(rng: np.random.Generator) -> tuple[ModelBytes, TierRates, TierLimits]:
    """A mixture, a machine and limits at random; its loads of experts are measured in half of the draws."""
    layers, experts = int(rng.integers(2, 6)), int(rng.integers(2, 9))
    size = int(rng.integers(5, 50))
    rest = tuple(int(rng.integers(10, 100)) for _ in range(layers))
    mixtures = MixtureBytes(rest, layers * size, size, experts, int(rng.integers(1, experts + 1)) / experts, layers)
    model, rates, limits = drawn(rng)
    units = tuple(own + experts * size for own in rest)
    scale = sum(units) / sum(model.units)
    model = ModelBytes(units, int(model.ends * scale), model.token, mixtures=mixtures)
    slots = None
    if rng.random() < 0.5:
        late = np.sort(rates.layers(1) * 10 ** rng.uniform(0, 1.5, (2, 3, 2)), axis=(0))
        late = np.sort(np.sort(late, axis=1)[:, ::-1], axis=2)
        rows = [tuple(map(tuple, way.tolist())) for way in late]
        slots = SlotRates((1, 32), (0.25, 0.5, 1.0), rows[0], rows[1])
    alone = rates.disk[0] * scale  # two threads read at most twice as much
    rates = dataclasses.replace(
        rates, host=rates.host * scale, disk=(alone, alone * float(rng.uniform(1, 2))), slots=slots
    )
    return model, rates, dataclasses.replace(limits, device=limits.device * scale, host=limits.host * scale)


def every_placement(
    model: ModelBytes, limits: TierLimits, batch: int, windows: tuple[int, ...]
) -> Iterator[OffloadBudget]:
    """Budgets of every number of slots and window, with every number of layers on the device and on the host.

    Experts have what the rest of the layers leaves of the host, see ``experts_on_host``.
    """
    assert model.mixtures is not None
    for slots, window in itertools.product(range(model.mixtures.experts + 1), windows):
        mixtures, placed, own, on_host = model.mixtures, model, limits, None
        if slots:
            placed = dataclasses.replace(model, units=mixtures.rest)
            own = dataclasses.replace(limits, device=limits.device - slots * mixtures.slot)
            left = room(placed, own, BatchBlock(batch), window)[0]
            found = experts_on_host(mixtures, slots, limits.host, left, limits.loaders, limits.disk is not None)
            if found is None:
                continue
            on_host, host = found
            own = dataclasses.replace(own, host=host)
        device, host = room(placed, own, BatchBlock(batch), window)
        if min(device, host) < 0:
            continue
        for here in range(len(placed.units) + 1):
            stay, others = spread(placed.units, here)
            if sum(stay) > device:
                continue
            for there in range(len(others) + 1) if limits.disk is not None else [len(others)]:
                if (taken := sum(spread(others, there)[0])) <= host:
                    yield OffloadBudget(
                        window, sum(stay), None if limits.disk is None else taken, limits.disk, limits.loaders,
                        experts=slots, experts_host=on_host,
                    )  # fmt: skip


@proof("offload", count=100, sample=3, bound={"above": 1e-6, "below": 1e-9}, counts=("slots", "whole layers"))
def slots_are_grid_search(seed: int) -> dict[str, float]:
    """Predicted step of the placement that is chosen with slots for experts, against the least of every number of
    slots, window, and number of layers on the device and on the host, by the same prediction (``predict``).

    How far it is above that, and below it, as a share of the step. Draws in which nothing fits are checked too, and
    another is made.
    """
    rng, windows = np.random.default_rng(seed), (1, 2)
    found = {"above": 0.0, "below": 0.0, "slots": 0.0, "whole layers": 0.0}
    while not found["slots"] + found["whole layers"]:
        model, rates, limits = drawn_mixture(rng)
        for batch in (1, 8):
            seconds = [
                predict(model, rates, budget, batch, limits.length, limits.page).seconds
                for budget in every_placement(model, limits, batch, windows)
            ]
            try:
                (chosen,) = fit(model, rates, limits, [batch], windows)
            except DoesNotFitError:
                assert limits.disk is None or not seconds  # shares may fit the host, and whole layers not
                continue
            found["slots" if chosen.budget.experts else "whole layers"] += 1
            best = min(seconds)
            found["above"] = max(found["above"], (chosen.seconds - best) / best)
            found["below"] = max(found["below"], (best - chosen.seconds) / best)
    return found
