"""Chunks of files in the host's memory: fewest reads, fewer than by last use, no other bits, also after kills."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jaxllm.train import RunConfig, train
from jaxllm.train import run as preparing
from jaxllm.train.disk.chunk_schedule import ChunkSchedule, replayed_loads
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.records.run_directory import RunDirectory
from tests.proofs.first_run.resume import start as start_run
from tests.proofs.harness import proof
from tests.proofs.offload import optimizer_on_disk as state_alone
from tests.proofs.offload import parameters_on_disk as streamed
from tests.train.runs import losses
from tests.train.test_host_chunks import compared, watched


@proof("offload", count=300, sample=10, counts=("lru", "loads", "less"))
def kept_chunks_move_least(seed: int) -> dict[str, float]:
    """Drawn events of a step, with rooms that change from one to the next: chunks read are the fewest of all choices of
    what stays, no more than by last use, and never more stay than there is room for. Loads of both are counted."""
    loads, lru = compared(1000 + seed)
    return {"lru": lru, "loads": loads, "less": float(loads < lru)}


def with_chunks(run: RunConfig, rng: random.Random) -> RunConfig:
    """The run with a drawn size of chunks, and of the host's memory from little more than the window and saved inputs
    take to as much as all files."""
    opened = preparing.Run(run)
    files = [one for one in (opened.param_files, opened.state_files) if one is not None]
    window, whole = (sum(getattr(one, name) for one in files) for name in ("window_bytes", "bytes"))
    host = (window + (320 << 10) + int(rng.random() * whole)) // 8
    return dataclasses.replace(run, disk=dataclasses.replace(run.disk, host=host, chunk=4096 << rng.randint(0, 5)))


@proof("offload", count=16, sample=1)
def kept_chunks_change_no_bit(seed: int) -> None:
    """Drawn windows, sizes of chunks and of the host's memory, saves, evaluations, gradient clipping, inputs of layers
    in files or not, state alone in files or parameters too: parameters, moments and losses of the streamed run without
    chunks, or of the run with its state in memory; the bytes of chunks never exceed what is left of the memory."""
    rng = random.Random(seed)
    layers, window, parameters = rng.choice([1, 3, 6]), rng.randint(2, 4), rng.random() < 0.6
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        here, left = Path(folder), watched(patch)
        disk = DiskConfig(str(here / "files"), window=window, parameters=parameters)
        every, evaluate = rng.randint(4, 12), rng.choice([0, 5])
        if parameters:
            disk = dataclasses.replace(disk, activations=rng.random() < 0.3)
            clip_norm = rng.choice([None, 0.5])
            made = streamed.run(here, layers, disk, every=every, clip_norm=clip_norm, eval_every=evaluate)
            expected = streamed.streamed(layers, clip_norm)
        else:
            made = state_alone.run(here, layers, disk, every=every, eval_every=evaluate)
            expected = state_alone.resident(layers)
        done = train(with_chunks(made, rng))
        assert (streamed.hashes(done.directory), losses(done.directory)) == expected
        assert left or layers == 1
        assert min(left, default=0) >= 0


@proof("offload", count=4, sample=1, counts=("none", "lru", "loads"))
def kept_chunks_beat_lru(seed: int) -> dict[str, float]:
    """A transformer's step with its optimizer state, with and without gradient clipping, on the events that the run
    recorded: the run reads what the schedule says, no more than by last use, which is less than without chunks; with
    every amount of memory up to all files the schedule reads no more than by last use, and less with some. Chunks of
    the last step are counted."""
    rng = random.Random(seed)
    runs: list[Any] = []
    prepare = preparing.Run.__init__

    def prepared(self: Any, *args: Any, **fields: Any) -> None:
        prepare(self, *args, **fields)
        runs.append(self)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing.Run, "__init__", prepared)
        here = Path(folder)
        disk = DiskConfig(
            str(here / "files"), window=2, parameters=True, host=200 << 10, chunk=rng.choice([1, 2]) << 14
        )
        clip_norm = (None, 0.5)[seed % 2]
        done = train(streamed.run(here, 5, disk, clip_norm=clip_norm, steps=6, mesh="fsdp=4,tensor=2"))
        chunks = runs[-1].param_files.chunks
        events = chunks.schedule.events
        rows = [row for row in RunDirectory(done.directory).read_metrics() if "nll" in row]
    schedule = ChunkSchedule(events)
    loads = [schedule.step().chunks_read for _ in range(4)]
    lru, none = (replayed_loads(events, 4, how)[-1] for how in ("oldest use", "none kept"))
    assert rows[-1]["disk_read_bytes"] <= loads[-1] * disk.chunk
    assert rows[-1]["disk_read_bytes"] > 0.5 * loads[-1] * disk.chunk
    assert loads[-1] <= lru <= none
    assert rows[-1]["disk_read_bytes"] < none * disk.chunk
    less = 0
    for room in range(0, none, max(1, none // 40)):
        others = [event._replace(room=room) for event in events]
        each = ChunkSchedule(others)
        found = [each.step().chunks_read for _ in range(4)][-1]
        by_last_use = replayed_loads(others, 4)[-1]
        assert found <= by_last_use <= none
        less += found < by_last_use
    assert less > 0
    return {"none": none, "lru": lru, "loads": loads[-1]}


def start(out: Path, log: Path) -> Any:
    """``jaxllm train --disk --host`` of the run that is killed."""
    words = ("--disk", f"{out / 'files'}:64MiB", "--host", "1MiB", "--disk.chunk", "8192")
    return start_run(out, log, *words, *streamed.STREAMED)


@functools.cache
def kept() -> int:
    """Bytes that an unbroken run did not read because they stayed in memory."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder), Path(folder) / "log"
        code = start(out, log).wait(timeout=300)
        assert code == 0, f"exit status {code}:\n{log.read_text()[-3000:]}"
        return sum(row.get("disk_kept_bytes", 0) for row in RunDirectory(out / "tiny").read_metrics())


@proof("offload", count=100, sample=1)
def kills_with_kept_chunks(seed: int) -> None:
    """One or two SIGKILLs at random: the run ends with the bits of a streamed one without chunks that is not killed;
    chunks did stay in memory."""
    streamed.killed(seed, start)
    assert kept() > 0
