"""Checkpoint of two processes, simulated by threads; ``make proof parallelism`` has real ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.checkpoint import (
    CheckpointConfig,
    CheckpointCorruptError,
    Checkpointer,
    CheckpointError,
    MultihostCheckpointer,
    multihost_checkpointer,
    snapshot,
)
from jaxllm.checkpoint.snapshot import capture
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.checkpoint.storage.leaf_hashing import hash_array
from jaxllm.parallel.distributed import ProcessGroup
from sharding import MeshSpec
from tests.parallel.test_distributed import Store

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
STATE = {"params": {"w": WEIGHT, "gain": np.ones(3)}, "step": np.int32(7)}


def save(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int], chunk: tuple[int, int] = (2, 6)) -> list[Any]:
    """Both save every step; what each raised. The first process has the first rows of ``w``, the second the others."""

    def parts(state: dict[str, Any], **how: Any) -> dict[str, SnapshotLeaf]:
        rank = state["rank"]
        rows = WEIGHT[2 * rank : 2 * rank + 2].copy()
        split = SnapshotLeaf(
            (4, 6), "float32", None, (4, 6), np.dtype("float32"), chunk, {f"{rank}.0": lambda: [rows[: chunk[0]]]}
        )
        return {**capture({"params": {"gain": np.ones(3)}, "step": np.int32(7)}, **how), "params/w": split}

    monkeypatch.setattr(snapshot, "capture", parts)
    store = Store()

    def one(rank: int) -> Any:
        try:
            config = CheckpointConfig(keep_last=2, saving="auto" if rank == 0 else "blocking")
            with MultihostCheckpointer(folder, config, ProcessGroup(rank, 2, store)) as checkpointer:
                saved = [checkpointer.save(step, {"rank": rank}, {"cursor": step}) for step in steps]
                checkpointer.wait()
                return saved, checkpointer.latest()
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_two_processes_write_what_one_reads_on_any_mesh(tmp_path, monkeypatch):
    assert save(tmp_path, monkeypatch, [1, 2, 2, 3]) == [([True, True, False, True], 3)] * 2
    where = NamedSharding(MeshSpec.parse("fsdp=2,tensor=4").build(), P(None, "fsdp"))
    abstract = {
        "params": {"w": jax.ShapeDtypeStruct((4, 6), np.float32, sharding=where), "gain": np.ones(3)},
        "step": np.int32(0),
    }
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert checkpointer.steps() == [2, 3]
        checkpointer.verify()
        state, meta = checkpointer.restore(abstract)
        assert meta == {"cursor": 3}
        np.testing.assert_array_equal(np.asarray(state["params"]["w"]), WEIGHT)
        assert state["params"]["w"].sharding == where
        np.testing.assert_array_equal(checkpointer.map_leaves()["w"], WEIGHT)
        assert checkpointer.manifest().leaves["params/w"].hash == hash_array(WEIGHT)  # as one process saves it
        assert checkpointer.manifest().leaves["params/gain"].hash == hash_array(np.ones(3))


@pytest.mark.parametrize("name", ["0.0", "1.0"])
def test_a_flipped_bit_in_a_shard_is_found(name, tmp_path, monkeypatch):
    save(tmp_path, monkeypatch, [1])
    (file,) = tmp_path.glob(f"step_*/state/params.w/{name}")
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with (
        Checkpointer(tmp_path, read_only=True) as checkpointer,
        pytest.raises(CheckpointCorruptError, match="params/w"),
    ):
        checkpointer.restore()


def test_a_missing_shard_ends_the_save_in_both_and_leaves_nothing(tmp_path, monkeypatch):
    """Simulates a third process that did not write its rows."""
    for error in save(tmp_path, monkeypatch, [1], chunk=(1, 6)):
        assert isinstance(error, CheckpointError)
        assert "leaf params/w has 4 shards, and the processes wrote 2" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_disk_that_one_cannot_write_is_told_by_both(tmp_path, monkeypatch):
    write = multihost_checkpointer.write_shards

    def fails(of: MultihostCheckpointer, folder: str, leaves: Any) -> Any:
        if "1.0" in leaves["params/w"].parts:
            return write(of, f"{folder}/elsewhere", leaves)
        return write(of, folder, leaves)

    monkeypatch.setattr(multihost_checkpointer, "write_shards", fails)
    for error in save(tmp_path, monkeypatch, [1]):
        assert isinstance(error, CheckpointError)
        assert "process 1: FileNotFoundError" in str(error)
