"""Adaptive share of saved inputs in files: the most that passes hide, against times played out tick by tick."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from jaxllm.train import train
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.hidden_share import DiskClock, InputTimes, PassRates
from jaxllm.train.disk.saved_inputs import DiskInputs, host_inputs, layers_in_files
from tests.train.test_disk import same_bits, saved
from tests.train.test_streamed_parameters import config, steps

__all__ = ["steps"]


def writes_in_time(times: InputTimes, layers: int) -> bool:
    """The forward pass in ticks: a writer, and at most a window of inputs that are not written."""
    waiting: list[float] = []  # ticks that are left of each write, the first one in progress
    for tick in range(round(times.layers * times.forward)):
        layer, rest = divmod(tick, round(times.forward))
        if rest == 0 and layer < layers:
            waiting += [times.write] * times.micro_batches
            if len(waiting) > times.window:
                return False
        if waiting:
            waiting[0] -= 1
            waiting = waiting[1:] if waiting[0] == 0 else waiting
    return not waiting


def reads_in_time(times: InputTimes, layers: int, number: int) -> bool:
    """A backward pass in ticks: a reader, and at most a window of inputs that are there or are being read."""
    each, read = round(times.backward[number] / times.micro_batches), times.reads[number]
    order = list(reversed(range(layers * times.micro_batches)))
    there = set(order[: times.window]) if number == 0 or len(order) <= times.window else set()
    rest, left, reading = [n for n in order if n not in there], math.inf, None
    start = (times.layers - layers) * times.micro_batches * each
    for tick in range(start + len(order) * each + 1):
        if reading is not None and left == 0:
            there.add(reading)
            reading = None
        place, begins = divmod(tick - start, each)
        if tick >= start and begins == 0:
            if place > 0:
                there.remove(order[place - 1])
            if place < len(order) and order[place] not in there:
                return False
        if reading is None and rest and len(there) < times.window:
            reading, left = rest.pop(0), read
        left -= 1
    return True


def compared(seed: int) -> None:
    """Drawn times: of all numbers of layers, the chosen one is the largest of which nothing is late when it is played
    out, and all smaller ones are in time too."""
    rng = random.Random(seed)
    micros, passes = rng.choice([1, 2, 3]), rng.choice([1, 2])
    times = InputTimes(
        rng.randint(1, 8),
        micros,
        rng.randint(2, 5),
        rng.randint(1, 8),
        tuple(float(micros * rng.randint(1, 8)) for _ in range(passes)),
        rng.randint(1, 6),
        tuple(rng.choice([math.inf, *range(1, 10)]) for _ in range(passes)),
    )
    fits = [
        writes_in_time(times, n) and all(reads_in_time(times, n, number) for number in range(passes))
        for n in range(times.layers + 1)
    ]
    assert [times.hides(n) for n in range(times.layers + 1)] == fits
    assert fits[0]
    assert times.most_hidden() == max(n for n, fit in enumerate(fits) if fit)


@pytest.mark.parametrize("seed", range(40))
def test_the_most_layers_that_are_hidden(seed):
    compared(seed)


def test_times_are_what_a_step_measured():
    """Seconds of a layer; what parameters and state read beside a pass is not left for inputs; nothing may be left."""
    clock = DiskClock()
    for what, size, seconds in (("read", 600, 2.0), ("write", 500, 5.0)):
        clock.bytes[what], clock.seconds[what] = size, seconds
    passes = [PassRates(4.0, 1000), PassRates(8.0, 1600), PassRates(8.0, 2400)]
    times = InputTimes.of(passes, clock, layers=4, micro_batches=2, window=3, size=50)
    assert times == (4, 2, 3, 1.0, (2.0, 2.0), 0.5, (50 / (300 - 200), math.inf))
    assert str(times) == (
        "a layer computes 1000.00 ms forward, 2000.00 backward, 2000.00 backward; its input takes 1000.00 ms to write, "
        "1000.00 to read, inf to read"
    )


@pytest.mark.drawn(0.5)
def test_a_run_chooses_after_its_second_step(tmp_path, steps, monkeypatch):
    """The bits of a run whose inputs are in memory, whatever is chosen; the log says what was; bytes fall by it."""
    fields = {"steps": 3, "every": 9, "accumulate": 2, "mesh": "fsdp=4,tensor=2", "clip_norm": 0.5}
    host = train(config(tmp_path, out=tmp_path / "host", layers=3, **fields))
    run = config(tmp_path, layers=3, **fields)
    run = dataclasses.replace(run, disk=dataclasses.replace(run.disk, activations=True, activation_layers="auto"))
    measured, sizes = InputTimes.of, set()
    for chosen in (0, 2):

        def slowed(*args, chosen=chosen, **fields):
            """Times by which so many layers are hidden, in the place of those that the step measured."""
            found = measured(*args, **fields)
            sizes.add(args[-1])
            assert found.forward > 0
            assert len(found.backward) == len(found.reads) == 2
            assert all(one > 0 for one in (*found.backward, found.write))
            write = 0.01 if chosen else 10.0
            return found._replace(forward=1.0, backward=(1.0, 1.0), write=write, reads=(0.5, 0.5))

        with monkeypatch.context() as patch:
            patch.setattr(InputTimes, "of", slowed)
            done = train(dataclasses.replace(run, out=str(tmp_path / str(chosen))))
        assert same_bits(saved(done.directory), saved(host.directory))
        inputs = steps[-1].inputs
        assert isinstance(inputs, DiskInputs)
        assert len(inputs.sizes) == 2 * chosen
        rows = [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]
        written = [row["disk_written_bytes"] for row in rows if "nll" in row]
        (size,) = sizes
        assert [written[0] - one for one in written] == [0, 0, 2 * (3 - chosen) * size]
    with pytest.raises(ValueError, match=r'activation_layers = -1; give 0 \(all\), a number of layers, or "auto"'):
        DiskConfig("files", parameters=True, activations=True, activation_layers=-1)
    assert host_inputs(run.disk, 3, 2) == 2 * 3, "all of them, until it is known"
    assert layers_in_files(run.disk, 3) == 3
