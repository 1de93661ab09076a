"""Placement fit: the solved placement, whose shares of layers on device, host and disk decode most tokens per second.

FlexGen's linear program (arXiv:2303.06865, section 4.3): the time of a step is the longest of computing, copies from
the host and reads from the disk, which overlap; its variables are the shares of the weights by tier, and batch size and
window are enumerated. So is the number of loaders, each of which has a layer's buffer in host memory, as Hermes chooses
it under a memory budget (arXiv:2409.04249): more read faster, as far as the disk goes, and leave less room for layers
on the host. The KV cache and the activations are on the device, where the runner has them, so their bytes are constants
here. The result is an ``OffloadBudget``, as if it had been given by hand.

Legend of the program: d, h, k shares of the weights on device, host and disk; T seconds of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import optimize

from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.step_timeline import Tier, step_time
from jaxllm.infer.streaming.streamed_weights import WeightPlacement, spread
from jaxllm.infer.streaming.tier_rates import TierRates

PREFERENCE = 1e-6
"""Cost of a share on the host, and twice that on the disk, in steps: equal times go to the faster tier."""
WINDOWS = (1, 2, 3, 4)
LOADERS = (1, 2, 3, 4)
"""Numbers of threads to choose from, where layers are read from files."""


class DoesNotFitError(ValueError):
    """A model fits no placement within limits; the message says what is missing."""


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model.

    Attributes:
        units: of each unit, see ``WeightPlacement``.
        ends: of the parameters outside of blocks, which are on the device.
        token: of the KV cache of a token, all layers.
        parameters: number of parameters of all units.
        expert_parameters: of them, those of experts.
        routed: share of the experts that a token is routed to.
    """

    units: tuple[int, ...]
    ends: int
    token: int
    parameters: int = 0
    expert_parameters: int = 0
    routed: float = 1.0


@dataclass(frozen=True)
class TierLimits:
    """Limits of a placement.

    Attributes:
        device: bytes of device memory, for weights, window and KV cache.
        host: bytes of host memory, for weights and the loaders' buffers.
        disk: directory for files of layers; None: none.
        length: tokens of a sequence that the KV cache holds.
        loaders: threads that read layers.
    """

    device: float
    host: float
    disk: Path | None = None
    length: int = 1024
    loaders: int = 2


@dataclass(frozen=True)
class Shares:
    """Solution of the linear program.

    Attributes:
        device, host, disk: shares of the weights.
        seconds: of a step.
    """

    device: float
    host: float
    disk: float
    seconds: float


@dataclass(frozen=True)
class FittedPlacement:
    """Placement for a batch size, with its prediction.

    Attributes:
        batch: sequences that decode together.
        budget: the placement.
        bytes: bytes of layers by tier.
        seconds: of a step, predicted by ``step_time``.
        limit: what takes the longest: "computing", "copies from the host" or "the disk".
    """

    batch: int
    budget: OffloadBudget
    bytes: dict[Tier, int]
    seconds: float
    limit: str

    @property
    def tokens_per_second(self) -> float:
        """Predicted decoded tokens per second of all sequences."""
        return self.batch / self.seconds


def terms(shares: tuple[float, float, float], weights: float, rates: TierRates, tokens: int) -> dict[str, float]:
    """Seconds of each part of a step, of which the longest is the step's: FlexGen's cost model.

    Args:
        shares: of the weights on device, host and disk.
        weights: bytes of all layers.
    """
    _, h, k = shares
    return {
        "computing": rates.layers(tokens) + rates.ends(tokens),
        "copies from the host": (h + k) * weights / rates.host,
        "the disk": k * weights / (rates.disk * rates.disk_share),
    }


def room(model: ModelBytes, limits: TierLimits, batch: int, window: int) -> tuple[float, float]:
    """Bytes for layers that stay on the device, and on the host; below 0 if the rest does not fit."""
    largest = max(model.units)
    device = limits.device - model.ends - window * largest - batch * limits.length * model.token
    host = limits.host - (0 if limits.disk is None else limits.loaders * largest)
    return device, host


def solve(model: ModelBytes, rates: TierRates, limits: TierLimits, batch: int, window: int) -> Shares | None:
    """Shares with the shortest step by ``terms``; None: nothing fits.

    A linear program in (d, h, k, T), solved by HiGHS.
    """
    weights = float(sum(model.units))
    device, host = room(model, limits, batch, window)
    if device < 0 or host < 0:
        return None
    compute = terms((1, 0, 0), weights, rates, batch)["computing"]
    below = np.asarray(
        [
            [0, weights / rates.host, weights / rates.host, -1],
            [0, 0, weights / (rates.disk * rates.disk_share), -1],
            [1, 0, 0, 0],
            [0, 1, 0, 0],
        ]
    )
    most = np.asarray([0, 0, device / weights, host / weights])
    found = optimize.linprog(
        [0, PREFERENCE * compute, 2 * PREFERENCE * compute, 1],
        A_ub=below,
        b_ub=most,
        A_eq=[[1, 1, 1, 0]],
        b_eq=[1],
        bounds=[(0, 1), (0, 1), (0, 0 if limits.disk is None else 1), (compute, None)],
        method="highs",
    )
    return Shares(*map(float, found.x)) if found.status == 0 else None


def tiers_of(placement: WeightPlacement, units: int) -> list[Tier]:
    """Tier of each unit of a placement."""
    numbers = range(units)
    on_device, others = spread(numbers, placement.device_units)
    on_host = others if placement.host_units is None else spread(others, placement.host_units)[0]
    return ["device" if n in on_device else "host" if n in on_host else "disk" for n in numbers]


def predict(model: ModelBytes, rates: TierRates, budget: OffloadBudget, batch: int) -> FittedPlacement:
    """Predicted decoding of a batch with a budget, however that was chosen."""
    placement = budget.placement(model.units)
    tiers = tiers_of(placement, len(model.units))
    held = {tier: sum(b for b, t in zip(model.units, tiers, strict=True) if t == tier) for tier in Tier.__args__}
    time = step_time(tiers, model.units, rates, batch, budget.window, budget.loaders)
    weights = sum(model.units)
    parts = terms((held["device"] / weights, held["host"] / weights, held["disk"] / weights), weights, rates, batch)
    return FittedPlacement(batch, budget, held, time.seconds, max(parts, key=lambda name: parts[name]))


def fit(
    model: ModelBytes,
    rates: TierRates,
    limits: TierLimits,
    batches: Sequence[int],
    windows: Sequence[int] = WINDOWS,
    loaders: Sequence[int] = (),
) -> list[FittedPlacement]:
    """The best placement for each batch size that fits, over windows and numbers of loaders.

    Args:
        model, rates, limits: what is placed, how fast it is, and where.
        batches: batch sizes.
        windows: to choose from.
        loaders: to choose from; none: those of ``limits``.

    Raises:
        DoesNotFitError: none fits.
    """
    found = []
    for batch in batches:
        ways = []
        for window, readers in itertools.product(windows, loaders or (limits.loaders,)):
            own = replace(limits, loaders=readers)
            shares = solve(model, rates, own, batch, window)
            if shares is not None:
                host = room(model, own, batch, window)[1]
                way = predict(model, rates, _budget(shares, model, own, host, window), batch)
                ways += [way] if way.bytes["host"] <= host else []  # whole layers may have no room where shares have
        if ways:
            found.append(min(ways, key=lambda way: (way.seconds, way.budget.window, way.budget.loaders)))
    if not found:
        fewest = replace(limits, loaders=min(loaders or (limits.loaders,)))
        device, host = room(model, fewest, min(batches), min(windows))
        raise DoesNotFitError(
            f"no placement fits: the layers have {sum(model.units) / 2**30:.2f} GiB. Beside embedding, head, a window "
            f"and the KV cache of {min(batches)} x {limits.length} tokens {device / 2**30:.2f} GiB are left on the "
            f"device, and {host / 2**30:.2f} GiB on the host. Give disk=DIR, more of either, or a smaller length."
        )
    return found


def _budget(shares: Shares, model: ModelBytes, limits: TierLimits, host: float, window: int) -> OffloadBudget:
    """The shares as bytes. The host has all the room that there is: a layer that is cut by the shares goes there."""
    weights = sum(model.units)
    rounding = 1e-6 * weights  # of the solver, which is not to cost a layer
    on_host = None if limits.disk is None else int(host)
    return OffloadBudget(window, int(shares.device * weights + rounding), on_host, limits.disk, limits.loaders)


def show(found: Sequence[FittedPlacement]) -> str:
    """Table of placements, by batch size."""
    gib = lambda size: f"{size / 2**30:8.2f}"  # noqa: E731
    lines = [
        f"{'batch':>5} {'window':>6} {'loaders':>7} {'device':>8} {'host':>8} {'disk GiB':>8} {'ms/step':>9} "
        f"{'tokens/s':>9}  limit"
    ]
    for one in found:
        lines.append(
            f"{one.batch:5} {one.budget.window:6} {one.budget.loaders:7} {gib(one.bytes['device'])} "
            f"{gib(one.bytes['host'])} {gib(one.bytes['disk'])} {1e3 * one.seconds:9.1f} "
            f"{one.tokens_per_second:9.1f}  {one.limit}"
        )
    return "\n".join(lines)
