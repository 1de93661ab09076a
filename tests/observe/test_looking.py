"""Observability of a real run: rows, trackers, norms by layer, a profile, events."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxllm.files import DataError, read_rows
from jaxllm.observe.config import ObserveConfig
from jaxllm.observe.event_log import goodput, read_events
from jaxllm.observe.metric_sinks import MetricSinks, SinkError, check_sinks
from jaxllm.observe.profile_summary import ProfiledOp, read_trace, summarise
from jaxllm.train import train
from jaxllm.train.records.run_directory import RunDirectory
from tests import environment
from tests.train.runs import STEPS, run_config, signal_at

pytestmark = pytest.mark.usefixtures("shared_programs")


class Fake(types.ModuleType):
    """Stub of a tracker's package that records its calls."""

    def __init__(self, name: str):
        super().__init__(name)
        self.begun: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.breaks_at: int | None = None

    def init(self, **keywords: Any) -> Fake:
        self.begun = keywords
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.breaks_at:
            raise ConnectionError("no network")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    found = {name: Fake(name) for name in ("wandb", "trackio")}
    for name, fake in found.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return found


@pytest.mark.drawn(0.3)
def test_a_run_looked_at_in_every_way(tmp_path, trackers, monkeypatch):
    """One run: profiled by range and by a signal; its trackers get every row."""
    signal_at(monkeypatch, 6, signal.SIGUSR2)
    observe = ObserveConfig(sinks=("wandb", "trackio"), layers_every=5, profile="3:5")
    result = train(run_config(tmp_path, observe=observe))
    files = RunDirectory(result.directory)
    rows = [row for row in files.read_metrics() if "nll" in row]

    for fake in trackers.values():
        assert fake.begun["name"] == "tiny"
        assert fake.begun["config"]["steps"] == STEPS
        assert [step for step, values in fake.rows if "nll" in values] == list(range(1, STEPS + 1))
        assert [values["nll"] for _, values in fake.rows if "nll" in values] == [row["nll"] for row in rows]
        assert [step for step, values in fake.rows if "heldout_nll" in values] == [STEPS]
        assert fake.finished == 1

    layers = read_rows(files.layers)
    assert [row["step"] for row in layers] == [5, 10]
    for row in layers:
        step = rows[row["step"] - 1]
        for name in ("grad", "param", "update"):
            together = math.sqrt(sum(value**2 for values in row[name].values() for value in values))
            assert together == pytest.approx(step[f"{name}_norm"], rel=1e-5)
        assert len(row["grad"]["segments/0/0/attention/q"]) == 1, "one layer"

    assert sorted(path.name for path in files.profiles.iterdir()) == ["step_3", "step_8"]
    for folder, steps in (("step_3", 2), ("step_8", 3)):
        summary = read_trace(files.profiles / folder)
        assert summary.computing > 0
        assert summary.steps == steps
        assert 0 <= summary.exposed <= summary.communicating
        assert 0 < summary.communicating < summary.span, "gradients are reduced"
        assert len(summary.devices) == environment.DEVICES
        assert steps * environment.DEVICES in {times for _, _, times in summary.top}, "once a step and device"
        assert (files.profiles / folder / "summary.txt").read_text() == summary.text() + "\n"

    events = read_events(files.path)
    kinds = [event["event"] for event in events]
    assert kinds[:3] == ["started", "initialised", "compiled"]
    assert kinds[-3:] == ["saved", "evaluated", "finished"]
    spans = [(event["first"], event["last"]) for event in events if event["event"] == "steps"]
    assert [step for first, last in spans for step in range(first, last + 1)] == list(range(1, STEPS + 1))
    assert [event["step"] for event in events if event.get("place") == "disk"] == [4, 8, 12]
    account = goodput(events)
    assert account is not None
    assert sum(size for _, size in account.parts()) == pytest.approx(events[-1]["time"] - events[0]["began"], abs=1e-2)


@pytest.mark.drawn(0.3)
def test_a_run_that_goes_on_writes_what_was_lost(stopped, finished, tmp_path):
    """Stopped after 7 of its steps: the log says that nothing was done again, and no row is there twice."""
    with (stopped / "layers.jsonl").open("w") as out:
        out.write("".join(json.dumps({"step": step, "grad": {}}) + "\n" for step in (5, 7, 9)))
    assert train(run_config(finished, out=tmp_path)).complete
    assert [row["step"] for row in read_rows(stopped / "layers.jsonl")] == [5, 7]
    events = read_events(stopped)
    account = goodput(events)
    assert account is not None
    assert account.starts == 2
    assert account.restarts == ((7, 7),)
    assert account.lost == 0
    assert [event["event"] for event in events if event["event"] in ("stopped", "restored")] == ["stopped", "restored"]


def test_a_failure_is_the_last_event(tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the disk is full\nand more")

    monkeypatch.setattr("jaxllm.train.run.Run.compile_step", fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        train(run_config(tmp_path))
    last = read_events(tmp_path / "runs" / "tiny")[-1]
    assert (last["event"], last["why"]) == ("failed", "the disk is full")


# Trackers


def test_a_tracker_that_is_not_there_is_refused_by_name(tmp_path, monkeypatch):
    for name, module in (("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(SinkError, match=f"{name} needs a package: pip install {module}"):
            check_sinks([name])
        with pytest.raises(SinkError):
            train(run_config(tmp_path, observe=ObserveConfig(sinks=(name,))))
    assert not (tmp_path / "runs").exists(), "refused before anything is written"


def test_a_tracker_that_breaks_does_not_end_the_run(tmp_path, trackers, caplog):
    trackers["wandb"].breaks_at = 2
    with MetricSinks(tmp_path / "metrics.jsonl", ("wandb", "trackio"), "mine", {}) as sinks:
        for step in (1, 2, 3):
            sinks.log(step, {"loss": 1.0 / step, "expert_load": [1.0, 2.0]})
    assert trackers["wandb"].rows == [(1, {"loss": 1.0})]
    assert [step for step, _ in trackers["trackio"].rows] == [1, 2, 3]
    assert [row["expert_load"] for row in read_rows(tmp_path / "metrics.jsonl")] == [[1.0, 2.0]] * 3
    (said,) = caplog.messages
    assert said == "tracker wandb failed and gets no more metrics: no network"


def test_a_tracker_knows_the_run_again(tmp_path, trackers):
    begun = []
    for folder in ("a", "a", "b"):
        with MetricSinks(tmp_path / folder / "metrics.jsonl", ("wandb",), "mine", {}):
            begun.append(trackers["wandb"].begun["id"])
    assert begun[0] == begun[1] != begun[2]


def test_event_files_of_tensorboard_say_the_same(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    with MetricSinks(tmp_path / "metrics.jsonl", ("tensorboard",), "mine", {"steps": 3}) as sinks:
        for step in (1, 2, 3):
            sinks.log(step, {"loss": 1.0 / step, "expert_load": [1.0]})
    (file,) = (tmp_path / "tensorboard").iterdir()
    raw, found = file.read_bytes(), []
    while raw:
        size = int.from_bytes(raw[:8], "little")
        found.append(event_pb2.Event.FromString(raw[12 : 12 + size]))
        raw = raw[16 + size :]
    scalars = [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value if "config" not in v.tag]
    assert scalars == [(1, "loss", 1.0), (2, "loss", 0.5), (3, "loss", pytest.approx(1 / 3))]
    assert any("config" in v.tag for e in found for v in e.summary.value)


# Configuration


@pytest.mark.parametrize("profile", ["0:3", "3", "5:5", "6:2", "a:b", "1:2:3"])
def test_profiles_of_no_steps_are_refused(profile):
    with pytest.raises(ValueError, match=r"write FIRST:END"):
        ObserveConfig(profile=profile)


def test_other_settings_that_mean_nothing_are_refused():
    assert list(ObserveConfig(profile="10:13").profiled_steps()) == [10, 11, 12]
    with pytest.raises(ValueError, match="none of tensorboard, wandb, trackio"):
        ObserveConfig(sinks=("mlflow",))
    with pytest.raises(ValueError, match="layers_every"):
        ObserveConfig(layers_every=-1)


# What a trace says


def test_exposed_communication_is_what_nothing_hides():
    """By hand: of 10 ms, an all-gather of 4 of which 3 are under a fusion, a reduce of 2 alone, a loop around all."""

    def op(name: str, begin: float, end: float, device: str = "TPU:0") -> ProfiledOp:
        return ProfiledOp(device, name, begin * 1e3, end * 1e3)

    one = [
        op("while.3", 0, 10),
        op("fusion.1", 0, 4),
        op("all-gather-start.2", 1, 5),
        op("fusion.1", 6, 7),
        op("fusion.2", 6.5, 8),
        op("all-reduce.7", 8, 10),
    ]
    found = summarise(one)
    for value, milliseconds in (
        (found.span, 10), (found.computing, 6), (found.communicating, 6), (found.exposed, 3), (found.idle, 1)
    ):  # fmt: skip
        assert value == pytest.approx(1e-3 * milliseconds)
    assert found.top[0] == ("fusion.1", pytest.approx(5e-3), 2)
    assert "while.3" not in found.text()
    two = summarise([*one, op("fusion.1", 0, 10, "TPU:1")])
    assert two.devices == ("TPU:0", "TPU:1")
    assert two.exposed == pytest.approx(1.5e-3), "a mean over the devices"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("all-gather.3", True), ("reduce-scatter-start", True), ("ncclDevKernel_AllReduce_Sum_f32", True),
        ("all-to-all.1", True), ("collective-permute-done.2", True), ("send.1", True), ("recv-done", True),
        ("fusion.12", False), ("dot.3", False), ("reduce.7", False), ("append.1", False), ("gather_fusion", False),
        ("ragged-all-to-all", True), ("descend", False),
    ],
)  # fmt: skip
def test_what_is_communication(name, is_one):
    found = summarise([ProfiledOp("GPU:0", name, 0.0, 1e6)])
    assert (found.communicating > 0) is is_one


def test_operations_of_every_kind_of_device(tmp_path):
    """A trace as the profiler writes one: which of its rows are operations, and whose."""
    rows = {
        ("/device:TPU:0", "XLA Ops"): [("fusion.1", {}, 0, 5), ("%all-gather.2 = bf16[8] all-gather(...)", {}, 5, 2)],
        ("/device:TPU:0", "Steps"): [("1", {}, 0, 9)],
        ("/device:GPU:1", "Stream #20(Compute)"): [("loop_fusion", {"hlo_op": "fusion.9"}, 1, 3)],
        ("/device:GPU:1", "Stream #21(NCCL)"): [("ncclDevKernel_AllGather(x)", {"hlo_op": "all-gather-start.3"}, 3, 2)],
        ("/host:CPU", "tf_XLAEigen/1"): [
            ("dot.4", {"hlo_op": "dot.4", "device_ordinal": "2"}, 0, 1),
            ("Sleep", {}, 0, 9),
        ],
    }
    events = []
    for number, ((plane, row), found) in enumerate(rows.items()):
        events.append({"ph": "M", "pid": hash(plane), "name": "process_name", "args": {"name": plane}})
        events.append({"ph": "M", "pid": hash(plane), "tid": number, "name": "thread_name", "args": {"name": row}})
        for name, facts, begin, long in found:
            one = {"ph": "X", "pid": hash(plane), "tid": number, "name": name, "ts": begin, "dur": long, "args": facts}
            events.append(one)
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    with gzip.open(folder / "host-1.trace.json.gz", "wt") as out:
        json.dump({"traceEvents": events}, out)
    summary = read_trace(tmp_path)
    assert summary.devices == ("host-1 CPU:2", "host-1 GPU:1", "host-1 TPU:0")
    assert {name for name, _, _ in summary.top} == {
        "fusion.1", "all-gather.2", "fusion.9", "all-gather-start.3 (ncclDevKernel_AllGather)", "dot.4"
    }  # fmt: skip
    assert summary.exposed == pytest.approx((2e-6 + 1e-6 + 0) / 3)


def test_no_profile_is_said(tmp_path):
    with pytest.raises(DataError, match=r"no profile"):
        read_trace(tmp_path)


def test_the_signal_has_its_old_meaning_after_a_run(tmp_path):
    from jaxllm.observe.profiler import Profiler

    old = signal.getsignal(signal.SIGUSR2)
    with Profiler(Path(tmp_path), range(0)).listen_for_signal():
        assert signal.getsignal(signal.SIGUSR2) is not old
        os.kill(os.getpid(), signal.SIGUSR2)
    assert signal.getsignal(signal.SIGUSR2) is old
