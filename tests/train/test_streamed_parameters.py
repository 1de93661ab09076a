"""Parameters on disk, streamed layer by layer: the same numbers, resumes, bytes by formula, damage by name."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import time
import weakref
from collections import deque
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.checkpoint import Checkpointer
from jaxllm.config import ConfigError
from jaxllm.models import MoeConfig
from jaxllm.train import train
from jaxllm.train.disk import state_files
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_tier import DiskTier, IoEvent
from jaxllm.train.disk.layer_stream_step import IN_FLIGHT, LayerStreamStep
from jaxllm.train.disk.saved_inputs import DiskInputs, layers_in_files
from jaxllm.train.disk.state_file import DiskTierError, FileLayout, StateFile
from jaxllm.train.disk.streamed_bytes import device_peak, micro_batch_major_reads, step_traffic
from jaxllm.train.run import Run
from jaxllm.train.step.loss_spikes import SpikeConfig
from jaxllm.train.step.param_average import EmaConfig
from jaxllm.train.step.routing_losses import RoutingConfig
from tests.infer.live_bytes import LiveBytes
from tests.train.runs import losses, run_config, stopped_at
from tests.train.test_disk import failing_from, flip_bit, opened, same_bits, saved
from tests.train.test_spikes import batches

__all__ = ["opened"]

LAYERS = 6
NO_LOSSES = RoutingConfig()


def config(folder, disk=True, window=3, layers=LAYERS, mlp=None, routing=NO_LOSSES, **fields):
    """A run of six layers, with its parameters on disk or in memory."""
    run = run_config(folder, **({"steps": 6, "every": 3, "clip_norm": None} | fields))
    pattern = run.model.pattern if mlp is None else (dataclasses.replace(run.model.pattern[0], mlp=mlp),)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, layers=layers, remat="full", pattern=pattern),
        routing=routing,
        disk=DiskConfig(str(folder / "files"), window=window, parameters=True) if disk else DiskConfig(),
    )


@pytest.fixture
def steps(monkeypatch):
    """The streamed steps that run, with the arrays on devices before each program, in bytes."""
    found: list[LayerStreamStep] = []
    begin = LayerStreamStep.__init__

    def made(self, *args):
        begin(self, *args)
        found.append(self)

    monkeypatch.setattr(LayerStreamStep, "__init__", made)
    return found


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"accumulate": 2, "mesh": "fsdp=2,tensor=2,data=2", "clip_norm": 0.5},
        {
            "mlp": MoeConfig(4, 2, 16),
            "routing": RoutingConfig(balance_loss=0.1, z_loss=0.01),
            "accumulate": 2,
            "mesh": "fsdp=4,context=2",
        },
    ],
    ids=["plain", "micro-batches on a mesh", "experts"],
)
def test_a_streamed_run_is_the_resident_one(tmp_path, fields):
    """To rounding: the program of one layer sums in another order than that of all. The proofs do it in float64."""
    plain = train(config(tmp_path, disk=False, out=tmp_path / "plain", **fields))
    done = train(config(tmp_path, **fields))
    for (_, loss, norm), (_, other, other_norm) in zip(losses(done.directory), losses(plain.directory), strict=True):
        assert loss == pytest.approx(other, rel=3e-6)
        assert norm == pytest.approx(other_norm, rel=3e-5)
    ours, theirs = saved(done.directory), saved(plain.directory)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours["params"]), jax.tree.leaves(theirs["params"]), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert done.evaluation is not None
    assert plain.evaluation is not None
    assert done.evaluation.nll == pytest.approx(plain.evaluation.nll, rel=3e-6)
    assert os.listdir(tmp_path / "files") == []


@pytest.mark.drawn(1)
def test_a_stopped_run_resumes_to_the_bit(tmp_path):
    """Its checkpoint is that of parameters in memory, which a run with another window takes up as well."""
    whole = train(config(tmp_path, out=tmp_path / "whole"))
    first = config(tmp_path, saving="lazy")
    fields = {name: getattr(first, name) for name in ("model", "disk", "optim")}
    stopped = stopped_at(tmp_path, 4, steps=6, every=3, **fields)
    done = train(config(tmp_path, window=2))
    assert done.directory == stopped
    assert losses(done.directory) == losses(whole.directory)
    assert same_bits(saved(done.directory), saved(whole.directory))


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("source", ["a run", "safetensors"])
def test_a_loaded_model_goes_to_the_files_array_by_array(tmp_path, source, monkeypatch):
    """The first step's loss is that of the loaded parameters, and few of them are on the device at a time."""
    first = config(tmp_path, disk=False, out=tmp_path / "first", steps=2)
    begin = str(train(first).directory)
    if source == "safetensors":
        assert cli.main(["convert", begin, str(tmp_path / "model"), "--to", "hf"]) == 0
        begin = str(tmp_path / "model")
    at_once: list[int] = []
    write = state_files._write

    def written(file, shards, array):
        arrays = (x for x in jax.live_arrays() if x.ndim > 1 and x.shape[0] == LAYERS)
        at_once.append(len(list(arrays)))
        write(file, shards, array)

    ends = []
    for disk in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(state_files, "_write", written)
            ends.append(train(config(tmp_path, disk, steps=2, init_from=begin, out=tmp_path / str(disk))).directory)
    for (_, loss, _), (_, other, _) in zip(*map(losses, ends), strict=True):
        assert loss == pytest.approx(other, rel=3e-6)
    assert max(at_once) <= 1


@pytest.mark.drawn(0.5)
def test_a_rollback_restores_both_tiers(tmp_path):
    spikes = SpikeConfig("rollback", window=4, back=2, pass_over=4)
    run = config(tmp_path, layers=2, steps=12, every=3, spikes=spikes, saving="lazy")
    with batches():
        done = train(run)
    spike, *_ = Checkpointer(done.directory / "checkpoints", read_only=True).read_meta()["spikes"]
    assert (spike["step"], spike["from"]) == (9, 6)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("remat", ["full", "elementwise"])
def test_bytes_are_those_of_the_formulas(tmp_path, opened, steps, monkeypatch, remat):
    """Reads and writes of each step, and what the device holds at most: one micro-batch; four and clipped gradients;
    layers that save their inputs alone, or named values.

    Never more than the formula, which takes all that may be there at once. Where it is as late as a real device may
    be, with the arrays of ``IN_FLIGHT`` programs beside the next one, and the disk is slow, so that what leaves waits,
    0.67 to 0.8 of it was seen, and 0.53 to 0.75 with values; else 0.33 and more."""
    recent: deque[object] = deque(maxlen=IN_FLIGHT)
    write = StateFile.write

    def slow(self, buffer):
        time.sleep(0.03)
        write(self, buffer)

    def counted(x: jax.Array) -> bool:  # without tokens
        return jax.numpy.issubdtype(x.dtype, jax.numpy.floating) and x.sharding.memory_kind == "device"

    for count, late in ((1, False), (4, False), (1, True), (4, True)):
        recent.clear()
        live = LiveBytes(counted)

        def measured(self, state, batch, call=LayerStreamStep.__call__, late=late, live=live):
            programs = self._programs

            def counting(program):
                if not callable(program):
                    return program

                def called(*args):
                    out = program(*args)
                    live.look()
                    if late:
                        recent.append((args, out))
                    return out

                return called

            watched = {
                name: {s: counting(one) for s, one in part.items()} if isinstance(part, dict) else counting(part)
                for name, part in ((f.name, getattr(programs, f.name)) for f in dataclasses.fields(programs))
            }
            self._programs = type(programs)(**watched)
            try:
                return call(self, state, batch)
            finally:
                self._programs = programs

        fields = {"steps": 4, "every": 9, "batch_size": 32, "clip_norm": None if count == 1 else 0.5}
        with monkeypatch.context() as patch:
            patch.setattr(LayerStreamStep, "__call__", measured)
            if late:
                patch.setattr(StateFile, "write", slow)
            made = config(tmp_path, accumulate=count, out=tmp_path / f"{count} {late}", **fields)
            done = train(dataclasses.replace(made, model=dataclasses.replace(made.model, remat=remat)))
        run, step = opened[-1], steps[-1]
        traffic = step_traffic(run.param_files, run.state_files, clipped=count > 1)
        rows = [row for row in run.directory.read_metrics() if "nll" in row]
        assert [row["disk_written_bytes"] for row in rows] == [traffic.written] * 4
        assert [row["disk_read_bytes"] for row in rows[1:]] == [traffic.read] * 3
        sizes = [run.param_files.layout(n).size for n in range(LAYERS)]
        assert rows[0]["disk_read_bytes"] == traffic.read + sum(sizes[:3]), "nothing is in memory before the first step"
        limit = device_peak(step._programs, step._of, step._files)
        # Values are not there with all else: updates come between the backward programs that read them.
        least = (0.45 if limit.values else 0.6) if late else 0.25
        assert least * limit.arrays < live.most[jax.devices()[0]] <= limit.arrays
        assert done.complete


@pytest.mark.drawn(1)
def test_inputs_of_layers_on_disk_are_written_once(tmp_path, opened, steps, monkeypatch):
    """The same bits; what the window has at the turn is forwarded and never read; a flipped bit is named."""
    fields = {"steps": 3, "every": 9, "accumulate": 2, "mesh": "fsdp=2,tensor=2,data=2"}
    host = config(tmp_path, out=tmp_path / "host", **fields)
    disk = config(tmp_path, **fields)
    disk = dataclasses.replace(disk, disk=dataclasses.replace(disk.disk, activations=True))
    logs: list[list[IoEvent]] = []
    begin = DiskInputs.begin

    def begun(self):
        logs.append([])
        if len(logs) > 1:
            logs[-2].extend(self.tier.log[: -len(self.layouts)])
        del self.tier.log[: -len(self.layouts)]
        begin(self)

    made = DiskTier.__post_init__

    def logging(self):
        made(self)
        self.log = []

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "__post_init__", logging)
        patch.setattr(DiskInputs, "begin", begun)
        done = train(disk)
    run, inputs = opened[-1], steps[-1].inputs
    assert isinstance(inputs, DiskInputs)
    units = list(range(2 * LAYERS))
    logs[-1].extend(inputs.tier.log or [])
    for log in logs[1:]:
        said = {what: [event.unit for event in log if event.what == what] for what in ("write", "forward", "read")}
        assert sorted(said["write"]) == units
        assert said["forward"] == units[: -run.config.disk.window - 1 : -1]
        assert sorted(said["read"] + said["forward"]) == units
    traffic = step_traffic(run.param_files, run.state_files, inputs.sizes)
    row = [row for row in run.directory.read_metrics() if "nll" in row][-1]
    assert (row["disk_read_bytes"], row["disk_written_bytes"]) == traffic
    assert same_bits(saved(done.directory), saved(train(host).directory))

    part = dataclasses.replace(disk, disk=dataclasses.replace(disk.disk, activation_layers=2), out=str(tmp_path / "2"))
    assert same_bits(saved(train(part).directory), saved(done.directory))
    few = steps[-1].inputs.sizes
    assert len(few) == 2 * 2
    row = [row for row in opened[-1].directory.read_metrics() if "nll" in row][-1]
    assert (row["disk_read_bytes"], row["disk_written_bytes"]) == (
        traffic.read - (2 * LAYERS - 2 * 2) * few[0],
        traffic.written - (2 * LAYERS - 2 * 2) * few[0],
    )
    assert row["disk_read_bytes"] == step_traffic(opened[-1].param_files, opened[-1].state_files, few).read
    with pytest.raises(DiskTierError, match=r"activation_layers = 7, but 6 layers are streamed; give at most as many"):
        layers_in_files(dataclasses.replace(disk.disk, activation_layers=7), LAYERS)

    def flipped(self):
        self.tier.flush()
        flip_bit(self.tier, unit=3, part=0)
        begin(self)

    monkeypatch.setattr(DiskInputs, "begin", flipped)
    with pytest.raises(DiskTierError, match=r"input of layer 1, micro-batch 0: hidden states is damaged"):
        train(dataclasses.replace(disk, out=str(tmp_path / "flipped")))


def test_layer_major_order_moves_the_parameters_once(tmp_path):
    """The tier in the order of micro-batches reads what the formula says, layer-major order as much as one of them."""
    window, count = 3, 4
    for layers in (2, 5, 9):
        layouts = [FileLayout(f"layer {n}", ["x"], [5000 + n]) for n in range(layers)]
        sizes = [layout.size for layout in layouts]
        sweep = [*range(layers), *reversed(range(layers))]
        reads = {}
        for name, order in (("layers", sweep), ("micro-batches", sweep * count)):
            tier = DiskTier(tmp_path, layouts, window)
            for file in tier.renew():
                file.write_part(0, np.zeros(file.layout.sizes[0], np.uint8))
            for _ in range(3):
                before = tier.moved["read"]
                tier.begin(order)
                for unit in order:
                    tier.take(unit)
                    tier.release(unit, lambda: None)
                reads[name] = tier.moved["read"] - before
        assert reads["layers"] == micro_batch_major_reads(sizes, window, 1)
        assert reads["micro-batches"] == micro_batch_major_reads(sizes, window, count) == count * reads["layers"]


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("pwrite", errno.ENOSPC, r"of layers 0/\d: (params|opt_state).*: writing .*files failed: .*No space left"),
        ("preadv", errno.EIO, r"of layers 0/\d: (params|opt_state).*: reading .*files failed: .*Input/output error"),
        ("flip", 0, r"parameters of layers 0/4: params.* is damaged"),
    ],
)
def test_a_disk_that_fails_is_named_and_the_run_resumes(tmp_path, monkeypatch, call, error, said):
    whole = train(config(tmp_path, out=tmp_path / "whole"))
    stepped, count = LayerStreamStep.__call__, iter(range(99))
    real = {name: getattr(os, name) for name in ("pwrite", "preadv")}

    def failing(self, state, batch):
        """The fifth step's disk fails."""
        if next(count) == 4:
            if call == "flip":
                for tier in (self._of.params.tier, self._files.tier):
                    tier.flush()
                flip_bit(self._of.params.tier, unit=4, part=2)
            else:
                monkeypatch.setattr(os, call, failing_from(3, error)(real[call]))
        return stepped(self, state, batch)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStreamStep, "__call__", failing)
        with pytest.raises(DiskTierError, match=said + r"[\s\S]* checkpoint of step 3 is intact; start again"):
            # A checkpoint that is still read from the file whose bit is flipped would be damaged too.
            train(config(tmp_path, saving="blocking"))
    for name, function in real.items():
        monkeypatch.setattr(os, name, function)
    assert same_bits(saved(train(config(tmp_path)).directory), saved(whole.directory))


def test_too_little_room_counts_both(tmp_path):
    run = config(tmp_path)
    room = Run(run)
    assert room.param_files is not None
    assert room.state_files is not None
    both = room.param_files.bytes + room.state_files.bytes
    for size, fits in ((2 * both, True), (2 * both - 1, False)):
        limited = dataclasses.replace(run, disk=dataclasses.replace(run.disk, bytes=size))
        if fits:
            Run(limited)
            continue
        with pytest.raises(DiskTierError, match=r"parameters of layers and the optimizer state take .* disk.bytes"):
            Run(limited)


@pytest.mark.drawn(1)
def test_files_that_exist_are_not_counted_again(tmp_path, monkeypatch):
    """A disk with room for twice the state and the saved inputs, and no more: trained on, checkpoints written."""
    files, made = weakref.WeakSet(), StateFile.__init__
    monkeypatch.setattr(StateFile, "__init__", lambda self, *given: (made(self, *given), files.add(self))[0])
    room = Run(run := config(tmp_path))
    assert room.param_files is not None
    assert room.state_files is not None
    both, inputs = room.param_files.bytes + room.state_files.bytes, []
    check = Run.check_disk
    monkeypatch.setattr(Run, "check_disk", lambda self, size=0: (inputs.append(size), check(self, size))[1])
    run = dataclasses.replace(run, disk=dataclasses.replace(run.disk, activations=True), steps=3)
    free = [2**40]

    def usage(path):
        return SimpleNamespace(free=free[0] - sum(one.layout.size for one in files))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    train(dataclasses.replace(run, out=str(tmp_path / "much"), steps=1))
    assert inputs[-1] > 0
    files.clear()
    free[0] = 2 * both + inputs[-1] - 1
    with pytest.raises(DiskTierError, match=r"the inputs of layers .* free there, or reserved already"):
        train(run)
    files.clear()
    free[0] += 1
    train(run)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ema": EmaConfig(0.9)}, r"disk.parameters does not go with ema.decay = 0.9: .* set ema.decay to 0"),
        ({"model.remat": "none"}, 'set model.remat to "full", "attention", "elementwise" or "save:VALUES"'),
    ],
)
def test_what_needs_all_layers_is_refused(tmp_path, fields, said):
    run = config(tmp_path, **{name: value for name, value in fields.items() if "." not in name})
    if "model.remat" in fields:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, remat="none"))
    with pytest.raises(ConfigError, match=re.compile(said)):
        Run(run)
    with pytest.raises(ValueError, match=r"disk.directory is empty"):
        DiskConfig(parameters=True)
    with pytest.raises(ValueError, match=r"set disk.parameters to true too"):
        DiskConfig("files", activations=True)
    with pytest.raises(ValueError, match=r"activation_layers = 2 says how many"):
        DiskConfig("files", parameters=True, activation_layers=2)
