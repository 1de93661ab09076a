"""Optimizer state on disk: the same parameters, what is read and written, damage by name, resumes, limits."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer, CheckpointError
from jaxllm.checkpoint.storage.file_systems import LocalFiles
from jaxllm.config import ConfigError
from jaxllm.train import run as preparing
from jaxllm.train import train
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_tier import DiskTier, IoEvent, check_room
from jaxllm.train.disk.state_file import BLOCK, DiskTierError, FileLayout, StateFile, aligned_buffer
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.run import Run
from jaxllm.train.step.loss_spikes import SpikeConfig
from tests.optim.kinds import named
from tests.parallel.test_distributed import in_each
from tests.train.runs import losses, run_config, stopped_at
from tests.train.test_spikes import batches

LAYERS = 5


def config(folder, disk=True, window=3, kind="adamw", **fields):
    """A run of five layers, with its optimizer state on disk or in memory."""
    run = run_config(folder, **({"steps": 6, "every": 3} | fields))
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, layers=LAYERS),
        optim=named(kind, schedule=run.optim.schedule) if kind != "adamw" else run.optim,
        disk=DiskConfig(str(folder / "files"), window=window) if disk else DiskConfig(),
    )


def saved(directory):
    """The newest checkpoint, as arrays."""
    return Checkpointer(directory / "checkpoints", read_only=True).restore()[0]


def same_bits(one, other):
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@pytest.fixture
def opened(monkeypatch):
    """The runs that are prepared, to look at their files."""
    runs, prepare = [], preparing.Run.__init__

    def prepared(self, *args, **kwargs):
        prepare(self, *args, **kwargs)
        runs.append(self)

    monkeypatch.setattr(preparing.Run, "__init__", prepared)
    return runs


def files_of(run: Run):
    assert run.state_files is not None
    return run.state_files


@pytest.mark.drawn(1)
@pytest.mark.parametrize("saving", ["blocking", "lazy"])
def test_a_run_is_the_same_to_the_bit(tmp_path, saving):
    plain = train(config(tmp_path, disk=False, out=tmp_path / "plain"))
    done = train(config(tmp_path, saving=saving))
    assert same_bits(saved(plain.directory), saved(done.directory))
    assert losses(plain.directory) == losses(done.directory)
    assert done.evaluation == plain.evaluation
    assert os.listdir(tmp_path / "files") == [], "the files have no names, so no start can take them for anything"


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("adafactor", {}),
        ("lion", {"mesh": "fsdp=4,data=2"}),
        ("adamw 8bit", {}),
        ("adamw", {"mesh": "fsdp=2,tensor=2,data=2", "accumulate": 2}),
    ],
)
def test_other_optimizers_and_meshes(tmp_path, kind, fields):
    """On a mesh each device's shard is a part of the file; programs of several devices may sum in another order."""
    plain = train(config(tmp_path, False, kind=kind, out=tmp_path / "plain", **fields))
    done = train(config(tmp_path, kind=kind, **fields))
    for (_, loss, norm), (_, other, other_norm) in zip(losses(done.directory), losses(plain.directory), strict=True):
        assert loss == pytest.approx(other, rel=2e-6)
        assert norm == pytest.approx(other_norm, rel=1e-5)
    ours, theirs = saved(done.directory), saved(plain.directory)
    assert [x.shape for x in jax.tree.leaves(ours)] == [x.shape for x in jax.tree.leaves(theirs)]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("begins", ["on disk", "in memory"])
def test_a_stopped_run_resumes_with_its_state_elsewhere(tmp_path, begins):
    """The checkpoint of a state on disk is that of the state in memory."""
    whole = train(config(tmp_path, disk=False, out=tmp_path / "whole"))
    first = config(tmp_path, disk=begins == "on disk")
    stopped = stopped_at(tmp_path, 4, steps=6, every=3, **{name: getattr(first, name) for name in ("model", "disk")})
    done = train(config(tmp_path, disk=begins != "on disk"))
    assert done.directory == stopped
    assert same_bits(saved(done.directory), saved(whole.directory))


@pytest.mark.drawn(1)
def test_a_rollback_restores_the_files(tmp_path):
    """A spike at step 9, back to the checkpoint of step 6, other batches from there on."""
    spikes = SpikeConfig("rollback", window=4, back=2, pass_over=4)
    ends = []
    for disk in (False, True):
        run = config(tmp_path, disk, steps=12, every=3, spikes=spikes, saving="lazy", out=tmp_path / str(disk))
        with batches():
            ends.append(train(run).directory)
    assert same_bits(*map(saved, ends))
    assert losses(ends[0]) == losses(ends[1])
    spike, *_ = Checkpointer(ends[1] / "checkpoints", read_only=True).read_meta()["spikes"]
    assert (spike["step"], spike["from"]) == (9, 6)


@pytest.mark.drawn(3)
def test_each_buffer_is_written_once_and_forwarded_ones_are_never_read(tmp_path, opened, monkeypatch):
    logs: list[list[IoEvent]] = []
    begin = DiskTier.begin

    def begun(self, order):
        self.log = []
        logs.append(self.log)
        begin(self, order)

    monkeypatch.setattr(DiskTier, "begin", begun)
    train(config(tmp_path, steps=5, every=9))
    tier = files_of(opened[0]).tier
    units = list(range(LAYERS + 1))
    for step, log in enumerate(logs):
        said = {what: [event.unit for event in log if event.what == what] for what in ("read", "forward", "write")}
        layers = units[:-1][:: -1 if step % 2 else 1]
        assert said["write"] == [*layers, units[-1]], "each once, in the order of the pass"
        assert sorted(said["read"] + said["forward"]) == units, "and each comes from its file, or from memory"
        assert len(said["forward"]) == (0 if step == 0 else tier.window), "what the window had at the end of a pass"
        assert units[-1] in said["read"], "the state of the ends has a place beside the window, and does not stay"
        assert said["read"][-1] != units[-1], "it is read while as many layers as have its bytes are updated"
        assert sum(event.bytes for event in log) == sum(
            tier.layouts[unit].size for unit in (*said["read"], *said["write"])
        )


@pytest.mark.drawn(1)
def test_a_checkpoint_is_of_its_step_while_later_steps_write(tmp_path, opened, monkeypatch):
    """Saves that are so slow that the next steps update every layer meanwhile."""
    create, slow = LocalFiles.create, []

    def waiting(self, name):
        if "mu" in name and not slow:
            slow.append(name)
            while not opened or files_of(opened[0]).tier._files[0].frozen:  # until the next step has written layer 0
                time.sleep(0.001)
        return create(self, name)

    every = train(config(tmp_path, steps=4, every=1, keep_last=9, out=tmp_path / "blocking"))
    opened.clear()
    monkeypatch.setattr(LocalFiles, "create", waiting)
    done = train(config(tmp_path, steps=4, every=3, keep_last=9, saving="lazy"))
    assert slow
    ours, theirs = (Checkpointer(one.directory / "checkpoints", read_only=True) for one in (done, every))
    assert same_bits(ours.restore(step=3)[0], theirs.restore(step=3)[0])


def flip_bit(tier, unit, part):
    """Flips the lowest bit of the first byte of a part of a unit's file."""
    block, offset = aligned_buffer(BLOCK), tier.layouts[unit].offsets[part]
    os.preadv(tier._files[unit].handle, [block.data], offset)
    block[0] ^= 1
    os.pwrite(tier._files[unit].handle, block.data, offset)


def failing_from(count, error):
    """A system call that fails from its ``count``-th call on."""
    calls = iter(range(10**9))

    def wrap(call):
        def failing(*args):
            if next(calls) >= count:
                raise OSError(error, os.strerror(error))
            return call(*args)

        return failing

    return wrap


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("pwrite", errno.ENOSPC, r"writing \d+ bytes in .*files failed: .*No space left"),
        ("preadv", errno.EIO, r"reading \d+ bytes in .*files failed: .*Input/output error"),
    ],
)
def test_a_disk_that_fails_is_named_and_the_run_resumes(tmp_path, monkeypatch, call, error, said):
    whole = train(config(tmp_path, disk=False, out=tmp_path / "whole"))
    with monkeypatch.context() as patch:
        # Writing the state takes a call for each part; a step takes one for each unit. A save reads parts.
        patch.setattr(os, call, failing_from(120 if call == "pwrite" else 110, error)(getattr(os, call)))
        with pytest.raises((DiskTierError, CheckpointError), match=said) as raised:
            train(config(tmp_path))
        if raised.type is DiskTierError:
            assert "is intact; start again" in str(raised.value)
    assert Checkpointer(tmp_path / "runs" / "tiny" / "checkpoints", read_only=True).steps() == [3]
    done = train(config(tmp_path))
    assert same_bits(saved(done.directory), saved(whole.directory))


@pytest.mark.drawn(1)
def test_a_flipped_bit_is_named_and_the_last_checkpoint_is_intact(tmp_path, monkeypatch):
    taken = DiskTier.take

    def flips(self, unit):
        if unit == 0 and len(steps) == 4:
            self.flush()
            flip_bit(self, unit=4, part=2)
        steps.extend([unit] * (unit == 0))
        return taken(self, unit)

    steps: list[int] = []
    monkeypatch.setattr(DiskTier, "take", flips)
    with pytest.raises(DiskTierError, match=r"layers 0/4: opt_state.* is damaged .* checkpoint of step 3 is intact"):
        train(config(tmp_path))
    monkeypatch.setattr(DiskTier, "take", taken)
    whole = train(config(tmp_path, disk=False, out=tmp_path / "whole"))
    assert same_bits(saved(train(config(tmp_path)).directory), saved(whole.directory))


def test_too_little_room_is_said_before_anything_is_computed(tmp_path):
    run = config(tmp_path)
    small = dataclasses.replace(run, disk=dataclasses.replace(run.disk, bytes=100_000))
    with pytest.raises(DiskTierError, match=r"twice that while a checkpoint is written, .* disk.bytes"):
        Run(small)
    file = tmp_path / "a file"
    file.write_text("")
    with pytest.raises(DiskTierError, match=r"a file cannot be used"):
        Run(dataclasses.replace(run, disk=DiskConfig(str(file))))


def test_processes_of_a_file_system_share_what_is_free(tmp_path, monkeypatch):
    """Four processes of 100 bytes of state each: 800 bytes while a checkpoint is written, some of them reserved."""
    free = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))

    def checked(reserved, hosts=1, shared=False):
        def act(one):
            try:
                directory = tmp_path if shared else tmp_path / socket.gethostname()
                check_room(DiskConfig(str(directory)), 100, 0, reserved, one)
            except DiskTierError as error:
                return str(error)
            return ""

        names = {rank: f"host {rank % hosts}" for rank in range(4)}
        own = threading.local()
        monkeypatch.setattr(socket, "gethostname", lambda: own.name)

        def named_act(one):
            own.name = names[one.rank]
            return act(one)

        return in_each(4, named_act)

    free[0] = 799
    assert all("for 4 processes of this file system" in str(said) for said in checked(0))
    assert checked(0, hosts=2) == [""] * 4
    assert all("for 4 processes of this file system" in str(said) for said in checked(0, hosts=2, shared=True))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    free[0] = 800
    assert checked(0) == [""] * 4
    free[0] = 400
    assert checked(100) == [""] * 4
    free[0] = 399
    assert all("free there, or reserved already" in str(said) for said in checked(100))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optim": named("muon")}, "choose one of adamw, lion, adafactor, sgd"),
        ({"host": HostConfig(optimizer=True)}, "the state is in one place"),
        ({"saving": "overlapped"}, 'give checkpoint.saving = "auto"'),
    ],
)
def test_what_cannot_wait_on_disk_is_refused(tmp_path, fields, said):
    optim = fields.pop("optim", None)
    run = config(tmp_path, **fields)
    with pytest.raises(ConfigError, match=said):
        Run(run if optim is None else dataclasses.replace(run, optim=optim))


@pytest.mark.parametrize(("fields", "said"), [({"window": 1}, "give 2 or more"), ({"bytes": 5}, "give a directory")])
def test_the_configuration_is_checked(fields, said):
    with pytest.raises(ValueError, match=said):
        DiskConfig(**fields)


def test_files_of_odd_sizes(tmp_path, rng):
    """Parts that are no multiple of a block, of one byte and of none."""
    layout = FileLayout("layer", ["a", "b", "c"], [5000, 1, 0])
    file = StateFile(tmp_path, layout)
    data = [rng.integers(0, 256, size, dtype=np.uint8) for size in layout.sizes]
    for number, part in enumerate(data):
        file.write_part(number, part)
    assert all(file.read_part(n).tobytes() == part.tobytes() for n, part in enumerate(data))
    assert os.fstat(file.handle).st_nlink == 0
    assert os.fstat(file.handle).st_size == layout.size == 3 * BLOCK


def test_a_frozen_file_keeps_its_contents(tmp_path, rng):
    """The tier writes new ones, and the old ones are freed with their last reference."""
    tier = DiskTier(tmp_path, [FileLayout(f"layer {n}", ["x"], [100]) for n in range(4)], 2)
    for file in tier.renew():
        file.write_part(0, rng.integers(0, 256, 100, dtype=np.uint8))
    for number in range(3):
        frozen = tier.freeze() if number == 2 else []
        tier.begin(range(4))
        for unit in range(4):
            tier.take(unit)
            tier.give(unit, lambda buffer, value=10 * number + unit: buffer.fill(value))
    tier.flush()
    assert [int(file.read_part(0)[99]) for file in frozen] == [10, 11, 12, 13]
    assert [int(file.read_part(0)[99]) for file in tier.freeze()] == [20, 21, 22, 23]
    handles = [file.handle for file in frozen]
    del frozen, file
    for handle in handles:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)


def small_files(directory, count):
    return [StateFile(directory, FileLayout(f"layer {n}", ["x"], [1])) for n in range(count)]


def test_more_files_than_the_soft_limit(tmp_path):
    """As of 80 layers and 16 micro-batches where a process may open 1,024; other files can be opened beside them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(map(int, os.listdir("/dev/fd"))) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        files = small_files(tmp_path, 300)
        other = [open(os.devnull) for _ in range(40)]  # noqa: SIM115
        for file in other:
            file.close()
        assert len({file.handle for file in files}) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_many_open_files_are_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing_from(0, errno.EMFILE)(os.open))
        with pytest.raises(DiskTierError, match=r"layer 0: reserving .* Too many open files.*`ulimit -n`") as raised:
            small_files(tmp_path, 1)
    assert "room" not in str(raised.value)


def test_a_kill_before_the_name_is_gone_leaves_an_empty_file_that_the_next_start_removes(tmp_path, monkeypatch):
    """Where the file system has no O_TMPFILE. What is not empty, or has another name, is not ours."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing_from(0, errno.EINTR)(os.unlink))
        with pytest.raises(DiskTierError):
            small_files(tmp_path, 1)
    assert len(os.listdir(tmp_path)) == 1
    for name, text in (("jaxllm-state-full", "x"), ("another", "")):
        (tmp_path / name).write_text(text)
    unlink = os.unlink

    def removed_meanwhile(path):
        unlink(path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", removed_meanwhile)
    tier = DiskTier(tmp_path, [FileLayout("layer", ["x"], [100])], 2)
    assert sorted(os.listdir(tmp_path)) == ["another", "jaxllm-state-full"]
    tier.renew()[0].write_part(0, np.ones(100, np.uint8))


def test_a_write_or_read_that_fails_names_layer_and_array(tmp_path, monkeypatch):
    file = StateFile(tmp_path, FileLayout("layer 3", ["mu", "nu"], [5000, 5000]))
    buffer = aligned_buffer(file.layout.size)
    for call, doing in (("pwrite", "writing"), ("preadv", "reading")):
        real = getattr(os, call)

        def second_part_fails(handle, rest, offset, call=real):
            if offset >= 2 * BLOCK:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            given = (rest[0] if isinstance(rest, list) else rest)[: 2 * BLOCK]
            return call(handle, [given] if isinstance(rest, list) else given, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, second_part_fails)
            with pytest.raises(DiskTierError, match=f"layer 3: nu: {doing} .*Input/output error"):
                (file.write if call == "pwrite" else file.read)(buffer)
        file.write(buffer)
