"""Parts of elastic runs: membership, who is slow or hung, warm starts, meshes and rows for the devices left."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxllm.cli.main import main
from jaxllm.data import Batch
from jaxllm.observe.event_log import goodput
from jaxllm.parallel.elastic.elastic_supervisor import ElasticSupervisor
from jaxllm.parallel.elastic.host_link import HostLink
from jaxllm.parallel.elastic.membership import ElasticPolicy, Membership
from jaxllm.parallel.elastic.process_starts import HostStarts, LocalStarts
from jaxllm.parallel.elastic.rank_monitor import BATCH, HOST, WAITING, LoopPosition, RankMonitor, RankReporter
from jaxllm.parallel.elastic.run_generation import RunGeneration, detect_generation
from jaxllm.parallel.elastic.slow_ranks import FLOOR, STEPS, WARMUP, RankStepTimes, SlowRank, SlowRanks
from jaxllm.parallel.elastic.warm_start import WarmStart, is_runnable
from jaxllm.parallel.supervisor import ProcessSpec, RestartPolicy, free_port, process_variables
from jaxllm.train.config import RunConfig
from jaxllm.train.recovery.elastic_mesh import config_for_devices_left
from jaxllm.train.run_rows import pad_rows, rows_on_mesh
from sharding import Rules


def test_a_slot_stays_out_longer_with_each_failure():
    members = Membership(3, ElasticPolicy(away=10, longest=30))
    assert members.present(0.0) == (0, 1, 2)
    assert [members.exclude(1, now) for now in (0.0, 10.0, 30.0, 60.0)] == [10.0, 20.0, 30.0, 30.0]
    assert members.present(89.9) == (0, 2)
    assert members.present(90.0) == (0, 1, 2)
    with pytest.raises(ValueError, match=r"elastic.least = 0; give 1 or more"):
        ElasticPolicy(least=0)


def test_a_generation_is_read_as_it_was_told():
    told = RunGeneration(3, (0, 2, 3), 4, "abcd", "127.0.0.1:9", ({"event": "lost", "time": 1.5},))
    found = detect_generation(told.environment())
    assert found == told
    assert found is not None
    assert found.events == told.events
    assert detect_generation({}) is None


def found_slow(rng: np.random.Generator, own: dict[int, dict[str, float]], steps: int) -> list[SlowRank]:
    """Findings over steps of 0.2 s in four processes, of which some spend more by themselves from step 5 on."""
    compared, found = SlowRanks(4, 0.4), []
    for step in range(1, steps + 1):
        for rank in rng.permutation(4):
            more = own.get(int(rank), {}) if step > 4 else {}
            parts = {name: rng.uniform(0, 0.02) + more.get(name, 0.0) for name in ("batch", "host", "late")}
            times = RankStepTimes(step, parts["batch"], parts["host"], 0.3, parts["late"])
            found += [one for one in [compared.add(int(rank), times)] if one is not None]
    return found


@pytest.mark.parametrize(("field", "phase"), [("batch", "batch"), ("host", "host"), ("late", "stopped")])
def test_a_slow_process_is_named_within_three_steps(rng: np.random.Generator, field: str, phase: str):
    for slow in range(4):
        first = found_slow(rng, {slow: {field: 0.3}}, 4 + STEPS)
        assert [(one.rank, one.step, one.phase) for one in first] == [(slow, 4 + STEPS, phase)]


def test_even_processes_are_never_named(rng: np.random.Generator):
    assert not found_slow(rng, {}, 300)
    assert not found_slow(rng, {rank: {"host": 0.3} for rank in range(4)}, 50)  # all alike
    assert not found_slow(rng, {2: {"host": FLOOR / 2}}, 50)
    assert not found_slow(rng, {2: {"late": 5.0}}, 4 + STEPS - 1)
    assert WARMUP < 4


class Watched:
    """A monitor of three processes, by a clock of its own; and what they send."""

    def __init__(self, hung_after: float):
        self.now = 100.0
        self.monitor = RankMonitor(ElasticPolicy(hung_after=hung_after), lambda: self.now)
        self.monitor.watch("g", 3)
        host, port = self.monitor.address.split(":")
        self.to = host, int(port)
        self.links = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3)]

    def send(self, rank: int, step: int, phase: str, seconds: float, generation: str = "g") -> None:
        about = {"generation": generation, "rank": rank, "at": LoopPosition(step, phase, seconds)}
        self.links[rank].sendto(json.dumps(about).encode(), self.to)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.monitor.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched(2.0)
    yield made
    made.close()


def test_a_silent_process_is_hung(watched: Watched):
    for _ in range(40):
        for rank in range(3):
            watched.send(rank, 7, WAITING, 0.1)
        assert watched.monitor.poll() is None
        watched.now += 0.1
    for _ in range(25):
        for rank in (0, 2):
            watched.send(rank, 7, WAITING, 0.1)
        watched.send(1, 7, WAITING, 0.1, generation="of another run")
        if (found := watched.monitor.poll()) is not None:
            break
        watched.now += 0.1
    assert found is not None
    assert (found.rank, found.kind, found.step) == (1, "hung", 7)
    assert math.isclose(found.since, 103.9)
    assert 2.0 < watched.now - found.since < 2.3


def test_a_process_that_has_ended_is_not_hung(watched: Watched):
    generation = RunGeneration(1, (0, 1, 2), 3, "k", watched.monitor.address)
    watched.monitor.watch(generation.name, 3)
    with RankReporter(generation, 1):
        time.sleep(0.3)
    for _ in range(40):
        for rank in (0, 2):
            watched.send(rank, 7, HOST, 0.1, generation.name)
        assert watched.monitor.poll() is None
        watched.now += 0.1


def test_nobody_is_hung_if_the_supervisor_did_not_run(watched: Watched):
    for rank in range(3):
        watched.send(rank, 7, WAITING, 0.1)
    assert watched.monitor.poll() is None
    watched.now += 60.0
    assert watched.monitor.poll() is None


@pytest.mark.parametrize(("phase", "hung"), [(HOST, True), (BATCH, True), (WAITING, False), ("saves", False)])
def test_the_process_that_all_others_wait_for_is_hung(watched: Watched, phase: str, hung: bool):
    watched.send(0, 8, WAITING, 2.5)
    watched.send(1, 8, WAITING, 2.5)
    watched.send(2, 8, phase, 2.4)
    found = watched.monitor.poll()
    assert (found is not None) == hung
    if found is not None:
        assert (found.rank, found.kind) == (2, "hung")
        assert phase in found.what


def test_a_reporter_is_heard_and_asked(watched: Watched):
    generation = RunGeneration(1, (0, 1, 2), 3, "k", watched.monitor.address)
    watched.monitor.watch(generation.name, 1)
    with RankReporter(generation, 0) as reporter:
        reporter.position = lambda: LoopPosition(4, HOST, 0.0, (RankStepTimes(3, 0.0, 0.1, 0.2, 0.0),))
        until = time.monotonic() + 20
        while not reporter.reform and time.monotonic() < until:
            assert watched.monitor.poll() is None
            watched.monitor.ask_to_reform()
            time.sleep(0.02)
        assert reporter.reform
    assert watched.monitor.steps == [3]


def warm_main(arguments: list[str]) -> int:
    """Entry point of processes that tests start."""
    what, *rest = arguments
    if what == "write":
        Path(rest[0]).write_text(os.environ["JAXLLM_SLOTS"])
    if what == "wait":
        if rest:
            (Path(rest[0]) / os.environ["JAXLLM_PROCESS_ID"]).touch()
        time.sleep(60)
    if what == "lose":  # a process dies in each of the first two generations, before a step; in the third all end
        generation = detect_generation(os.environ)
        assert generation is not None
        rank = os.environ["JAXLLM_PROCESS_ID"]
        if generation.number < 3:
            if (generation.number, rank) in ((1, "1"), (2, "0")):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    if what == "lose host":  # in the first generation the agent of the last host dies
        generation = detect_generation(os.environ)
        assert generation is not None
        rank = os.environ["JAXLLM_PROCESS_ID"]
        if generation.number == 1:
            if rank == "2":
                os.kill(parent_of(os.getppid()), signal.SIGKILL)
            time.sleep(60)
    if what == "end":  # in the first generation with statuses of their own; "-" sleeps
        generation = detect_generation(os.environ)
        assert generation is not None
        rank = os.environ["JAXLLM_PROCESS_ID"]
        if generation.number == 1:
            ends = rest[1].split(",")[int(rank)]
            if ends.startswith("-"):
                os.kill(os.getpid(), int(ends[1:]) if ends[1:] else 0)
                time.sleep(60)
            return int(ends)
        rest = rest[:1]
    if what in ("lose", "lose host", "end"):
        (Path(rest[0]) / rank).write_text(json.dumps([generation.slots, [one["slot"] for one in generation.events]]))
    return int(rest[1]) if len(rest) > 1 else 0


@pytest.mark.drawn(3)
def test_warm_processes_end_as_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    starter = WarmStart("tests.launch.test_elastic:warm_main", (), {})
    written = starter.start(["write", str(tmp_path / "a"), "3"], {"JAXLLM_SLOTS": "0,2"}, tmp_path / "log")
    failed = starter.start(["write"], {}, tmp_path / "log")
    waiting = starter.start(["wait"], {}, tmp_path / "log")
    assert written.wait() == 3
    assert (tmp_path / "a").read_text() == "0,2"
    assert failed.wait() == 1
    assert "IndexError" in (tmp_path / "log").read_text()
    assert waiting.poll() is None
    waiting.kill()
    assert waiting.wait() == -signal.SIGKILL
    assert starter.alive
    last = starter.start(["wait"], {}, None)
    assert last.started.wait(20)
    starter.close()
    assert last.wait() == -signal.SIGTERM


@pytest.mark.drawn(3)
def test_the_others_go_on_without_lost_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of four, two are lost one after the other, the second before a step is done: the third generation is told of
    both."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    said: list[str] = []

    def make(slots, coordinator, variables):
        own = {**variables, "JAX_PLATFORMS": "cpu"}
        command = ("lose", str(tmp_path))
        ranks = range(len(slots))
        return [ProcessSpec(command, {**own, "JAXLLM_PROCESS_ID": str(rank)}, tmp_path / "log") for rank in ranks]

    entry = "tests.launch.test_elastic:warm_main"
    policy = ElasticPolicy(), said.append
    assert ElasticSupervisor(make, 4, LocalStarts(4, entry), "127.0.0.1", RestartPolicy(pause=0), *policy).run() == 0
    told = {file.name: json.loads(file.read_text()) for file in tmp_path.glob("[0-9]")}
    assert told == {key: [[2, 3], [1, 0]] for key in ("0", "1")}
    assert "process 1 (slot 1, pid" in said[0]
    assert "lost: was killed by SIGKILL after step 0; its slot is out for 60 s" in said[0]
    assert said[1] == "going on with 3 of 4 processes"
    assert "process 0 (slot 0, pid" in said[2]
    assert said[3] == "going on with 2 of 4 processes"


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("ends", "slots", "told"),
    [
        ("-9,75,2,1", [1, 2, 3], "process 0 (slot 0, pid"),  # what others say after a kill may follow from that
        ("75,75,75,-", [0, 1, 2], "has not ended when the others gave up"),
        ("75,75,75,75", [0, 1, 2, 3], "all form again"),
        ("75,-,-,-", [1, 2, 3], "ended with status 75 and others go on"),
        ("75,1,75,75", [0, 2, 3], "process 1 (slot 1, pid"),
        ("2,75,75,75", [], "process 0 ended with status 2; not restarted"),
    ],
)
def test_only_who_failed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, slots: list[int], told: str
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr("jaxllm.parallel.elastic.elastic_supervisor.CAUSE", 0.5)
    said: list[str] = []

    def make(slots, coordinator, variables):
        own = [{**variables, "JAX_PLATFORMS": "cpu", "JAXLLM_PROCESS_ID": str(rank)} for rank in range(len(slots))]
        return [ProcessSpec(("end", str(tmp_path), ends), one, tmp_path / "log") for one in own]

    starts = LocalStarts(4, ENTRY)
    patience = RestartPolicy(pause=0, grace=0)
    assert ElasticSupervisor(make, 4, starts, patience=patience, say=said.append).run() == (0 if slots else 2)
    last = [json.loads(file.read_text())[0] for file in tmp_path.glob("[0-9]")]
    assert last == [slots] * len(slots)
    named = [line for line in said if line.startswith("process")]
    assert len(named) == (1 if len(slots) < 4 else 0)
    assert told in "\n".join(said)


def parent_of(pid: int) -> int:
    """Process that has started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


ENTRY = "tests.launch.test_elastic:warm_main"


def start_agent(slot: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """Starts the agent of a host, whose processes are ``warm_main``."""
    code = (
        "import sys; from jaxllm.parallel.elastic.host_agent import HostAgent; "
        f"sys.exit(HostAgent(('localhost', {port}), {slot}, '{ENTRY}', (), 60.0, print).run())"
    )
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=folder)


@pytest.mark.drawn(2)
def test_signals_reach_the_processes_of_all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    port, log = free_port(), tmp_path / "log"
    agent = start_agent(1, port, tmp_path)

    def make(slots, coordinator, variables):
        own = [process_variables(rank, len(slots), coordinator) for rank in range(len(slots))]
        return [ProcessSpec(("wait", str(tmp_path)), {**variables, **one}, log) for one in own]

    def stop() -> None:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("[0-9]"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    starts = HostStarts(2, ("localhost", port), ENTRY)
    thread = threading.Thread(target=stop)
    thread.start()
    supervisor = ElasticSupervisor(
        make, 2, starts, "localhost", RestartPolicy(pause=0, grace=20), say=lambda text: None
    )
    assert supervisor.run() == 128 + signal.SIGTERM
    thread.join()
    assert agent.wait(30) == 128 + signal.SIGTERM
    assert len(list(tmp_path.glob("[0-9]"))) == 2


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("what", "slots", "lost"),
    [("lose", [2], ["slot 1", "slot 0"]), ("lose host", [0, 1], ["slot 2"])],
)
def test_the_others_go_on_without_lost_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, slots: list[int], lost: list[str]
):
    """The agents of two hosts start what the supervisor of the third asks for; processes are lost, or a whole host."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    said: list[str] = []
    port, coordinators = free_port(), []
    agents = [start_agent(slot, port, tmp_path) for slot in (1, 2)]

    def make(slots, coordinator, variables):
        coordinators.append(coordinator)
        own = [{**variables, **process_variables(rank, len(slots), coordinator)} for rank in range(len(slots))]
        return [ProcessSpec((what, str(tmp_path)), one, tmp_path / "log") for one in own]

    starts = HostStarts(3, ("localhost", port), ENTRY)
    supervisor = ElasticSupervisor(make, 3, starts, "localhost", RestartPolicy(pause=0), ElasticPolicy(), said.append)
    assert supervisor.run() == 0
    told = {file.name: json.loads(file.read_text()) for file in tmp_path.glob("[0-9]")}
    assert [facts[0] for facts in told.values()] == [slots] * len(slots)
    named = [line for line in said if line.startswith("process")]
    assert [f"({place} on {socket.gethostname()}, pid " in line for place, line in zip(lost, named, strict=True)]
    assert ("has lost its host, which does not answer, after step 0" in named[-1]) == (what == "lose host")
    codes = [one.wait(30) for one in agents]
    assert codes == [0, -signal.SIGKILL if what == "lose host" else 0]
    assert all(coordinator.startswith("localhost:") for coordinator in coordinators)
    assert len(set(coordinators)) == len(coordinators)


def test_an_end_that_says_nothing_is_gone():
    with socket.create_server(("localhost", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    talking, silent = HostLink(one, beat=0.05, silent=0.3), HostLink(other, beat=10.0, silent=60.0)
    silent.send(word=[1])
    began = time.monotonic()
    assert list(talking.receive()) == [{"word": [1]}]  # its own signs of life are no sign of the other's
    assert 0.2 < time.monotonic() - began < 10
    assert not talking.open
    assert list(silent.receive()) == []
    assert not silent.open


def test_hosts_are_found_by_name_and_number():
    starts = HostStarts(3, ("localhost", free_port()), ENTRY)
    try:
        assert starts.slot_of(socket.gethostname() + ".domain") == 0
        assert [starts.slot_of(name) for name in ("2", "3", "elsewhere")] == [2, None, None]
        assert starts.available() == {0}
        assert starts.start(1, ProcessSpec(("write",))).wait() == -signal.SIGKILL  # nobody is there
    finally:
        starts.close(0)


def test_held_slots_take_the_place_of_those_that_are_out():
    members = Membership(5, ElasticPolicy(spares=2, away=10))
    assert members.wanted == 3
    assert members.choose(members.present(0.0), ()) == (0, 1, 2)
    members.exclude(1, 0.0)
    assert members.choose(members.present(1.0), (0, 1, 2)) == (0, 2, 3)
    assert members.choose(members.present(11.0), (0, 2, 3)) == (0, 2, 3)  # the slot that is back is held
    with pytest.raises(ValueError, match=r"elastic\.spares = 3 of 3 slots; leave 1 or more"):
        Membership(3, ElasticPolicy(spares=3))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--elastic.exclude", "7"], "no slot is called 7; the slots are 0 to 3"),
        (["--elastic.exclude", "0,1,2,3"], "leave too few of 4 slots"),
        (["--elastic.exclude", "0,1,2", "--elastic.least", "2"], "leave too few of 4 slots"),
    ],
)
def test_policies_that_leave_nobody_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], told: str):
    assert main(["launch", "local", "-n", "4", *options, "--", "train", "quickstart", "--elastic"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("kind", [["local", "-n", "2"], ["supervise"]])
def test_options_of_elastic_runs_are_refused_for_others(capsys: pytest.CaptureFixture[str], kind: list[str]):
    assert main(["launch", *kind, "--elastic.spares", "1", "--", "train", "quickstart"]) == 2
    assert "--elastic.* are options of elastic runs, and this command is none" in capsys.readouterr().err


def test_a_stopped_process_is_not_runnable():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until = time.monotonic() + 20
        while not is_runnable(busy.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert is_runnable(busy.pid)
        busy.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, busy.pid, os.WSTOPPED | os.WNOWAIT)
        assert not is_runnable(busy.pid)
    finally:
        busy.kill()
        busy.wait()
    assert not is_runnable(busy.pid)


def test_only_data_and_fsdp_shrink():
    def check(config: RunConfig, mesh: AbstractMesh) -> None:
        if 16 % mesh.shape.get("fsdp", 1):
            raise ValueError

    def left(text: str, devices: int, total: int = 8) -> str:
        return config_for_devices_left(RunConfig(mesh=text), devices, total, check).mesh

    assert left("data=2,fsdp=2,tensor=2", 8) == "data=2,fsdp=2,tensor=2"
    assert left("data=2,fsdp=2,tensor=2", 6) == "data=3,fsdp=1,tensor=2"
    assert left("data=2,fsdp=2,tensor=2", 2) == "data=1,fsdp=1,tensor=2"
    assert left("fsdp=8", 6) == "fsdp=2,data=3"
    assert left("fsdp=-1", 4) == "fsdp=4"
    assert left("tensor=8", 6) == "tensor=6"  # no mesh with eight parts: the nearest


def test_rows_of_padding_have_no_targets(rng: np.random.Generator):
    mesh, rules = AbstractMesh((3, 2), ("data", "tensor")), Rules((("batch", ("data", "fsdp")),), storage=())
    assert rows_on_mesh(8, mesh, rules) == 9
    assert rows_on_mesh(8, mesh, rules, accumulate=2) == 12
    assert rows_on_mesh(9, mesh, rules) == 9
    tokens = rng.integers(0, 9, (8, 4), np.int32)
    weights = rng.uniform(size=(8, 4)).astype(np.float32)
    batch = Batch(tokens, tokens, np.ones_like(tokens), tokens, weights)
    padded = pad_rows(batch, 9)
    for before, after in zip(batch.arrays, padded.arrays, strict=True):
        np.testing.assert_array_equal(after[:8], before)
        assert after.dtype == before.dtype
    assert (padded.targets[8] == -1).all()
    assert not padded.segment_ids[8].any()
    shapes = pad_rows(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch), 9)
    assert shapes.tokens.shape == (9, 4)


def test_failures_are_no_intervals_of_time():
    events = [
        {"event": "started", "began": 0.0, "time": 1.0},
        {"event": "initialised", "time": 2.0, "step": 0},
        {"event": "steps", "first": 1, "last": 8, "waited": 0.0, "time": 10.0},
        {"event": "started", "began": 12.0, "time": 13.0},
        {"event": "lost", "time": 11.0, "rank": 2, "slot": 2, "what": "", "step": 8, "named_after": 0.1},
        {"event": "restored", "time": 14.0, "step": 8},
        {"event": "recovered", "time": 14.5, "step": 9, "seconds": 3.5},
        {"event": "steps", "first": 9, "last": 10, "waited": 0.0, "time": 16.0},
    ]
    found = goodput(events)
    assert found is not None
    assert (found.total, found.steps, found.down, found.other["restoring"]) == (16.0, 10.0, 2.0, 1.0)


def test_elastic_runs_need_their_supervisor(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "supervise", "--", "train", "quickstart", "--elastic"]) == 2
    assert "needs a job of several hosts, and the environment describes one process" in capsys.readouterr().err
    assert main(["train", "quickstart", "--elastic", "--steps", "1"]) == 2
    assert "jaxllm launch local -n PROCESSES -- train RECIPE --elastic" in capsys.readouterr().err
