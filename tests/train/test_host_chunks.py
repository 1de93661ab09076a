"""Chunks of files in the host's memory: fewest reads, the same bits, never more bytes than there is room for."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from jaxllm.train import train
from jaxllm.train.disk.chunk_schedule import ChunkEvent, ChunkSchedule, replayed_loads
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.host_chunks import HostChunks
from jaxllm.train.disk.saved_inputs import HostInputs
from jaxllm.train.disk.state_file import DiskTierError
from tests.train import test_disk
from tests.train.test_disk import opened, same_bits, saved
from tests.train.test_streamed_parameters import config

__all__ = ["opened"]

CHUNK = 32 * 1024


def fewest_loads(events: list[ChunkEvent], steps: int) -> int:
    """Fewest chunks read of all choices of what stays, by dynamic programming over sets of chunks in memory."""
    best = {frozenset[int](): 0}
    for event in events * steps:
        after: dict[frozenset[int], int] = {}
        for here, loads in best.items():
            cost = loads + len(set(event.reads) - here)
            able = sorted(here.difference(event.reads).union(event.offers))
            for count in range(min(len(able), event.room) + 1):
                for stay in itertools.combinations(able, count):
                    now = frozenset(stay)
                    after[now] = min(after.get(now, cost), cost)
        best = after
    return min(best.values())


def compared(seed: int) -> tuple[int, int]:
    """Drawn events, whose chunks are read and offered again later, and rooms that change: loads of the schedule are the
    fewest of all choices, kept chunks never exceed the room, and are there when the schedule says so. Loads of the
    schedule and by last use."""
    rng = random.Random(seed)
    chunks, length, steps = rng.randint(2, 6), rng.randint(2, 8), rng.randint(1, 3)
    events: list[ChunkEvent] = []
    taken: list[tuple[int, ...]] = []
    for _ in range(length):
        room = rng.randint(0, 4)
        free = sorted(set(range(chunks)).difference(*taken))
        if taken and (rng.random() < 0.6 or not free):
            events.append(ChunkEvent((), taken.pop(rng.randrange(len(taken))), room))
        else:
            taken.append(tuple(sorted(rng.sample(free, rng.randint(1, min(3, len(free)))))))
            events.append(ChunkEvent(taken[-1] if rng.random() < 0.8 else (), (), room))  # or the window had them
    events += [ChunkEvent((), one, rng.randint(0, 4)) for one in taken]
    schedule, kept, loads = ChunkSchedule(events), set(), []
    for _ in range(steps):
        step = schedule.step()
        loads.append(step.chunks_read)
        for place, event in enumerate(events):
            assert set(step.loads[place]) == set(event.reads) - kept
            kept = kept.difference(event.reads).union(step.keeps[place])
            assert set(step.keeps[place]) <= set(event.offers)
            assert len(kept) <= event.room
    lru, none = (sum(replayed_loads(events, steps, how)) for how in ("oldest use", "none kept"))
    assert sum(loads) == fewest_loads(events, steps)
    assert none == steps * sum(len(event.reads) for event in events)
    assert sum(loads) <= lru <= none
    return sum(loads), lru


def test_a_schedule_holds_no_more_after_more_steps():
    layers = [tuple(range(8 * layer, 8 * layer + 8)) for layer in range(6)]
    events = [event for one in layers for event in (ChunkEvent(one, (), 40), ChunkEvent((), one, 40))]
    schedule = ChunkSchedule(events)
    for _ in range(20):
        schedule.step()
        assert len(schedule._heap) <= 2 * 48, "entries of chunks that were read are gone"


@pytest.mark.parametrize("seed", range(15))
def test_the_chunks_that_stay_are_the_best(seed):
    compared(seed)


def watched(monkeypatch) -> list[int]:
    """Bytes that are left of the host's memory whenever chunks or saved inputs take more of it."""
    left: list[int] = []
    made: list[HostChunks] = []
    begin, memory, put = HostChunks.begin, HostChunks._memory, HostInputs.put

    def look(chunks: HostChunks) -> None:
        if chunks._live is not None:
            left.append(chunks._limit - chunks._buffers - chunks._live() - chunks.bytes)

    def begun(self, live):
        made[:] = [self]
        begin(self, live)
        look(self)

    def looking(self):
        found = memory(self)
        look(self)
        return found

    def saving(self, layer, micro, x):
        put(self, layer, micro, x)
        for one in made:
            look(one)

    monkeypatch.setattr(HostChunks, "begin", begun)
    monkeypatch.setattr(HostChunks, "_memory", looking)
    monkeypatch.setattr(HostInputs, "put", saving)
    return left


@pytest.mark.drawn(0.5)
def test_a_run_reads_less_and_has_the_same_bits(tmp_path, opened, monkeypatch):
    """Bytes read are those of the schedule, and less than by last use; the host's memory is kept to, with
    saved inputs in it, also with evaluations and saves between steps."""
    fields: dict[str, Any] = {
        "steps": 5,
        "every": 3,
        "clip_norm": 0.5,
        "mesh": "fsdp=4,tensor=2",
        "accumulate": 2,
        "eval_every": 2,
    }
    plain = train(config(tmp_path, out=tmp_path / "plain", layers=4, window=2, **fields))
    run = config(tmp_path, layers=4, window=2, **(fields | {"eval_every": 0}))
    left = watched(monkeypatch)
    disk = dataclasses.replace(run.disk, host=240 * 1024, chunk=CHUNK)
    done = train(dataclasses.replace(run, disk=disk))
    assert same_bits(saved(done.directory), saved(plain.directory))
    chunks = opened[-1].param_files.chunks
    schedule = chunks.schedule
    sizes = {}
    for files in (opened[-1].param_files, opened[-1].state_files):
        for unit, numbers in enumerate(files.tier.chunks.numbers):
            rest = files.layout(unit).size
            for number in numbers:
                sizes[number] = min(CHUNK, rest)
                rest -= CHUNK
    fresh = ChunkSchedule(schedule.events)
    steps = [sum(sizes[one] for event in fresh.step().loads for one in event) for _ in range(3)]
    rows = [row for row in opened[-1].directory.read_metrics() if "nll" in row]
    assert [row["disk_read_bytes"] for row in rows[2:]] == steps
    none = rows[-1]["disk_read_bytes"] + rows[-1]["disk_kept_bytes"]
    assert rows[-1]["disk_written_bytes"] > 0
    assert none == sum(sizes[one] for event in schedule.events for one in event.reads)
    assert fresh.step().chunks_read < replayed_loads(schedule.events, 4)[-1]
    assert steps[-1] < none
    assert left
    assert min(left) >= 0
    left.clear()
    disk = dataclasses.replace(disk, host=320 * 1024)
    evaluated = train(dataclasses.replace(run, disk=disk, out=str(tmp_path / "evaluated"), eval_every=2))
    assert same_bits(saved(evaluated.directory), saved(plain.directory))
    assert min(left) >= 0


@pytest.mark.drawn(0.5)
def test_state_alone_in_files(tmp_path, opened, monkeypatch):
    """Every other step goes backwards; the bits are those of the state in memory; damage of what stays is named."""
    fields: dict[str, Any] = {"steps": 7, "every": 9}
    plain = train(test_disk.config(tmp_path, disk=False, out=tmp_path / "plain", **fields))
    run = test_disk.config(tmp_path, window=2, **fields)
    left = watched(monkeypatch)
    run = dataclasses.replace(run, disk=dataclasses.replace(run.disk, host=36 * 1024, chunk=4096))
    read = []
    begin = HostChunks.begin

    def begun(self, live):
        read.append(opened[-1].state_files.tier.moved["read"])
        begin(self, live)

    monkeypatch.setattr(HostChunks, "begin", begun)
    done = train(run)
    assert same_bits(saved(done.directory), saved(plain.directory))
    each = np.diff(read)
    assert each[-1] < each[0]
    assert min(left) >= 0

    def damaged(self, numbers):
        found = {number: memory.copy() for number, memory in there(self, numbers).items()}
        for memory in found.values():
            memory[5] ^= 1
        return found

    there = HostChunks.there
    monkeypatch.setattr(HostChunks, "there", damaged)
    with pytest.raises(DiskTierError, match=r"opt_state.* is damaged"):
        train(dataclasses.replace(run, out=str(tmp_path / "damaged")))


def test_limits_say_what_to_give(tmp_path):
    run = config(tmp_path, layers=2, steps=1)
    with pytest.raises(DiskTierError, match=r"disk.host: .* layers in the window and saved inputs take .* give more"):
        train(dataclasses.replace(run, disk=dataclasses.replace(run.disk, host=4096)))
    for fields, said in (
        ({"host": -1}, r"host = -1; give 0"),
        ({"directory": "", "host": 4096}, r"disk.directory is empty"),
        ({"chunk": 5000}, r"chunk = 5000; give a multiple of 4096"),
    ):
        with pytest.raises(ValueError, match=said):
            DiskConfig(**({"directory": "files"} | fields))  # type: ignore[arg-type]
