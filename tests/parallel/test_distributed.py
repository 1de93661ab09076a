"""Messages between processes, with a store of this process in the place of jax's."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm._compat import share_compiled_programs_of_cpus
from jaxllm.data import Batch
from jaxllm.parallel import distributed, heartbeat
from jaxllm.parallel.cluster_environment import ClusterEnvironment
from jaxllm.parallel.distributed import (
    DistributedConfig,
    DistributedError,
    ProcessGroup,
    SynchronizedStop,
    group,
    running,
)
from jaxllm.train import RunConfig
from jaxllm.train.run_processes import covering_part, fingerprint, local_part, put_batch
from sharding import MeshSpec


class Store:
    """Key-value store like jax's, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            assert allow_overwrite or key not in self.values, key
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: too late")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(key)}


def in_each(size: int, act):
    """``act(group)`` in a thread for each of ``size`` processes: results, or what was raised."""
    store = Store()

    def one(rank: int):
        try:
            return act(ProcessGroup(rank, size, store))
        except DistributedError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_gather_and_tell():
    def act(one: ProcessGroup):
        return [(one.gather("a", f"{one.rank}{turn}"), one.broadcast("a", f"t{turn}")) for turn in range(3)]

    assert in_each(3, act)[0] == [([f"0{turn}", f"1{turn}", f"2{turn}"], f"t{turn}") for turn in range(3)]
    assert in_each(3, act)[2] == [([], f"t{turn}") for turn in range(3)]
    assert act(ProcessGroup()) == [([f"0{turn}"], f"t{turn}") for turn in range(3)]


def test_a_posted_text_replaces_the_last_and_nobody_waits():
    def act(one: ProcessGroup):
        one.post("phases", "first")
        one.post("phases", f"of {one.rank}")
        one.barrier("posted")
        return one.posted("phases"), one.posted("nothing")

    assert in_each(3, act) == [({0: "of 0", 1: "of 1", 2: "of 2"}, {})] * 3
    assert ProcessGroup().posted("phases") == {}


def test_agreement_is_silent_and_may_be_repeated():
    assert (
        in_each(4, lambda one: [one.agree("it", {"a": 1, "b": [2]}, 20), one.agree("it", {"a": 2}, 20)])
        == [[None] * 2] * 4
    )


def test_a_disagreement_names_fact_values_and_processes_in_each():
    said = in_each(5, lambda one: one.agree("the run", {"same": 0, "jax": "2" if one.rank in (1, 4) else "1"}, 20))
    for error in said:
        assert isinstance(error, DistributedError)
        assert str(error) == (
            'the processes disagree about the run:\n  jax: "1" in processes 0, 2-3; "2" in processes 1, 4'
        )


def test_a_fact_that_one_lacks_is_a_difference():
    (first, _) = in_each(2, lambda one: one.agree("x", {"a": 1} if one.rank else {}, 20))
    assert "a: null in process 0; 1 in process 1" in str(first)


def test_silence_is_named_in_each():
    def act(one: ProcessGroup):
        if one.rank == 2:
            return None
        return one.agree("the run", {}, 0.2)

    first, second, _ = in_each(3, act)
    for error in (first, second):
        assert str(error) == "process 2 of 3 sent nothing about the run for 0.2 s."


def test_one_process_is_a_group_that_starts_nothing():
    with running(ClusterEnvironment()) as alone:
        assert alone is group()
        assert (alone.rank, alone.size, alone.is_leader) == (0, 1, True)
        alone.agree("anything", {"a": object()})
        stop = SynchronizedStop(MeshSpec.parse("dp").build())
        assert [stop([]), stop([15]), stop([2, 15])] == [0, 15, 2]


def test_a_signal_of_one_stops_all_one_step_later(monkeypatch):
    """On the devices of this process, as if they were several processes'."""
    mesh = MeshSpec.parse("fsdp=4,tensor=2").build()
    monkeypatch.setattr(distributed, "_group", ProcessGroup(0, 2, Store()))
    stop, seen = SynchronizedStop(mesh), []
    with jax.set_mesh(mesh):
        assert [stop(seen), stop(seen)] == [0, 0]
        assert stop([15]) == 0
        assert stop(seen) == 15
    assert seen == [15]


def test_timeouts_are_checked():
    with pytest.raises(ValueError, match=r"distributed.lost_after = 0.5; give 1 second or more"):
        DistributedConfig(lost_after=0.5)


def test_fingerprint_covers_versions_code_settings_and_configuration(monkeypatch):
    base = fingerprint(RunConfig())
    assert {"version of jax", "version of jaxllm", "source code", "XLA_FLAGS", "mesh", "model.layers"} <= set(base)
    assert fingerprint(RunConfig()) == base
    changed = fingerprint(RunConfig(steps=7, mesh="tp"))
    assert {name for name in base if base[name] != changed[name]} == {"steps", "mesh"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    assert fingerprint(RunConfig())["XLA_FLAGS"] == "--xla_dump_to=x"


@pytest.mark.parametrize(
    ("spans", "rows", "expected"),
    [
        ([(0, 8)], 8, (0, 1)),
        ([(2, 4), (2, 4)], 8, (1, 4)),
        ([(4, 6), (6, 8)], 8, (1, 2)),
        ([(0, 2), (6, 8)], 8, (0, 1)),
        ([(2, 4), (4, 6)], 8, (0, 1)),  # across the middle
        ([(3, 6)], 12, (1, 4)),
        ([(5, 6)], 6, (5, 6)),
    ],
)
def test_the_rows_of_a_process(spans, rows, expected):
    part, parts = covering_part(spans, rows)
    assert (part, parts) == expected
    each = rows // parts
    assert all(part * each <= begin and end <= (part + 1) * each for begin, end in spans)


def test_one_process_makes_all_rows():
    mesh = MeshSpec.parse("fsdp=4,context=2").build()
    assert local_part(NamedSharding(mesh, P("fsdp", "context")), (8, 6)) == (0, 1)


def test_put_places_a_batch_as_device_put_does(rng):
    mesh = MeshSpec.parse("fsdp=4,context=2").build()
    where = NamedSharding(mesh, P("fsdp", "context"))
    batch = Batch(*(rng.integers(0, 9, (8, 6)).astype(np.int32) for _ in range(4)))
    placed, expected = put_batch(batch, where, 8), jax.device_put(batch, where)
    for mine, other in zip(placed.arrays, expected.arrays, strict=True):
        assert mine.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


@pytest.mark.parametrize(
    ("rank", "words"),
    [("0", "it was killed, or ran out of memory"), ("2", "process 0 of 4, at 127.0.0.1:9, has vanished")],
)
def test_the_last_word(rank, words):
    """A process that ends without a farewell is reported; with one, nothing is."""
    command = [sys.executable, "-I", "-S", "-c", heartbeat._LAST_WORD, rank, "4", "127.0.0.1:9", "Start again."]
    for said, expected in (("goodbye\n", ""), ("", f"error: process {rank} of 4 has ended: {words}")):
        done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=60)
        assert expected in done.stderr
        assert bool(done.stderr) == bool(expected)


def test_a_jax_without_the_key_of_topologies_is_left_as_it_is(monkeypatch):
    """Sharing compiled programs only saves time: a later JAX may name its parts otherwise."""
    from jax._src import cache_key

    monkeypatch.delattr(cache_key, "_hash_accelerator_config")
    share_compiled_programs_of_cpus()
    assert not hasattr(cache_key, "_hash_accelerator_config")
