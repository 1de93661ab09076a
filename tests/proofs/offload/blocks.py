"""Batches by turns, with their KV cache in any tier: what they serve, and the program that places it."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.infer.streaming.blocks.block_runner import BlockRunner
from jaxllm.infer.streaming.blocks.cache_placement import STREAM_TIERS, CachePlacement
from jaxllm.infer.streaming.placement_fit import (
    BatchBlock,
    ModelBytes,
    TierLimits,
    cache_bytes,
    predict,
    room,
    solve,
    terms,
)
from jaxllm.infer.streaming.placement_fit import fit as fitted
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.infer.streaming.tier_rates import TierRates
from tests.infer import engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof
from tests.proofs.offload.placement_fit import drawn as drawn_limits
from tests.proofs.offload.streamed_weights import FAMILIES, beside_resident, check_window, drawn, smollm2_tokens

WAYS = ("roomy", "tight, recompute", "contiguous", "one after the other")
GRID = 40


def drawn_cache(rng: np.random.Generator, part: int, units: int, folder: Path) -> CachePlacement:
    """A placement of the KV cache at random; ``part``: about the bytes of a part."""
    batches = int(rng.integers(1, 5))
    parts = units * batches
    device = None if rng.random() < 0.2 else int(rng.integers(0, parts + 1)) * part
    host = None if device is None or rng.random() < 0.4 else int(rng.integers(0, parts + 1)) * part
    return CachePlacement(
        batches, device, host, None if host is None else folder, str(rng.choice(STREAM_TIERS)),  # type: ignore[arg-type]
        window=int(rng.integers(1, 4)),
    )  # fmt: skip


def check_parts(runner: BlockRunner) -> None:
    """Bytes of each tier are as the placement says; no more parts were on the device than the window has."""
    cache, window = runner.cache, runner.parts
    sizes = {segment: bytes_of(runner._template(segment)) for segment in {unit.segment for unit in runner.units}}
    held = sum(bytes_of(pools) for pools in window.held.values())
    assert held == sum(sizes[runner.units[part.unit].segment] for part in window.held)
    assert cache.device_bytes is None or held <= cache.device_bytes
    by_tier = dict.fromkeys(("host", "disk"), 0)
    for part, store in window.stores.items():
        by_tier[store.tier] += sizes[runner.units[part.unit].segment]
    assert cache.host_bytes is None or by_tier["host"] <= cache.host_bytes
    assert len(window.held) + len(window.stores) == len(runner.units) * cache.batches
    assert window.counts.most <= min(cache.window, len(window.stores))


def bytes_of(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@proof("offload", count=80, sample=1, float64=True, bound={"logprobs": 1e-12}, counts=("reads", "written", "batches"))
def blocks_are_resident(seed: int) -> dict[str, float]:
    """Random traffic over random placements of layers, KV cache and streams: log-probabilities of the training forward.

    One to four batches by turns; families, ways to serve, windows of layers and of parts, tiers. The bytes of each tier
    are those of the placement, and nothing is compiled meanwhile.
    """
    rng = np.random.default_rng(seed)
    model, way = str(rng.choice(FAMILIES)), str(rng.choice(WAYS))
    config = dataclasses.replace(engines.ENGINES[way], preemption="recompute")
    with tempfile.TemporaryDirectory() as folder:
        units = sum(repeats for _, repeats in engines.model_of(model, "float64").segments)
        placement = drawn(rng, units, Path(folder))
        cache = drawn_cache(rng, int(rng.choice([3000, 20000, 100000])), units, Path(folder))
        placement = dataclasses.replace(placement, cache=cache)
        engine = engines.build(config, model, "float64", placement=placement)
        requests = engines.traffic(rng, config, int(rng.integers(3, 9)))
        counter = Compilations()
        with counter:
            made = engines.serve(engine, requests)
        assert not counter.names
        runner = engine.runner
        assert isinstance(runner, BlockRunner)
        check_parts(runner)
        check_window(engine, placement)
        seen = runner.parts.counts
        found = {
            "reads": sum(seen.reads.values()),
            "written": sum(seen.written_pages.values()),
            "batches": cache.batches,
        }
        return {"logprobs": engines.error(model, "float64", made), **{name: float(x) for name, x in found.items()}}


CASES = list(itertools.product(("llama", "gemma3", "mixtral"), ("int8", "fp8", "int4")))


@proof("offload", cases=CASES, sample=1, float64=True, bound={"logprobs": 1e-12})
def quantised_blocks_too(case: tuple[str, str]) -> dict[str, float]:
    """With KV cache formats that lose bits, parts in each tier: tokens and log-probabilities of resident ones."""
    with tempfile.TemporaryDirectory() as folder:
        cache = CachePlacement(2, 40000, 40000, Path(folder))
        return {"logprobs": beside_resident(*case, WeightPlacement(2, cache=cache), every_tier)}


def every_tier(engine: Any) -> None:
    """Parts of the KV cache stay on the device, and others were read from the host's memory and from files."""
    runner = engine.runner
    assert isinstance(runner, BlockRunner)
    check_parts(runner)
    counts = runner.parts.counts
    assert runner.parts.held
    assert min(counts.reads["host"], counts.reads["disk"], counts.written_pages["host"], counts.written_pages["disk"])


@proof(
    "offload",
    cases=["batches=2", "batches=3,kv_device=20MiB,streams=host", "batches=2,kv_device=0B,kv_host=8MiB,disk=DIR"],
    sample=1,
)
def blocks_of_smollm2_say_the_same(offload: str) -> None:
    """SmolLM2 by batches that take turns, with the KV cache in all tiers: the greedy tokens of resident weights."""
    assert smollm2_tokens(offload, "plain") == smollm2_tokens(None, "plain")


@proof("offload", count=100, sample=3, bound={"above": 1e-6, "unreached": 1e-6})
def block_program_is_grid_search(seed: int) -> dict[str, float]:
    """Step time of the linear program with the KV cache by tier, against a grid of shares within the same limits.

    How far it is above the grid's best, by ``terms``, as a share of the step; and how far the program's own shares,
    which keep to the limits, are from its step time. The grid is one of the KV cache's shares, with the limits among
    its points; the layers are on the fastest tier that has room, which is never slower. ``fit`` keeps to the limits
    with whole layers and parts, and no other number of batches that it may choose is predicted to be faster.
    """
    rng = np.random.default_rng(seed)
    worst, found = {"above": 0.0, "unreached": 0.0}, 0
    while not found:
        model, rates, limits = drawn_limits(rng)
        model = dataclasses.replace(model, stream=int(rng.integers(0, 3)), token=int(rng.integers(1, 40)))
        limits = dataclasses.replace(limits, batches=int(rng.integers(1, 9)), page=int(rng.integers(1, 4)))
        for batch, batches, window in ((1, 1, 1), (8, 2, 2), (4, 8, 1)):
            block = BatchBlock(batch, batches, str(rng.choice(STREAM_TIERS)), by_tier=True)  # type: ignore[arg-type]
            shares, best = solve(model, rates, limits, block, window), best_of_grid(model, rates, limits, block, window)
            assert (shares is None) == (best is None)
            if shares is None or best is None:
                continue
            found += 1
            own = shares.device, shares.host, shares.disk
            check_shares(model, limits, block, window, own, shares.cache)
            reached = max(terms(own, shares.cache, model, rates, limits, block).values())
            worst["above"] = max(worst["above"], (shares.seconds - best) / best)
            worst["unreached"] = max(worst["unreached"], abs(reached - shares.seconds) / shares.seconds)
    try:
        chosen = fitted(model, rates, limits, (1, 8))
    except ValueError:
        assert limits.disk is None  # shares fit, and whole layers or parts do not
        chosen = []
    for one in chosen:
        check_whole(model, rates, limits, one)
    return worst


def best_of_grid(
    model: ModelBytes, rates: TierRates, limits: TierLimits, block: BatchBlock, window: int
) -> float | None:
    """Shortest step of a grid; None: nothing fits."""
    device, host = room(model, limits, block, window)
    if min(device, host) < 0:
        return None
    weights, held = float(sum(model.units)), max(1.0, float(cache_bytes(model, limits, block)))
    best = None
    for u in [*np.linspace(0, 1, GRID + 1), min(1.0, device / held), max(0.0, min(1.0, (device - weights) / held))]:
        for v in [
            *np.linspace(0, 1 - u, GRID + 1),
            min(1 - u, host / held),
            max(0.0, min(1 - u, (host - weights) / held)),
        ]:
            w, left, there = 1 - u - v, device - u * held, host - v * held
            if min(left, there) < -1e-9 * weights or (w > 1e-12 and limits.disk is None):
                continue
            d = min(1.0, max(0.0, left) / weights)
            h = min(1 - d, max(0.0, there) / weights)
            if 1 - d - h > 1e-12 and limits.disk is None:
                continue
            seconds = max(terms((d, h, 1 - d - h), (u, v, w), model, rates, limits, block).values())
            best = seconds if best is None else min(best, seconds)
    return best


def check_shares(
    model: ModelBytes,
    limits: TierLimits,
    block: BatchBlock,
    window: int,
    shares: tuple[float, ...],
    cache: tuple[float, ...],
) -> None:
    """Shares add up to one and keep to the limits."""
    device, host = room(model, limits, block, window)
    weights, held = sum(model.units), cache_bytes(model, limits, block)
    near = 1e-6 * (weights + held)
    assert abs(sum(shares) - 1) < 1e-6
    assert abs(sum(cache) - 1) < 1e-6
    assert shares[0] * weights + cache[0] * held <= device + near
    assert shares[1] * weights + cache[1] * held <= host + near
    assert limits.disk is not None or shares[2] * weights + cache[2] * held <= near


def check_whole(model: ModelBytes, rates: TierRates, limits: TierLimits, one: Any) -> None:
    """A placement of whole layers and parts keeps to the limits, and is what its budget is predicted to be."""
    block = BatchBlock(one.batch, one.budget.batches, one.budget.streams, by_tier=True)
    device, host = room(model, limits, block, one.budget.window)
    assert one.bytes["device"] + one.cache["device"] <= device * (1 + 1e-5) + 1
    assert one.bytes["host"] + one.cache["host"] <= host
    assert sum(one.bytes.values()) == sum(model.units)
    parts = len(model.units) * one.budget.batches
    assert 0 <= cache_bytes(model, limits, block) - sum(one.cache.values()) < parts  # bytes of a part are whole
    assert predict(model, rates, one.budget, one.batch, limits.length, limits.page) == one
    assert one.budget.batches <= (limits.batches or 1)
