"""Memory of a process that trains with its parameters on disk, as the system counts it, and a timeline of its step."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxllm.data import Prefetcher
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.io_timeline import IoSpan, IoTimeline, merged, timed
from jaxllm.train.disk.layer_stream_step import Dispatched, LayerStreamStep
from jaxllm.train.disk.streamed_bytes import LayerBytes, peak_of_layers
from jaxllm.train.recovery.resume import start_state
from jaxllm.train.run import Run
from tests.process_memory import measurable, numbers_of
from tests.train.runs import run_config
from tests.train.streamed_memory import WINDOW


def peak(layers: int, where: str, folder: Path) -> tuple[int, int]:
    """(bytes of a layer, most bytes of a process of its own in its steps)."""
    size, most = numbers_of("tests.train.streamed_memory", layers, where, folder)
    return size, most


@pytest.mark.drawn(3)
@measurable
def test_memory_does_not_grow_with_layers(tmp_path):
    """Layers of 22 MiB, with Adam's moments and gradients 88: eight more in files take less than two of these 32 parts,
    where eight more in memory take all. Most bytes are about half of what the formulas of device and host say together
    (measured: 0.4 to 0.53): arrays on a CPU are views of the host's buffers, and one program runs at a time. They are
    no less than a layer's parameters, moments and gradients."""
    size, few = peak(4, "files", tmp_path / "few")
    many, resident = (peak(12, where, tmp_path / where)[1] for where in ("files", "memory"))
    assert abs(many - few) < 2 * size
    assert resident > 12 * 4 * size
    one = LayerBytes(size, 2 * size)
    host = WINDOW * (one.parameters + one.state)
    limit = peak_of_layers([one], 12, WINDOW, LayerBytes(0, 0), 0, temporaries=size).arrays + host
    assert 4 * size < many < 0.75 * limit


def test_the_hidden_share_by_hand():
    """A read from 0 to 4 and a write from 3 to 6 beside programs from 1 to 2 and from 5 to 9: 2 of 6 seconds."""
    line = IoTimeline()
    line.spans = [
        IoSpan("read", 0, 4, 2**20), IoSpan("compute", 1, 2), IoSpan("write", 3, 6, 2**21), IoSpan("compute", 5, 9),
    ]  # fmt: skip
    assert line.hidden() == pytest.approx(2 / 6)
    assert merged([(3, 6), (0, 4), (8, 9)]) == [(0, 6), (8, 9)]
    page = line.page("a step")
    assert "33% of the seconds" in page
    assert "4000.0 ms, 1.0 MiB" in page
    assert page.count("<rect") == 4
    assert IoTimeline().hidden() == 1


def test_a_program_begins_when_it_is_dispatched():
    """Also one that is done when the call that dispatches it returns, as small programs on a CPU are."""

    def program(x):
        time.sleep(0.05)
        return x, x + 1

    given = jax.block_until_ready(jnp.zeros(3))
    for watched in (None, 1):
        line = IoTimeline()
        before = time.monotonic()
        found = Dispatched(line).run(program if watched else lambda x: program(x)[1], given, watched=watched)
        line.finish()
        assert (found[1] if watched else found).tolist() == [1, 1, 1]
        (span,) = line.spans
        assert span.begin - before < 0.05
        assert span.end - span.begin >= 0.05


def test_a_program_that_fails_ends_the_timeline():
    """Its span is not known, so the hidden share would be wrong: a donated result, and an error of the program."""
    donated = jnp.zeros(3)
    donated.delete()
    line = IoTimeline()
    line.dispatched(donated, time.monotonic())
    line.dispatched(jnp.zeros(3), time.monotonic())
    with pytest.raises(RuntimeError, match="deleted"):
        line.finish()
    assert len(line.spans) == 1


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("parameters", [True, False])
def test_the_timeline_of_a_step_has_all_it_moves(tmp_path, parameters):
    """Bytes of its spans are those that the tiers count; each program ends before the next one begins."""
    config = run_config(tmp_path, clip_norm=None)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, layers=4, remat="full"),
        disk=DiskConfig(str(tmp_path / "files"), window=2, parameters=parameters),
    )
    run = Run(config, devices=jax.devices()[:1])
    step, _ = run.compile_step()
    with run.saver() as saver, jax.set_mesh(run.mesh), Prefetcher(run.batches, 0, run.put_batch) as batches:
        state, _ = start_state(run, saver)
        tiers = [files.tier for files in (run.state_files, run.param_files) if files is not None]
        for number, batch in batches:
            if number == 1:
                for tier in tiers:
                    tier.flush()
                before = [dict(tier.moved) for tier in tiers]
                step.timeline = timed(tiers)
            state, _ = step(state, batch)
            if number == 1:
                break
        for tier in tiers:
            tier.flush()
    line = step.timeline
    assert line is not None
    line.finish()
    spans = line.spans
    for what in ("read", "write"):
        counted = sum(tier.moved[what] - old.get(what, 0) for tier, old in zip(tiers, before, strict=True))
        assert sum(one.bytes for one in spans if one.lane == what) == counted > 0
    programs = [one for one in spans if one.lane == "compute"]
    # Forward and backward of four layers, their updates, embedding, head and ends; or gradients and five updates.
    assert len(programs) == (15 if isinstance(step, LayerStreamStep) else 6)
    assert all(a.end <= b.begin <= b.end for a, b in itertools.pairwise(programs))
    assert 0 <= line.hidden() <= 1
