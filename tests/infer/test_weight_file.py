"""Weight files, read through the page cache and past it; and the host memory that decides between the two."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.infer.streaming import host_memory, layer_store, weight_file
from jaxllm.infer.streaming.experts.expert_files import ExpertFiles, FileExperts
from jaxllm.infer.streaming.experts.host_experts import HostExperts
from jaxllm.infer.streaming.layer_store import LayerFiles, Unit
from jaxllm.infer.streaming.weight_file import (
    WeightsUnavailableError,
    arrays_of,
    file_state,
    read_bytes,
    write_arrays,
)

GIB = 2**30
TREE = {"a": np.arange(3000, dtype=np.float32), "b": np.arange(77, dtype=np.int8), "c": np.ones((5, 999), np.float16)}


@pytest.mark.parametrize("kind", ["direct", "no such flag", "refused by the file", "larger blocks"])
def test_direct_reads_are_buffered_ones(tmp_path, monkeypatch, kind):
    """Any part that begins where an array may; also where a system cannot read past the page cache."""
    path = tmp_path / "weights.bin"
    checksums = write_arrays(path, [TREE, TREE])
    state, whole = file_state(path), path.read_bytes()
    flags, opened, read = list[int](), os.open, os.preadv

    def opening(name, flag, *more, **further):
        flags.append(flag)
        if kind == "refused by the file" and flag & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return opened(name, flag, *more, **further)

    def reading(handle, buffers, offset):
        if kind != "no such flag" and kind != "refused by the file" and flags[-1] & direct_flag:
            address = np.frombuffer(buffers[0], np.uint8).ctypes.data
            assert address % 4096 == offset % 4096 == len(buffers[0]) % 4096 == 0
            if kind == "larger blocks":
                raise OSError(errno.EINVAL, "blocks of 64 KiB")
        return read(handle, buffers, offset)

    direct_flag = os.O_DIRECT
    if kind == "no such flag":
        monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.setattr(weight_file.os, "open", opening)
    monkeypatch.setattr(weight_file.os, "preadv", reading)
    half = len(whole) // 2
    for begin, size in ((0, None), (0, 1), (half, half), (64, 4096), (4096, 8192), (64 * 65, len(whole) - 64 * 65)):
        checksum = checksums[0] if (begin, size) == (half, half) else None
        found = read_bytes(path, state, "weights", checksum, begin, size, direct=True)
        assert found.tobytes() == whole[begin:][:size]
        assert found.ctypes.data % 64 == 0
    if kind == "direct":
        assert all(flag & direct_flag for flag in flags)
    tree = arrays_of(read_bytes(path, state, "weights", None, half, half, direct=True), TREE)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), tree, TREE))


def test_errors_of_direct_reads_are_those_of_buffered_ones(tmp_path):
    path = tmp_path / "weights.bin"
    (checksum,) = write_arrays(path, [TREE])
    state = file_state(path)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    with pytest.raises(WeightsUnavailableError, match="was changed"):
        read_bytes(path, state, "layer 3", checksum, direct=True)
    with pytest.raises(WeightsUnavailableError, match=r"layer 3.*damaged"):
        read_bytes(path, file_state(path), "layer 3", checksum, direct=True)
    with pytest.raises(WeightsUnavailableError, match="changed"):  # it ends too early
        read_bytes(path, file_state(path), "layer 3", None, 0, state[0] + 4096, direct=True)
    with pytest.raises(WeightsUnavailableError, match=r"layer 3.*no memory for its 4611686018427387904 bytes"):
        read_bytes(path, file_state(path), "layer 3", None, 0, 2**62)
    path.unlink()
    with pytest.raises(WeightsUnavailableError, match="cannot be read"):
        read_bytes(path, state, "layer 3", None, direct=True)


def test_a_change_while_a_file_is_read_is_told(tmp_path, monkeypatch):
    path = tmp_path / "weights.bin"
    write_arrays(path, [TREE])
    state, read = file_state(path), os.preadv

    def reading(handle, buffers, offset):
        found = read(handle, buffers, offset)
        path.write_bytes(b"x" * state[0])
        return found

    monkeypatch.setattr(weight_file.os, "preadv", reading)
    with pytest.raises(WeightsUnavailableError, match="was changed"):
        read_bytes(path, state, "layer 3", None)


class Numbered:
    """Store whose units are full of their number."""

    tier = "loaded"

    def __init__(self):
        self.reads = 0

    def read(self, unit: Unit, device: jax.Device):
        self.reads += 1
        time.sleep(0.002)
        return {"0": {"w": jax.device_put(np.full(10_000, unit.first, np.float32), device)}}


def test_layers_are_read_past_the_cache_where_it_has_no_room(tmp_path, monkeypatch):
    units, host = [Unit(0, n, n) for n in range(4)], jax.devices("cpu")[0]
    asked = list[bool]()

    def reading(*args, direct, **more):
        asked.append(direct)
        return read_bytes(*args, direct=direct, **more)

    monkeypatch.setattr(layer_store, "read_bytes", reading)
    for free, direct in ((4 * 40_064, False), (4 * 40_000 - 1, True)):
        monkeypatch.setattr(layer_store, "free_host_bytes", lambda free=free: free)
        files = LayerFiles.of(Numbered(), units, tmp_path, ["test"])
        assert files.direct is direct
        assert [float(files.read(unit, host)["0"]["w"][-1]) for unit in units] == [0, 1, 2, 3]
        assert asked == [direct] * 4
        asked.clear()


@pytest.mark.parametrize("starts", ["one within the other", "threads"])
def test_starts_on_one_directory_share_their_files(tmp_path, starts):
    """Each file is written once, and all starts can read all of them, however the starts take turns."""
    units, host, store, found = [Unit(0, n, n) for n in range(6)], jax.devices("cpu")[0], Numbered(), list[LayerFiles]()

    def start(progress=None):
        found.append(LayerFiles.of(store, units, tmp_path, ["test"], progress))

    if starts == "threads":
        threads = [threading.Thread(target=start) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        start(lambda done, _: start() if done in (1, 4) else None)
    assert len(found) == 3
    # Each start reads one for the structure, and the first start has that one's file from it.
    assert store.reads == 3 + len(units) - 1
    for files in found:
        assert [float(files.read(unit, host)["0"]["w"][-1]) for unit in units] == list(range(6))


def test_starts_on_one_directory_share_files_of_experts(tmp_path):
    experts = [HostExperts({"w": np.full((3, 1000), layer, np.float32)}) for layer in range(3)]
    first, second = (ExpertFiles(tmp_path, ["test"], 0) for _ in range(2))
    found = list[FileExperts]()
    for n, own in enumerate(experts):
        found += [files.add(n, own) for files in ((first, second) if n else (second, first))]
    found += [ExpertFiles(tmp_path, ["test"], 0).add(n, own) for n, own in enumerate(experts)]
    assert [float(one.read(2)["w"][0, -1]) for one in found] == [0, 0, 1, 1, 2, 2, 0, 1, 2]


def test_complete_files_in_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    units, host = [Unit(0, n, n) for n in range(2)], jax.devices("cpu")[0]
    LayerFiles.of(Numbered(), units, tmp_path, ["test"])

    opened = Path.open

    def opening(path, mode="r", *args, **kwargs):
        if "r" not in mode:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opening)
    files = LayerFiles.of(Numbered(), units, tmp_path, ["test"])
    assert [float(files.read(unit, host)["0"]["w"][-1]) for unit in units] == [0, 1]
    with pytest.raises(WeightsUnavailableError, match="cannot be written there"):
        LayerFiles.of(Numbered(), [*units, Unit(0, 2, 2)], tmp_path, ["test"])


@pytest.mark.parametrize("second", [True, False])
def test_free_memory_is_what_limits_leave(tmp_path, monkeypatch, second):
    """By hand: the least of the system, a group and the groups around it; the page cache counts as free."""
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "groups")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   8388608 kB\n")
    assert host_memory.free_host_bytes() == 8 * GIB  # no groups
    line = "0::/pod/box\n" if second else "9:cpu,memory:/pod/box\n1:name=systemd:/\n"
    (tmp_path / "proc" / "self" / "cgroup").write_text(line)
    assert host_memory.free_host_bytes() == 8 * GIB  # their files are not there
    names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    root = tmp_path / "groups" / ("" if second else "memory")

    def group(name: str, most: object, used: int, cached: int) -> None:
        (root / name).mkdir(parents=True, exist_ok=True)
        for file, value in zip(names, (most, used), strict=True):
            (root / name / file).write_text(f"{value}\n")
        rows = {"anon": 5, "active_file": cached // 4, "inactive_file": cached - cached // 4}
        if not second:  # of the group alone, and of those in it too
            rows = {"active_file": 0, "inactive_file": 1, **{f"total_{key}": size for key, size in rows.items()}}
        (root / name / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in rows.items()))

    group("pod/box", "max" if second else 2**63 - 4096, 2 * GIB, GIB)
    assert host_memory.free_host_bytes() == 8 * GIB
    group("pod/box", 3 * GIB, 2 * GIB, GIB)
    assert host_memory.free_host_bytes() == 2 * GIB
    group("pod", 5 * GIB, 4 * GIB, GIB // 2)
    assert host_memory.free_host_bytes() == 3 * GIB // 2
    group("", GIB, 2 * GIB, 0)
    assert host_memory.free_host_bytes() == 0
    (tmp_path / "proc" / "meminfo").unlink()
    assert host_memory.free_host_bytes() == 0
