"""Tier benchmark: measures ``TierRates`` of a model on this machine, without holding all of its layers.

Computing is measured by an engine all of whose layers are a few copies of the first one of their kind, which are on the
device; the rest of a step by the same engine without layers. Reads are those of the stores that serve. Of a mixture an
engine with shares of the experts of some layers in slots is measured beside it.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.convert.load import LoadedModel
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.streaming.experts.expert_files import ExpertFiles, FileExperts
from jaxllm.infer.streaming.experts.host_experts import HostExperts
from jaxllm.infer.streaming.experts.slot_rates import SlotRates
from jaxllm.infer.streaming.layer_store import (
    HostLayers,
    LayerFiles,
    LayerStore,
    Unit,
    WithoutExperts,
    split_experts,
    units_of,
)
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement, check_slots
from jaxllm.infer.streaming.tier_rates import TierRates

FILE_BYTES = 2**31
"""Most bytes of files that are written to measure a disk; at least one layer of each loader is."""
DISK_SAMPLE = 2**28
"""Bytes of the file that ``measure_disk`` reads."""
_DROPS_PAGES = hasattr(os, "posix_fadvise")
PAGE = 32
"""Tokens of a page of the KV cache."""
PROMPT_ROWS = 128
"""Tokens of a step that computes prompts."""
ROUNDS = 3
"""Rounds over all batch sizes, of which the fastest counts."""
SLOT_SHARES = (1 / 4, 1 / 2, 1)
"""Shares of a layer's experts in slots that are measured."""
SLOT_LOADERS = 2
"""Threads that read experts from files there."""
COPIED_BYTES = 2**28
"""Bytes of the copies of a layer that compute by turns: no processor's cache holds them, as none holds a model."""


@dataclass
class AlikeLayers:
    """Store that gives copies of the first unit of a segment for all of them, by turns.

    Attributes:
        store: where those are.
        held: by segment and place among the copies.
        tier: "alike".
    """

    store: LayerStore
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    tier: str = "alike"

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``."""
        first = (unit.segment, 0)
        if first not in self.held:
            self.held[first] = self.store.read(Unit(unit.segment, 0, unit.first), device)
        place = (unit.segment, unit.repeat % (1 + COPIED_BYTES // _bytes_of(self.held[first])))
        if place not in self.held:
            self.held[place] = jax.tree.map(lambda x: x.copy(), self.held[first])
        return self.held[place]


def measure_tiers(
    loaded: LoadedModel,
    layers: LayerStore,
    directory: Path,
    *,
    batches: Sequence[int] = (1, 16),
    prompt: int = 16,
    loaders: int | None = None,
    steps: int = 8,
    slots: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> TierRates:
    """Measures a model's tiers.

    Args:
        loaded: the model with its parameters outside of blocks, see ``open_layers``.
        layers: its layers.
        directory: on the disk to measure; files are removed in the end.
        batches: batch sizes of decoding.
        prompt: tokens of the sequences that are decoded.
        loaders: most threads that read; None: four, or as many as there are processors if these are fewer.
        steps: steps that are timed of each batch size.
        slots: layers with experts in slots are measured too, where the model has mixtures.
        tell: told what is measured now.

    Raises:
        WeightsUnavailableError: the directory cannot be written.
    """
    batches = sorted(set(batches))
    loaders = loaders or min(4, os.cpu_count() or 1)
    units = units_of(loaded.model.config.segments)
    engine = _engine(loaded, _alike_weights(loaded, layers, units), batches, prompt + 3 * steps)
    runner = engine.runner
    assert isinstance(runner, StreamedRunner)
    whole, ends = dict.fromkeys(batches, math.inf), dict.fromkeys(batches, math.inf)
    for number in range(ROUNDS):
        tell(f"computing, round {number + 1} of {ROUNDS}")
        for batch in batches:
            runner.units = units
            whole[batch] = min(whole[batch], decode_step_seconds(engine, batch, prompt, steps))
            runner.units = []
            ends[batch] = min(ends[batch], decode_step_seconds(engine, batch, prompt, steps))
    runner.units = units
    of_layers = [max(whole[batch] - ends[batch], 1e-9) for batch in batches]
    in_slots = None
    if slots and (some := _slot_units(loaded, layers, units)):
        decoding = _Decoding(batches, prompt, steps)
        in_slots = _with_slots(engine, list(ends.values()), loaded, layers, some, directory, decoding, tell)
    host_device, device = jax.devices("cpu")[0], runner.window.device
    tell("copies from the host")
    first = HostLayers(layers, units[:1])
    first.pin(device)
    host = _rate(lambda: first.read(units[0], device), _bytes_of(first.read(units[0], device)), 5)
    many = range(1, loaders + 1)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        size = _bytes_of(first.read(units[0], host_device))
        some = units[: max(loaders, FILE_BYTES // size)]
        tell("files")
        files = LayerFiles.of(layers, some, Path(folder), ["tiers"])
        for unit in some:
            files.read(unit, host_device)  # checks its sum, once
        disk = _not_slower(max(_read_all(files, some, readers) for _ in range(3)) for readers in many)
        cold = _not_slower(_cold_rate(files, some, readers) for readers in many) if _DROPS_PAGES else ()
        slowdowns, shares = [], []
        for readers in many:
            tell(f"computing while files are read by {readers} of {loaders}")
            beside = [_beside(engine, batch, prompt, steps, _Readers(files, some, readers)) for batch in batches]
            slowdowns.append(tuple(max(1.0, s / whole[batch]) for batch, (s, _) in zip(batches, beside, strict=True)))
            shares.append(tuple(min(1.0, rate / disk[readers - 1]) for _, rate in beside))
    runner.close()
    return TierRates(
        device.device_kind, tuple(batches), tuple(of_layers), tuple(ends.values()), host, disk, cold,
        tuple(slowdowns), tuple(shares), in_slots,
    )  # fmt: skip


def _alike_weights(loaded: LoadedModel, layers: LayerStore, units: list[Unit]) -> StreamedWeights:
    placement = WeightPlacement(1, device_units=len(units))
    return StreamedWeights(loaded.params, units, dict.fromkeys(units, AlikeLayers(layers)), placement)


def _holds_experts(loaded: LoadedModel, unit: Unit) -> bool:
    group, _ = loaded.model.config.segments[unit.segment]
    return any(block.mlp.mixture is not None for block in group)


def _slot_units(loaded: LoadedModel, layers: LayerStore, units: list[Unit]) -> list[Unit]:
    """Units of one segment with mixtures, so many that no processor's cache holds them; none: no experts in slots.

    At least two where there are as many, since the first one's experts are never loaded ahead.
    """
    try:
        check_slots(loaded.model, WeightPlacement(expert_slots=1))
    except ValueError:
        return []
    first = next(unit for unit in units if _holds_experts(loaded, unit))
    many = max(2, 1 + COPIED_BYTES // _bytes_of(layers.read(first, jax.devices("cpu")[0])))
    return [unit for unit in units if unit.segment == first.segment][:many]


@dataclass(frozen=True)
class _Decoding:
    """Steps that are timed: ``steps`` for each batch size, of sequences of ``prompt`` tokens."""

    batches: Sequence[int]
    prompt: int
    steps: int

    def seconds(self, engine: Engine, batch: int) -> float:
        """Seconds of a step: the fastest of some rounds."""
        return min(decode_step_seconds(engine, batch, self.prompt, self.steps) for _ in range(ROUNDS))


def _with_slots(
    engine: Engine,
    ends: Sequence[float],
    loaded: LoadedModel,
    layers: LayerStore,
    units: list[Unit],
    directory: Path,
    decoding: _Decoding,
    tell: Callable[[str], None],
) -> SlotRates:
    """Measures layers with some of their experts in slots.

    Args:
        engine: whose layers have their experts.
        ends: seconds of the rest of a step, by batch size.
        loaded, layers: the model.
        units: that compute in all ways.
        directory: for files of experts, removed in the end.
        decoding: steps that are timed.
        tell: told what is measured now.
    """
    host = jax.devices("cpu")[0]
    # Each unit has its own copy, as JAX aligns it: experts that all share would stay in the processor's cache.
    experts = {
        (unit, block): HostExperts(jax.tree.map(lambda x: np.asarray(x.copy()), own))
        for unit in units
        for block, own in split_experts(layers.read(units[0], host))[1].items()
    }
    most = min(len(own) for own in experts.values())
    stores = dict.fromkeys(units, AlikeLayers(WithoutExperts(layers)))
    length = decoding.prompt + 3 * decoding.steps

    def with_slots(slots: int, absent: Mapping[tuple[Unit, str], HostExperts | FileExperts]) -> Engine:
        placement = WeightPlacement(1, device_units=len(units), expert_slots=slots, loaders=SLOT_LOADERS)
        return _engine(
            loaded, StreamedWeights(loaded.params, units, stores, placement, absent), decoding.batches, length
        )

    whole = engine.runner
    assert isinstance(whole, StreamedRunner)
    others = [unit for unit in whole.units if not _holds_experts(loaded, unit)]
    every, whole.units = whole.units, others
    beside = [
        max(0.0, decoding.seconds(engine, batch) - end) for batch, end in zip(decoding.batches, ends, strict=True)
    ]
    whole.units = every
    mixtures = len(every) - len(others)

    def seconds(one: Engine, slots: int) -> list[tuple[float, ...]]:
        """Seconds of all layers: those that compute here times all there are, and the others; ahead, then late."""
        assert isinstance(one.runner, StreamedRunner)
        assert one.runner.experts is not None
        rows = list[list[float]]()
        for ahead in (True, False) if slots < most else (True,):
            one.runner.experts.looks_ahead = ahead
            found = [decoding.seconds(one, batch) for batch in decoding.batches]
            rows.append([max(own - end, 1e-9) for own, end in zip(found, ends, strict=True)])
        one.runner.close()
        rows = [_all_ahead(*rows, len(experts)), rows[1]] if len(rows) == 2 else rows * 2
        scale = mixtures / len(units)
        return [tuple(own * scale + more for own, more in zip(row, beside, strict=True)) for row in rows]

    numbers = sorted({max(1, round(share * most)) for share in SLOT_SHARES})
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        files = ExpertFiles(Path(folder), ["tiers"], 0)
        in_files = {(unit, b): files.add(unit.first + int(b), own) for (unit, b), own in experts.items()}
        by_host, by_files = list[list[tuple[float, ...]]](), list[list[tuple[float, ...]]]()
        for slots in numbers:
            tell(f"{slots} of {most} experts in slots")
            by_host.append(seconds(with_slots(slots, experts), slots))
            by_files.append(seconds(with_slots(slots, in_files), slots) if slots < most else by_host[-1])
    host_rows, host_late, file_rows, files_late = (
        tuple(rows[n] for rows in way) for way in (by_host, by_files) for n in range(2)
    )
    shares = tuple(n / most for n in numbers)
    return SlotRates(tuple(decoding.batches), shares, host_rows, host_late, file_rows, files_late, SLOT_LOADERS)


def _all_ahead(ahead: Sequence[float], late: Sequence[float], layers: int) -> list[float]:
    """Seconds of so many layers, had the experts of all of them been loaded ahead.

    Args:
        ahead: measured seconds by batch size, in which those of the first layer came late.
        late: measured seconds with nothing loaded ahead, which takes no less.
        layers: number of layers; of a single one nothing is ever loaded ahead.
    """
    if layers == 1:
        return list(ahead)
    spared = [max(0.0, slow - fast) / (layers - 1) for fast, slow in zip(ahead, late, strict=True)]
    return [max(fast - one, 1e-9) for fast, one in zip(ahead, spared, strict=True)]


def _engine(loaded: LoadedModel, weights: StreamedWeights, batches: Sequence[int], length: int) -> Engine:
    # What memory is left would be too little, were each layer counted that is a copy of another.
    pages = batches[-1] * (1 + -(-length // PAGE))
    config = EngineConfig(
        max_sequences=batches[-1], **step_sizes(batches), max_len=length, layer_window=1, page_size=PAGE,
        pages=pages, samplers=("plain",), prefix_cache=False,
    )  # fmt: skip
    return Engine.of(loaded.model, weights, config, longest=loaded.longest, strict=True)


def measure_disk(directory: Path) -> float:
    """Bytes/s of reading a file of a directory that the system was asked to drop from its page cache."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(np.random.default_rng(0).bytes(DISK_SAMPLE))
        file.flush()
        os.fsync(file.fileno())
        if _DROPS_PAGES:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        file.readinto(bytearray(DISK_SAMPLE))
        return DISK_SAMPLE / (time.perf_counter() - begin)


def step_sizes(batches: Sequence[int]) -> dict[str, Any]:
    """Fields of ``EngineConfig`` for ``decode_step_seconds``: steps of these batches, and one that is for prompts."""
    rows = max(PROMPT_ROWS, *batches)
    return {"max_batched_tokens": rows, "buckets": tuple(sorted({*batches, rows}))}


def decode_step_seconds(engine: Engine, batch: int, prompt: int, steps: int) -> float:
    """Median seconds of a step that decodes a batch of random prompts.

    Args:
        engine: of which nothing runs; sequences may have ``prompt + 3 * steps`` tokens.
        batch: sequences.
        prompt: tokens of each.
        steps: steps that are timed.
    """
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=3 * steps - 1, temperature=1.0, ignore_eos=True)
    requests = [engine.submit(rng.integers(0, engine.vocab_size, prompt), params) for _ in range(batch)]
    while any(len(request.sequences[0].tokens) == prompt for request in requests):
        engine.step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    for request in requests:
        engine.cancel(request)
    while engine.busy:
        engine.step()
    return statistics.median(seconds)


def _bytes_of(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _rate(read: Callable[[], Any], size: int, times: int) -> float:
    """Median bytes/s of a read, which frees what it has read."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        jax.block_until_ready(read())
        seconds.append(time.perf_counter() - begin)
    return size / statistics.median(seconds)


def _read_all(files: LayerFiles, units: Sequence[Unit], loaders: int) -> float:
    """Bytes/s of reading units by several threads."""
    host = jax.devices("cpu")[0]
    begin = time.perf_counter()
    with ThreadPoolExecutor(loaders) as pool:
        sizes = list(pool.map(lambda unit: _bytes_of(jax.block_until_ready(files.read(unit, host))), units))
    return sum(sizes) / (time.perf_counter() - begin)


def _not_slower(rates: Iterable[float]) -> tuple[float, ...]:
    """Rates by number of loaders: what fewer of them reach, more do too, since some may wait."""
    return tuple(itertools.accumulate(rates, max))


def _cold_rate(files: LayerFiles, units: Sequence[Unit], loaders: int) -> float:
    """The same, of files that the system was asked to drop from its page cache, past which they are read."""
    for path in sorted(files.directory.glob("*.bin")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, files.direct = files.direct, True
    rate = _read_all(files, units, loaders)
    files.direct = before
    return rate


def _beside(engine: Engine, batch: int, prompt: int, steps: int, readers: _Readers) -> tuple[float, float]:
    """Seconds of a step that decodes while files are read, and bytes/s of the readers, which it ends."""
    try:
        seconds = decode_step_seconds(engine, batch, prompt, steps)
    finally:
        rate = readers.stop()
    return seconds, rate


class _Readers:
    """Threads that read units again and again until ``stop``."""

    def __init__(self, files: LayerFiles, units: Sequence[Unit], loaders: int):
        self._files, self._units, self._end = files, units, threading.Event()
        self._begin, self._bytes = time.perf_counter(), [0] * loaders
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(loaders)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        host, at = jax.devices("cpu")[0], number
        while not self._end.is_set():
            self._bytes[number] += _bytes_of(self._files.read(self._units[at % len(self._units)], host))
            at += 1

    def stop(self) -> float:
        """Ends them, each after its read; returns the bytes/s that they have read."""
        self._end.set()
        for thread in self._threads:
            thread.join()
        return sum(self._bytes) / (time.perf_counter() - self._begin)
