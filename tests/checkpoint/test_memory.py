"""Snapshots in peer memory: parity, lost hosts, a crash of the trainer; and the save interval."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointConfig, CheckpointCorruptError, Checkpointer, MemoryConfig
from jaxllm.checkpoint.memory.erasure_coding import decode, encode, parity_coefficients
from jaxllm.checkpoint.memory.memory_snapshots import MemoryCheckpointer, StripeLayout
from jaxllm.checkpoint.memory.peer_server import send
from jaxllm.checkpoint.memory.peer_storage import PeerClient, PeerLost, PeerStorage
from jaxllm.checkpoint.save_interval import interval_steps, mean_time_between_failures, optimal_interval
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.parallel.distributed import ProcessGroup
from tests.checkpoint.together import leaves_of
from tests.parallel.test_distributed import Store

CHUNKS = {"params/w": (3, 5), "mu/w": (12, 2)}


def state_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"params/w": rng.standard_normal((12, 10)), "mu/w": rng.standard_normal((12, 10)), "step": np.array(step)}


class Hosts:
    """Several hosts, whose trainers are threads and whose peer servers are processes."""

    def __init__(self, folder: Path, size: int, parity: int = 1):
        self.folder, self.size, self.config = folder, size, MemoryConfig(parity=parity, linger=60)

    def train(self, work: Callable[[MemoryCheckpointer, int], Any]) -> list[Any]:
        """Results of `work` for each host; all hosts open their snapshots and close them."""
        store = Store()

        class Made(MemoryCheckpointer):
            def _capture(self, state: Any, copy: Any) -> dict[str, SnapshotLeaf]:
                return state

        def one(rank: int) -> Any:
            with Made(self.folder, self.config, ProcessGroup(rank, self.size, store), saving="eager") as snapshots:
                return work(snapshots, rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def save(self, *steps: int) -> None:
        def work(snapshots: MemoryCheckpointer, rank: int) -> None:
            for step in steps:
                chunks = CHUNKS if self.size > 1 else {}
                snapshots.save(step, leaves_of(state_of(step), chunks, rank, self.size), {"cursor": step})
            snapshots.wait()

        self.train(work)

    def resumed(self) -> list[int | None]:
        """The step that each host resumes, with every bit of it."""

        def work(snapshots: MemoryCheckpointer, rank: int) -> int | None:
            found = snapshots.resume(None)
            if found is None:
                return None
            flat = {"params/w": found.state["params"]["w"], "mu/w": found.state["mu"]["w"], "step": found.state["step"]}
            for path, array in state_of(found.step).items():
                assert flat[path].tobytes() == array.tobytes()
            assert found.meta == {"cursor": found.step}
            return found.step

        return self.train(work)

    def lose(self, *ranks: int) -> None:
        """Kills the peer servers of these hosts."""
        for rank in ranks:
            file = self.folder / f"{rank}.json"
            os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
            with contextlib.closing(PeerClient(rank, file)) as holder:
                while holder.alive():
                    time.sleep(0.01)

    def end(self) -> None:
        for rank in range(self.size):
            holder = PeerClient(rank, self.folder / f"{rank}.json")
            with contextlib.closing(holder), contextlib.suppress(PeerLost):
                holder.request("end")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(size: int, parity: int = 1) -> Hosts:
        made.append(Hosts(tmp_path / str(len(made)), size, parity))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (3, 1), (2, 2), (5, 3)])
def test_any_pieces_give_all_back(rng: np.random.Generator, data: int, parity: int) -> None:
    pieces = [rng.integers(0, 256, 40, dtype=np.uint8) for _ in range(data)]
    every = dict(enumerate(pieces + encode(pieces, parity)))
    np.testing.assert_array_equal(every[data], np.bitwise_xor.reduce(pieces))
    for kept in itertools.combinations(every, data):
        np.testing.assert_array_equal(decode({n: every[n] for n in kept}, data, parity), pieces)
    if data > 1 or parity < 1:
        with pytest.raises(ValueError, match="are needed"):
            decode({n: every[n] for n in range(1, data)}, data, parity)
    with pytest.raises(ValueError, match="at most 256"):
        parity_coefficients(200, 57)


@pytest.mark.parametrize(("size", "parity"), [(1, 1), (2, 1), (4, 1), (5, 2), (3, 7)])
def test_every_byte_is_in_one_stripe_and_every_host_keeps_as_much(size: int, parity: int) -> None:
    stripes = StripeLayout(size, parity)
    for host in range(size):
        pieces = stripes.pieces(host, 101)
        assert [b for _, b, _ in pieces] == [0, *(e for _, _, e in pieces[:-1])]
        assert pieces[-1][2] == 101
        assert all(host in stripes.data_hosts(g) and host not in stripes.parity_hosts(g) for g, _, _ in pieces)
        assert sum(host in stripes.parity_hosts(g) for g in range(size)) == stripes.parity


def test_a_crash_of_the_trainer(hosts: Callable[..., Hosts]) -> None:
    one = hosts(1)
    assert one.resumed() == [None]
    one.save(1, 2)
    assert one.resumed() == [2]
    one.save(3)
    with contextlib.closing(PeerStorage(one.folder, 0, 1)) as held:
        assert held.names() == ["step_00000003"]  # the one before is let go
    one.end()
    assert one.resumed() == [None]


@pytest.mark.drawn(0.3)
def test_lost_hosts_are_rebuilt(hosts: Callable[..., Hosts]) -> None:
    four = hosts(4)
    four.save(1, 2)
    for rank in (2, 0):  # process 0 has the manifest
        four.lose(rank)
        assert four.resumed() == [2] * 4
        four.save(rank + 3 if rank else 9)  # and parity is there again
        assert four.resumed() == [5 if rank else 9] * 4
        four.end()
        four.save(2)
    four.lose(1, 3)
    assert four.resumed() == [None] * 4


@pytest.mark.drawn(0.3)
def test_two_lost_hosts_of_two_parities(hosts: Callable[..., Hosts]) -> None:
    three = hosts(4, 2)
    three.save(7)
    three.lose(0, 3)
    assert three.resumed() == [7] * 4


def test_strangers_are_not_answered(hosts: Callable[..., Hosts]) -> None:
    one = hosts(1)
    one.save(1)
    address = json.loads((one.folder / "0.json").read_text())
    assert (one.folder / "0.json").stat().st_mode & 0o077 == 0
    with PeerClient(0, one.folder / "0.json")._connect(address) as connection:
        send(connection, {"do": "sizes", "name": "", "secret": "guess"})
        assert connection.recv(1) == b""
    with contextlib.closing(PeerClient(0, one.folder / "0.json")) as holder:
        assert holder.request("sizes", name="")[0]


@pytest.mark.drawn(0.3)
def test_a_snapshot_is_a_checkpoint(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """The same files: what it holds can be verified and read as any other."""
    four = hosts(4)
    four.save(3)
    with (
        contextlib.closing(PeerStorage(four.folder, 0, 4)) as held,
        Checkpointer(held, CheckpointConfig(), read_only=True) as reader,
    ):
        reader.verify()
        np.testing.assert_array_equal(reader.open_leaves()["params/w"].read(), state_of(3)["params/w"])


@pytest.mark.drawn(0.3)
def test_slices_alone_move_and_damage_is_found(hosts: Callable[..., Hosts]) -> None:
    """A slice that lies in two shards: its bytes move and no others, and those of this host's shard not at all."""
    four = hosts(4)
    four.save(3)
    folder = "step_00000003/state/params.w"
    with contextlib.closing(PeerStorage(four.folder, 1, 4)) as held:
        there = {n: held.clients[1].request("get", name=f"{folder}/{n}", begin=0, end=1)[0] for n in ("0.0", "0.1")}
        with Checkpointer(held, CheckpointConfig(), read_only=True) as reader:
            leaf = reader.open_leaves()["params/w"]
            np.testing.assert_array_equal(leaf.read((slice(1, 3), slice(2, 7))), state_of(3)["params/w"][1:3, 2:7])
            bytes_of = {"0.0": 2 * 3 * 8, "0.1": 2 * 2 * 8}
            assert held.bytes_read.own == sum(size for n, size in bytes_of.items() if there[n])
            assert held.bytes_read.peers == sum(size for n, size in bytes_of.items() if not there[n])
            for client in held.clients:
                if client.request("get", name=f"{folder}/0.0", begin=0, end=1)[0]:
                    data = client.request("get", name=f"{folder}/0.0", begin=0, end=None)[1].copy()
                    data[-1] ^= 1  # of the last element, which the slice lacks
                    client.request("put", data, name=f"{folder}/0.0")
            with pytest.raises(CheckpointCorruptError, match=r"0\.0.*do not match the manifest"):
                leaf.read((slice(0, 1), slice(0, 1)))


def test_the_best_interval() -> None:
    stall, apart = 20.0, 6 * 3600.0

    def lost(interval: float) -> float:
        """Share of time that is not work: Daly's full model, failures at random."""
        return apart * math.expm1((interval + stall) / apart) / interval

    best = optimal_interval(stall, apart)
    near = [lost(best * factor) for factor in (0.8, 0.9, 1.0, 1.1, 1.25)]
    assert min(near) == near[2]
    assert best == pytest.approx(math.sqrt(2 * stall * apart), rel=0.05)
    assert optimal_interval(100, 10) == 10
    assert mean_time_between_failures(0, 0, 10) == 8640
    assert mean_time_between_failures(10 * 3600, 4, 1) == (34 * 3600) / 5
    assert interval_steps(stall, best / 10, apart) == 10
    assert interval_steps(0, 1, apart) == 1
