"""Placement fit: the solved placement, whose shares of layers on device, host and disk decode most tokens per second.

FlexGen's linear program (arXiv:2303.06865, section 4.3): the time of a step is the longest of computing, copies from
the host and reads from the disk, which overlap; its variables are the shares of the weights by tier, and batch size and
window are enumerated. So is the number of loaders, each of which has a layer's buffer in host memory, as Hermes chooses
it under a memory budget (arXiv:2409.04249): more read faster, as far as the disk goes, and leave less room for layers
on the host. Where batches may take turns in each layer, a block of them has the weights read once a step, the shares of
their KV cache by tier are variables too, and the number of batches and the place of their residual streams are
enumerated; else the KV cache and the streams are on the device, and their bytes are constants. Where the model is a
mixture of experts, numbers of slots for these are enumerated too (``slot_fit``). The result is an ``OffloadBudget``, as
if it had been given by hand.

Legend of the program: d, h, k shares of the weights, and u, v, w those of the KV cache, on device, host and disk; T
seconds of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from scipy import optimize

from jaxllm.infer.streaming.blocks.cache_placement import PARTS_ON_DEVICE, STREAM_TIERS, StreamTier
from jaxllm.infer.streaming.experts.slot_fit import (
    MixtureBytes,
    SlotPlaces,
    experts_on_host,
    link_seconds,
    rates_with_slots,
)
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.step_timeline import BatchesByTurns, Tier, step_time
from jaxllm.infer.streaming.streamed_weights import WeightPlacement, most_that_fit, spread
from jaxllm.infer.streaming.tier_rates import TierRates

PREFERENCE = 1e-6
"""Cost of a share on the host, and twice that on the disk, in steps: equal times go to the faster tier."""
WINDOWS = (1, 2, 3, 4)
LOADERS = (1, 2, 3, 4)
"""Numbers of threads to choose from, where layers are read from files."""


Loads = tuple[float, float]
"""Seconds in which a step's loads of experts have the link to the host, and the disk."""
NO_LOADS: Loads = (0.0, 0.0)


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
        stream: of the residual stream of a token.
        adapter_rank: of a rank of an adapter of all matrices.
        mixtures: bytes that slots of experts are made of; None: the model has no experts that may have slots.
        longest: tokens of a sequence that the model was trained on; 0: not known.
    """

    units: tuple[int, ...]
    ends: int
    token: int
    parameters: int = 0
    expert_parameters: int = 0
    routed: float = 1.0
    stream: int = 0
    adapter_rank: int = 0
    mixtures: MixtureBytes | None = None
    longest: int = 0


@dataclass(frozen=True)
class TierLimits:
    """Limits of a placement.

    Attributes:
        device: bytes of device memory, for weights, window and KV cache.
        host: bytes of host memory, for weights and the loaders' buffers.
        disk: directory for files of layers; None: none.
        length: tokens of a sequence that the KV cache holds.
        loaders: threads that read layers.
        batches: most batches that take turns in each layer; None: one, whose KV cache is on the device.
        page: tokens of a page of the KV cache, which is written back as a whole.
        max_len: most tokens of a sequence, of which the KV cache holds at least one; 0: ``length``.
    """

    device: float
    host: float
    disk: Path | None = None
    length: int = 1024
    loaders: int = 2
    batches: int | None = None
    page: int = 32
    max_len: int = 0


@dataclass(frozen=True)
class BatchBlock:
    """Batches that compute in a step.

    Attributes:
        batch: sequences of a batch.
        batches: batches that take turns in each layer.
        streams: where their residual streams are while others compute.
        by_tier: their KV cache may be in any tier.
    """

    batch: int
    batches: int = 1
    streams: StreamTier = "device"
    by_tier: bool = False


@dataclass(frozen=True)
class Shares:
    """Solution of the linear program.

    Attributes:
        device, host, disk: shares of the weights.
        seconds: of a step.
        cache: shares of the KV cache on device, host and disk.
    """

    device: float
    host: float
    disk: float
    seconds: float
    cache: tuple[float, float, float] = (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class FittedPlacement:
    """Placement for a batch size, with its prediction.

    Attributes:
        batch: sequences that decode together.
        budget: the placement.
        bytes: bytes of layers by tier; with experts in slots those in slots count besides where they come from.
        seconds: of a step, predicted by ``step_time``.
        limit: what takes the longest, a name of ``terms``.
        cache: bytes of the KV cache by tier; empty: it is on the device.
        late: share of the layers whose weights come so late that the layer before cannot ask their routers ahead.
    """

    batch: int
    budget: OffloadBudget
    bytes: dict[Tier, int]
    seconds: float
    limit: str
    cache: dict[Tier, int] = field(default_factory=dict)
    late: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Predicted decoded tokens per second of all sequences."""
        return self.batch * self.budget.batches / self.seconds


def cache_bytes(model: ModelBytes, limits: TierLimits, block: BatchBlock) -> int:
    """Bytes of the KV cache of all batches: whole pages for each sequence, and for each batch a page more."""
    return block.batches * (paged_tokens(limits, block.batch) + limits.page) * model.token


def paged_tokens(limits: TierLimits, batch: int) -> int:
    """Tokens that the pages of a batch hold: those of its sequences, and at least one of the longest."""
    pages_of = lambda tokens: -(-tokens // limits.page)  # noqa: E731
    return max(batch * pages_of(limits.length), pages_of(limits.max_len)) * limits.page


def terms(
    shares: tuple[float, float, float],
    cache: tuple[float, float, float],
    model: ModelBytes,
    rates: TierRates,
    limits: TierLimits,
    block: BatchBlock,
    loads: Loads = NO_LOADS,
) -> dict[str, float]:
    """Seconds of each part of a step, of which the longest is the step's: FlexGen's cost model.

    Args:
        shares, cache: of the weights and of the KV cache on device, host and disk.
        model, rates, limits: what is placed, how fast it is, and where.
        block: what computes; with streams on the host, each batch's goes to the device and back once in every unit.
        loads: seconds in which experts are copied, and read, besides.
    """
    (_, h, k), (_, v, w) = shares, cache
    weights, held = float(sum(model.units)), cache_bytes(model, limits, block)
    streams = block.batch * block.batches * model.stream * len(model.units) if block.streams == "host" else 0
    written = held * min(1.0, limits.page / limits.length)
    return {
        "computing": block.batches * (rates.layers(block.batch) + rates.ends(block.batch)),
        "copies from the host": ((h + k) * weights + (v + w) * held + streams) / rates.host + loads[0],
        "copies to the host": ((v + w) * written + streams) / rates.host,
        "the disk": (k * weights + w * (held + written)) / rates.disk_rate(limits.loaders) + loads[1],
    }


def room(model: ModelBytes, limits: TierLimits, block: BatchBlock, window: int) -> tuple[float, float]:
    """Bytes that are left on the device, and on the host, for layers and, where it is by tier, the KV cache.

    Below 0 if the rest does not fit: embedding and head, the windows of layers and of parts of the KV cache, streams,
    and the loaders' buffers.
    """
    largest, held = max(model.units), cache_bytes(model, limits, block)
    streams = block.batch * model.stream
    many = block.batches if block.streams == "device" else 1
    parts = min(1.0, PARTS_ON_DEVICE / (block.batches * len(model.units)))
    device = limits.device - model.ends - window * largest - held * (parts if block.by_tier else 1) - many * streams
    host = limits.host - (0 if limits.disk is None else limits.loaders * largest)
    return device, host - (block.batches * streams if block.streams == "host" else 0)


def solve(
    model: ModelBytes,
    rates: TierRates,
    limits: TierLimits,
    block: BatchBlock,
    window: int,
    loads: Loads = NO_LOADS,
) -> Shares | None:
    """Shares with the shortest step by ``terms``; None: nothing fits.

    A linear program in (d, h, k, u, v, w, T), solved by HiGHS.
    """
    weights, held = float(sum(model.units)), cache_bytes(model, limits, block)
    device, host = room(model, limits, block, window)
    if device < 0 or host < 0:
        return None
    none = (0.0, 0.0, 0.0)
    of = lambda shares, cache: np.asarray(list(terms(shares, cache, model, rates, limits, block, loads).values()))  # noqa: E731
    fixed = of(none, none)
    one = np.eye(3)
    # What a share of one adds to each part of a step: they are linear.
    added = [of(tuple(row), none) - fixed for row in one] + [of(none, tuple(row)) - fixed for row in one]
    steps = np.column_stack([*added, -np.ones_like(fixed)])
    on = held if block.by_tier else 0.0
    bytes_of = np.asarray([[weights, 0, 0, on, 0, 0, 0], [0, weights, 0, 0, on, 0, 0]])
    slow = 1 if limits.disk is not None else 0
    away = 1 if block.by_tier else 0
    compute = float(fixed[0])
    dear = PREFERENCE * compute
    found = optimize.linprog(
        [0, dear, 2 * dear, 0, dear, 2 * dear, 1],
        A_ub=np.vstack([steps, bytes_of]),
        b_ub=[*-fixed, device, host],
        A_eq=[[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0]],
        b_eq=[1, 1],
        bounds=[(0, 1), (0, 1), (0, slow), (0, 1), (0, away), (0, away * slow), (compute, None)],
        method="highs",
    )
    if found.status != 0:
        return None
    d, h, k, u, v, w, seconds = map(float, found.x)
    return Shares(d, h, k, seconds, (u, v, w))


def tiers_of(placement: WeightPlacement, units: int) -> list[Tier]:
    """Tier of each unit of a placement."""
    numbers = range(units)
    on_device, others = spread(numbers, placement.device_units)
    on_host = others if placement.host_units is None else spread(others, placement.host_units)[0]
    return ["device" if n in on_device else "host" if n in on_host else "disk" for n in numbers]


def predict(
    model: ModelBytes,
    rates: TierRates,
    budget: OffloadBudget,
    batch: int,
    length: int = TierLimits.length,
    page: int = TierLimits.page,
) -> FittedPlacement:
    """Predicted decoding of batches with a budget, however that was chosen.

    Args:
        model, rates, budget: what computes where, and how fast.
        batch: sequences of a batch.
        length, page: tokens of a sequence that the KV cache holds, and of a page; they count where that is by tier.

    Raises:
        ValueError: the budget has slots for experts, and the model has no experts that may have some.
    """
    if not budget.experts:
        return _predict_layers(model, rates, budget, batch, length, page)
    mixtures = model.mixtures
    if mixtures is None:
        raise ValueError(f"the budget has {budget.experts} slots for experts, and the model has none: give experts=0.")
    whole = mixtures.experts * mixtures.slot
    on_host = whole if budget.experts_host is None else min(whole, budget.experts_host)
    places, rest = SlotPlaces(budget.experts, 1 - on_host / whole, budget.loaders), _without_experts(model)
    loaded = link_seconds(mixtures, rates, places, batch)
    ahead = _predict_layers(rest, rates_with_slots(mixtures, rates, places), budget, batch, length, page, loaded)
    late = min(1.0, ahead.late + 1 / mixtures.layers)  # no layer asks the first one's router ahead
    with_slots = rates_with_slots(mixtures, rates, replace(places, late=late))
    one = _predict_layers(rest, with_slots, budget, batch, length, page, loaded)
    computing = rates_with_slots(mixtures, rates, SlotPlaces(mixtures.experts)).layers(batch)
    loads = with_slots.layers(batch) - computing
    longest = "loads of experts" if one.limit == "computing" and loads > computing else one.limit
    held = {"device": budget.experts * mixtures.slot, "host": on_host, "disk": whole - on_host}
    return replace(one, bytes={tier: size + held[tier] for tier, size in one.bytes.items()}, limit=longest)


def _without_experts(model: ModelBytes) -> ModelBytes:
    """The model with layers that have no experts."""
    assert model.mixtures is not None
    return replace(model, units=model.mixtures.rest, mixtures=None)


def _predict_layers(
    model: ModelBytes,
    rates: TierRates,
    budget: OffloadBudget,
    batch: int,
    length: int,
    page: int,
    loads: Loads = NO_LOADS,
) -> FittedPlacement:
    """The prediction for layers that are units of the model, without a look at their experts."""
    placement = budget.placement(model.units)
    tiers = tiers_of(placement, len(model.units))
    held = {tier: sum(b for b, t in zip(model.units, tiers, strict=True) if t == tier) for tier in Tier.__args__}
    block = BatchBlock(batch, budget.batches, budget.streams, budget.kv_device is not None)
    limits = TierLimits(0, 0, budget.disk, length, budget.loaders, page=page, max_len=budget.kv_tokens or 0)
    cache, turns = dict[Tier, int](), None
    if budget.cache is not None:
        of_part = cache_bytes(model, limits, block) // (block.batches * len(model.units))
        parts = parts_of(budget, of_part, block.batches * len(model.units))
        cache = {tier: of_part * parts.count(tier) for tier in Tier.__args__}
        stream = batch * model.stream if budget.streams == "host" else 0
        turns = BatchesByTurns(budget.batches, tuple(parts), of_part, stream, budget.cache.window)
    time = step_time(tiers, model.units, rates, batch, budget.window, budget.loaders, turns)
    of_all = lambda sizes: tuple(sizes[tier] / max(1, sum(sizes.values())) for tier in Tier.__args__)  # noqa: E731
    parts_of_step = terms(of_all(held), of_all(cache) if cache else (1, 0, 0), model, rates, limits, block, loads)
    longest = max(parts_of_step, key=lambda name: parts_of_step[name])
    # The timeline has no writes, and no loads of experts beside the layers', which may take the longest.
    seconds = time.seconds if turns is None and loads == NO_LOADS else max(time.seconds, parts_of_step[longest])
    return FittedPlacement(batch, budget, held, seconds, longest, cache, time.late / len(tiers))


def parts_of(budget: OffloadBudget, size: int, count: int) -> list[Tier]:
    """Tiers of parts of the KV cache of one size, in the order in which they compute, see ``CachePlacement``."""
    here = count if budget.kv_device is None else most_that_fit([size] * count, budget.kv_device)
    on_device, others = spread(range(count), here)
    on_host = len(others) if budget.kv_host is None else most_that_fit([size] * len(others), budget.kv_host)
    device, host = set(on_device), set(spread(others, on_host)[0])
    return ["device" if n in device else "host" if n in host else "disk" for n in range(count)]


def fit(
    model: ModelBytes,
    rates: TierRates,
    limits: TierLimits,
    batches: Sequence[int],
    windows: Sequence[int] = WINDOWS,
    loaders: Sequence[int] = (),
    slots: Sequence[int] | None = None,
) -> list[FittedPlacement]:
    """The best placement for each batch size that fits, over windows, numbers of loaders and of slots for experts.

    Args:
        model, rates, limits: what is placed, how fast it is, and where.
        batches: batch sizes.
        windows: to choose from.
        loaders: to choose from; none: those of ``limits``.
        slots: to choose from, where 0 are whole layers with their experts; None: those and some numbers up to all
            experts, where the model has experts that may have slots and batches do not take turns.

    Raises:
        DoesNotFitError: none fits.
    """
    if slots is None:
        slots = [0, *(model.mixtures.choices() if model.mixtures is not None and limits.batches is None else ())]
    found = []
    for batch in batches:
        ways = []
        for many, readers in itertools.product(slots, loaders or (limits.loaders,)):
            own = replace(limits, loaders=readers)
            for window, block in itertools.product(windows, _blocks(batch, limits)):
                ways += _ways(model, rates, own, block, window, many)
        if ways:
            found.append(min(ways, key=lambda way: (1 / way.tokens_per_second, *_sizes(way.budget))))
    if not found:
        fewest = replace(limits, loaders=min(loaders or (limits.loaders,)))
        device, host = room(model, fewest, _blocks(min(batches), fewest)[0], min(windows))
        raise DoesNotFitError(
            f"no placement fits: the layers have {sum(model.units) / 2**30:.2f} GiB. Beside embedding, head, a window "
            f"and the KV cache of {paged_tokens(limits, min(batches))} tokens {device / 2**30:.2f} GiB are left on the "
            f"device, and {host / 2**30:.2f} GiB on the host. Give disk=DIR, more of either, or a smaller length or "
            "--max-len."
        )
    return found


def _ways(
    model: ModelBytes, rates: TierRates, limits: TierLimits, block: BatchBlock, window: int, slots: int
) -> list[FittedPlacement]:
    """The solved placement with so many slots, as a budget and its prediction; empty: it does not fit."""
    placed, own_rates, own, experts_host, loads = model, rates, limits, None, NO_LOADS
    if slots:
        mixtures = model.mixtures
        assert mixtures is not None
        placed = _without_experts(model)
        device = limits.device - slots * mixtures.slot
        left = room(placed, replace(limits, device=device), block, window)[0]
        found = experts_on_host(mixtures, slots, limits.host, left, limits.loaders, limits.disk is not None)
        if found is None:
            return []
        experts_host, host = found
        own = replace(limits, device=device, host=host)
        whole = mixtures.experts * mixtures.slot
        from_files = 0.0 if experts_host is None else 1 - experts_host / whole
        places = SlotPlaces(slots, from_files, limits.loaders)
        own_rates, loads = rates_with_slots(mixtures, rates, places), link_seconds(mixtures, rates, places, block.batch)
    shares = solve(placed, own_rates, own, block, window, loads)
    if shares is None:
        return []
    host = room(placed, own, block, window)[1]
    budget = replace(_budget(shares, placed, own, host, block, window), experts=slots, experts_host=experts_host)
    layers = _predict_layers(placed, own_rates, budget, block.batch, limits.length, limits.page)
    if layers.bytes["host"] + layers.cache.get("host", 0) > host:  # whole layers may have no room where shares have
        return []
    return [predict(model, rates, budget, block.batch, limits.length, limits.page)]


def _blocks(batch: int, limits: TierLimits) -> list[BatchBlock]:
    """Blocks of batches of a size to choose from: numbers of batches that are powers of two."""
    if limits.batches is None:
        return [BatchBlock(batch)]
    many = sorted({2**n for n in range(limits.batches.bit_length())} | {limits.batches})
    return [BatchBlock(batch, n, where, by_tier=True) for n in many for where in STREAM_TIERS]


def _sizes(budget: OffloadBudget) -> tuple[int, ...]:
    return budget.experts, budget.batches, budget.window, budget.loaders


def _budget(
    shares: Shares, model: ModelBytes, limits: TierLimits, host: float, block: BatchBlock, window: int
) -> OffloadBudget:
    """The shares as bytes. The host has all the room that there is: a layer that is cut by the shares goes there."""
    weights = sum(model.units)
    rounding = 1e-6 * weights  # of the solver, which is not to cost a layer
    here, there, _ = shares.cache
    held = cache_bytes(model, limits, block)
    of_part = held / (block.batches * len(model.units))
    taken = (there * held + of_part) if block.by_tier and limits.disk is not None else 0.0
    on_host = None if limits.disk is None else int(max(0.0, host - taken))
    budget = OffloadBudget(window, int(shares.device * weights + rounding), on_host, limits.disk, limits.loaders)
    if not block.by_tier:
        return replace(budget, kv_limit=held)
    return replace(
        budget,
        batches=block.batches,
        kv_device=int(here * held + 1e-6 * held),
        kv_host=None if limits.disk is None else int(there * held + 1e-6 * held),
        kv_tokens=paged_tokens(limits, block.batch),
        streams=block.streams,
    )


def show(found: Sequence[FittedPlacement]) -> str:
    """Table of placements, by batch size; the bytes of the KV cache have columns where it is by tier, slots one."""
    gib = lambda size: f"{size / 2**30:8.2f}"  # noqa: E731
    by_tier, in_slots = any(one.cache for one in found), any(one.budget.experts for one in found)
    lines = [
        f"{'batch':>5} {'window':>6} {'loaders':>7} {'device':>8} {'host':>8} {'disk GiB':>8} "
        + (f"{'slots':>5} " if in_slots else "")
        + (f"{'batches':>7} {'KV here':>8} {'KV host':>8} {'KV disk':>8} {'streams':>7} " if by_tier else "")
        + f"{'ms/step':>9} {'tokens/s':>9}  limit"
    ]
    for one in found:
        cells = [f"{one.batch:5} {one.budget.window:6} {one.budget.loaders:7}"]
        cells += [gib(one.bytes[tier]) for tier in Tier.__args__]
        cells += [f"{one.budget.experts:5}"] if in_slots else []
        if by_tier:
            cells += [f"{one.budget.batches:7}", *(gib(one.cache[tier]) for tier in Tier.__args__)]
            cells += [f"{one.budget.streams:>7}"]
        lines.append(f"{' '.join(cells)} {1e3 * one.seconds:9.1f} {one.tokens_per_second:9.1f}  {one.limit}")
    return "\n".join(lines)
