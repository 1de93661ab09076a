"""Checkpoints in object stores, leaves in slices and blocks, renamed and cast restores, lazy saves."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    CheckpointMismatchError,
    LeafSource,
    RestoreOptions,
    checkpoint_writer,
    snapshot,
)
from jaxllm.checkpoint.checkpoint_writer import HostMemoryBudget
from jaxllm.checkpoint.storage import file_systems, leaf_hashing
from tests import environment
from tests.checkpoint.states import abstract_on, assert_same, make_state
from tests.checkpoint.together import save_together

PLACES = (f"memory://places-{n}" for n in itertools.count())


@pytest.fixture(params=["local", "object store"])
def place(request, tmp_path):
    return str(tmp_path / "run") if request.param == "local" else next(PLACES)


def test_everything_works_in_any_place(place):
    mesh, other = jax.make_mesh((4, 2), ("fsdp", "tensor")), jax.make_mesh((8,), ("fsdp",))
    with Checkpointer(place, CheckpointConfig(keep_last=2)) as checkpointer:
        for step in (1, 2, 3, 4):
            assert checkpointer.save(step, make_state(0, step, mesh), {"cursor": step})
        assert not checkpointer.save(4, {}, {})
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]
        assert len(checkpointer.set_aside_after(3)) == 1
        assert checkpointer.steps() == [3]
        checkpointer.verify()
    with Checkpointer(place) as checkpointer:
        found = checkpointer.resume(abstract_on(make_state(0, 3), other))
        assert found.step == 3
        assert_same(found.state, make_state(0, 3))
        assert checkpointer.collect(set_aside=True) == ["aside_00000004"]
        assert checkpointer.set_aside() == []


def test_dead_saves_in_an_object_store(tmp_path, monkeypatch):
    place = next(PLACES)
    with Checkpointer(place) as checkpointer:
        checkpointer.save(1, make_state(0, 1), {})
    monkeypatch.setattr(checkpoint_writer, "write_file", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    with Checkpointer(place) as checkpointer:
        checkpointer.save(2, make_state(0, 2), {})
        with pytest.raises(CheckpointError, match=r"No space left.* Step 1 is the newest"):
            checkpointer.wait()
        assert checkpointer.steps() == [1]
        assert checkpointer._directory.files.names() == ["step_00000001"]


def test_a_missing_package_is_named():
    with pytest.raises(CheckpointError, match=r"gs://bucket/run need the package gcsfs: pip install gcsfs"):
        Checkpointer("gs://bucket/run", read_only=True)
    with pytest.raises(CheckpointError, match=r"nonsense://x: .*Legal: a local path, or a URL"):
        Checkpointer("nonsense://x", read_only=True)


@pytest.mark.parametrize("block", [24, 100, 2**26])
@pytest.mark.parametrize("size", [1, 3])
def test_slices_of_any_layout_and_the_hash_of_all(place, monkeypatch, rng, block, size):
    monkeypatch.setattr(leaf_hashing, "BLOCK_BYTES", block)
    array = rng.standard_normal((12, 10, 2))
    chunks = {"w": (4, 5, 2)} if size > 1 else {}
    save_together(place, size, 1, {"w": array, "x": array[0]}, chunks, {})
    with Checkpointer(place, read_only=True) as reader:
        reader.verify()
        assert reader.manifest().leaves["w"].hash == leaf_hashing.hash_array(array)
        for _ in range(5):
            ends = [sorted(rng.integers(0, n + 1, 2)) for n in array.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            np.testing.assert_array_equal(reader.open_leaves()["w"].read(index), array[index])


def test_no_more_is_read_than_a_slice_lies_in(tmp_path, monkeypatch):
    monkeypatch.setattr(leaf_hashing, "BLOCK_BYTES", 2**12)
    array = np.arange(2**14, dtype=np.float64).reshape(128, 128)
    save_together(str(tmp_path / "one"), 1, 1, {"w": array}, {}, {})
    save_together(str(tmp_path / "two"), 2, 1, {"w": array}, {"w": (64, 64)}, {})
    with Checkpointer(tmp_path / "one", read_only=True) as reader:
        leaf = reader.open_leaves()["w"]
        leaf.read((slice(32, 64), slice(None)))
        assert leaf.bytes_read == array.nbytes // 4
    with Checkpointer(tmp_path / "two", read_only=True) as reader:
        leaf = reader.open_leaves()["w"]
        leaf.read((slice(64, 128), slice(64, 128)))
        assert leaf.bytes_read == array.nbytes // 4


def test_renamed_partial_and_cast(tmp_path):
    saved = {"layers": {"0": {"w": jnp.ones((2, 3))}, "1": {"w": jnp.zeros((2, 3))}}, "old": jnp.arange(4.0)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved, {})
        checkpointer.wait()
        want = {"w": jax.ShapeDtypeStruct((2, 2, 3), jnp.bfloat16), "new": np.zeros(4, np.float64)}
        sources = {"w": LeafSource(("layers/0/w", "layers/1/w"), stack=True), "new": LeafSource(("old",))}
        found, _ = checkpointer.restore(want, reading=RestoreOptions(sources, cast=True))
        assert found["w"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(found["w"], np.float32)[:, 0, 0], [1, 0])
        assert found["new"].dtype == np.float64
        with pytest.raises(CheckpointMismatchError, match=r"w: dtype bfloat16 requested, float32 saved"):
            checkpointer.restore(want, reading=RestoreOptions(sources))
        mine = {"old": jnp.zeros(4), "extra": jnp.full(2, 7.0)}
        with pytest.raises(CheckpointMismatchError, match="extra: not in the checkpoint"):
            checkpointer.restore(mine)
        found, _ = checkpointer.restore(mine, reading=RestoreOptions(partial=True))
        assert found["old"].tolist() == [0, 1, 2, 3]
        assert found["extra"] is mine["extra"]
        row, _ = checkpointer.restore(
            {"r": np.zeros(3, np.float32)}, reading=RestoreOptions({"r": LeafSource(("layers/0/w",), 1)}, partial=True)
        )
        assert row["r"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("saving", ["lazy", "eager", "blocking", "auto"])
def test_what_is_saved_is_the_state_of_the_call(tmp_path, saving):
    """Every step is saved while the next ones overwrite the state in place."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    tree = {"w": jax.device_put(jnp.ones((64, 64)), jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))}
    with Checkpointer(tmp_path, CheckpointConfig(saving=saving, keep_last=9)) as checkpointer:
        for number in range(5):
            checkpointer.save(number, tree, {})
            tree = step(tree)
        checkpointer.wait()
        for number in range(5):
            found, _ = checkpointer.restore(None, number)
            np.testing.assert_array_equal(found["w"], np.full((64, 64), 2.0 ** (number + 1) - 1))
        assert set(checkpointer.stalls) == set(range(5))


def test_host_memory_is_bounded(tmp_path, monkeypatch):
    held, most, guard = 0, 0, threading.Lock()
    budget = HostMemoryBudget.__call__

    class Counting:
        def __init__(self, inner, size):
            self.inner, self.size = inner, size

        def __enter__(self):
            nonlocal held, most
            self.inner.__enter__()
            with guard:
                held += self.size
                most = max(most, held)

        def __exit__(self, *exception):
            nonlocal held
            with guard:
                held -= self.size
            return self.inner.__exit__(*exception)

    monkeypatch.setattr(HostMemoryBudget, "__call__", lambda self, size: Counting(budget(self, size), size))
    state = {str(n): jnp.ones((16, 16)) for n in range(12)} | {"large": jnp.ones((64, 64))}
    with Checkpointer(tmp_path, CheckpointConfig(saving="lazy", host_bytes=2500)) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        checkpointer.verify()
    assert most == 64 * 64 * 4  # one leaf that is larger than the bound, alone
    assert held == 0


def test_a_copy_needs_room(monkeypatch):
    class Device:
        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 0, "peak_bytes_in_use": self.peak}

    state = {"w": jnp.zeros(50)}  # 200 bytes
    for peak, room in ((700, True), (900, False)):
        monkeypatch.setattr(jax, "local_devices", lambda peak=peak: [Device(peak)])
        assert snapshot.has_room_for_copy(state) == room


@pytest.mark.parametrize("refuses", [False, True])
def test_large_writes_past_the_page_cache(refuses, tmp_path, monkeypatch):
    """Chunks of any size, in any order of sizes, with and without O_DIRECT: the file has their bytes."""
    monkeypatch.setattr(file_systems, "DIRECT_IO_BYTES", 2 * file_systems.DIRECT_IO_ALIGNMENT)
    write, direct = os.write, []

    def writing(handle: int, data: Any) -> int:
        direct.append(len(data))
        if refuses:
            raise OSError(errno.EINVAL, "as some file systems do")
        return write(handle, data)

    monkeypatch.setattr(file_systems.os, "write", writing)
    monkeypatch.setattr(file_systems._DirectIOFile, "_buffers", threading.local())
    rng = np.random.default_rng(environment.seed())
    sizes = [
        5 * file_systems.DIRECT_IO_ALIGNMENT + 7,
        3,
        file_systems.DIRECT_IO_ALIGNMENT - 10,
        4 * file_systems.DIRECT_IO_ALIGNMENT,
        *rng.integers(1, 9 * file_systems.DIRECT_IO_ALIGNMENT, 6),
    ]
    pieces = [rng.bytes(size) for size in sizes]
    with file_systems.LocalFiles(tmp_path).create("x") as file:
        for piece in pieces:
            assert file.write(memoryview(piece)) == len(piece)
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)
    assert direct == [2 * file_systems.DIRECT_IO_ALIGNMENT] * len(direct)
    assert len(direct) == 1 if refuses else len(direct) >= 4
