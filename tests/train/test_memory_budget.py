"""``jaxllm train --within``: what layers keep and compute again is chosen so that the step fits, then it trains."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxllm import cli
from jaxllm.cli import memory_budget
from jaxllm.cli.errors import UsageError
from jaxllm.cli.memory_budget import MemoryBudget, fitted_here, measured_for, without_budget
from jaxllm.config import ConfigError
from jaxllm.models.remat import policies_by_layer
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.remat_solver import LOOPS, HostTier, saved_bytes
from jaxllm.train import RunConfig, TrainResult, compile_step
from jaxllm.train.config import DataConfig
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.saved_inputs import host_inputs
from jaxllm.train.disk.state_file import BLOCK, padded
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.model_flops import hardware_flops_per_token, train_flops_per_token
from tests import tiny
from tests.train import runs

KEPT = {"full": 0, "attention": 30, "elementwise": 40, "none": 180}
BASE = 80


@pytest.fixture
def measured(monkeypatch):
    """Steps whose bytes are a sum over layers, in MiB, instead of compiled ones."""

    def memory(run: RunConfig) -> tuple[int, int]:
        kept = KEPT | saved_bytes(run.model, KEPT, run.data.seq_len)
        return int(
            (BASE + sum(kept.get(name, 0) for name in policies_by_layer(run.model.remat, run.model.segments))) * 2**20
        ), 0

    monkeypatch.setattr(compile_step, "step_memory_here", memory)


@pytest.mark.parametrize(
    ("words", "rest", "budget"),
    [
        (["--within", "14GiB", "--steps", "3"], ["--steps", "3"], MemoryBudget(14 << 30)),
        (["--within=1.5"], [], MemoryBudget(3 << 29)),
        (["--within", "800MiB", "--host", "2TiB"], [], MemoryBudget(800 << 20, 2 << 40)),
        (["--fit", "--host.optimizer"], ["--host.optimizer"], MemoryBudget(None)),
        (["--steps", "3"], ["--steps", "3"], None),
        (["--fit", "--host=2", "--hardware", "a.toml"], ["--hardware", "a.toml"], MemoryBudget(None, 2 << 30)),
        (["--within", "1", "--disk=/a:b:2"], [], MemoryBudget(1 << 30, None, ("/a:b", 2 << 30))),
        (
            ["--within", "1", "--disk=/a:2", "--disk.parameters"],
            ["--disk.parameters", "--disk.directory", "/a", "--disk.bytes", str(2 << 30)],
            MemoryBudget(1 << 30),
        ),
        (["--disk", "/a:b:2GiB"], ["--disk.directory", "/a:b", "--disk.bytes", str(2 << 30)], None),
    ],
)
def test_budgets_are_read(words, rest, budget):
    assert without_budget(words) == (rest, budget)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--within", "much"], "--within much: give a size, such as 14GiB"),
        (["--within", "0"], "--within 0: give a size"),
        (["--within"], "--within : give a size"),
        (["--host", "3"], "--host SIZE needs --within SIZE"),
        (["--disk", "/nvme"], "--disk /nvme: give DIR:SIZE"),
        (["--disk=/nvme:much"], "--disk much: give a size"),
        (["--fit", "--within", "3"], "--fit is the memory that the devices have"),
    ],
)
def test_what_is_no_budget_is_named(words, message):
    with pytest.raises(UsageError, match=message):
        without_budget(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "a.toml"], "--hardware FILE gives the rates of the devices"),
        (["--within", "3", "--hardware", "missing.toml"], "hardware: cannot read missing.toml"),
        (["--disk=/a:2", "--host", "3", "--hardware=a.toml"], "it needs --mesh auto, or --within SIZE (or --fit)"),
        (["--fit", "--host", "3", "--hardware"], "--hardware: give the file"),
        (["--mesh", "auto", "--hardware="], "--hardware: give the file"),
    ],
)
def test_a_hardware_file_that_nothing_asks_for_is_refused(words, message, capsys):
    assert cli.main(["train", "quickstart", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_run_that_is_trained_fits(measured, monkeypatch, capsys):
    seen: list[RunConfig] = []

    def train(config: RunConfig) -> TrainResult:
        seen.append(config)
        return TrainResult(Path(config.out) / config.name, config.steps, True, None, None)

    monkeypatch.setattr("jaxllm.train.train", train)
    assert cli.main(["train", "quickstart", "--model.layers", "4", "--within", "150MiB"]) == 0
    model, seq_len = seen[0].model, seen[0].data.seq_len
    assert model.remat in capsys.readouterr().out

    def flops(remat: str) -> float:
        return hardware_flops_per_token(dataclasses.replace(model, remat=remat), seq_len)

    kept = KEPT | saved_bytes(model, KEPT, seq_len)
    ways = (way for way in itertools.combinations_with_replacement(kept, model.layers) if len(set(way)) <= LOOPS)
    fitting = [",".join(f"{name}=1" for name in way) for way in ways if sum(map(kept.__getitem__, way)) <= 150 - BASE]
    assert sum(kept[name] for name in policies_by_layer(model.remat, model.segments)) <= 150 - BASE
    assert flops(model.remat) == pytest.approx(min(map(flops, fitting)))


STATE, PARAMS, INPUTS = 60, 10, 5


@pytest.fixture
def with_places(monkeypatch):
    """Steps that take STATE MiB less where the optimizer state is on the host or on disk."""

    def memory(run: RunConfig) -> tuple[int, int]:
        layers = sum(KEPT[name] for name in policies_by_layer(run.model.remat, run.model.segments) if name in KEPT)
        away = STATE * (run.host.optimizer * (1 - run.host.persistent) + bool(run.disk.directory))
        device = round((BASE + layers - away - PARAMS * run.disk.parameters) * 2**20)
        inputs = host_inputs(run.disk, run.model.layers, 1) * run.disk.parameters
        return device, (INPUTS << 20) * inputs // run.model.layers

    def state(run: RunConfig) -> compile_step.StateBytes:
        size = STATE << 20
        there = round(size * run.host.optimizer * (1 - run.host.persistent))
        return compile_step.StateBytes(size, there, jax.device_count() * size * bool(run.disk.directory))

    monkeypatch.setattr(compile_step, "step_memory_here", memory)
    monkeypatch.setattr(compile_step, "state_bytes_here", state)
    known = Cluster.parse("v6e:2x4")
    monkeypatch.setattr(memory_budget, "_cluster_here", lambda _: known)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("budget", "place", "remat"),
    [  # a number is the persistent share of a state on the host; by these sizes offloaded values take nothing there
        (MemoryBudget(BASE + 40 << 20, None, ("/nvme", 1 << 30)), "device", "elementwise"),
        (MemoryBudget(BASE << 20, None, ("/nvme", 1 << 30)), "device", "full"),
        (MemoryBudget(BASE - 1 << 20, None, ("/nvme", 1 << 30)), "disk", "elementwise"),
        (MemoryBudget(BASE - 1 << 20, STATE << 20, ("/nvme", 1 << 30)), 15 / 16, "offload"),
        (MemoryBudget(BASE - 1 << 20, STATE - 1 << 20, ("/nvme", 1 << 30)), 1 / 16, "elementwise"),
        (MemoryBudget(BASE - 1 << 20, STATE // 20 << 20, ("/nvme", 1 << 30)), "disk", "elementwise"),
        (MemoryBudget(BASE - STATE << 20, None, ("/nvme", 1 << 30)), "disk", "full"),
    ],
)
def test_the_optimizer_state_leaves_the_device_where_nothing_fits(with_places, finished, capsys, budget, place, remat):
    run = fitted_here(dataclasses.replace(runs.run_config(finished), mesh="data=8"), budget)
    assert run.model.remat == remat
    on_host = isinstance(place, float)
    assert run.host.optimizer == on_host
    assert run.disk == (DiskConfig("/nvme", 1 << 30) if place == "disk" else DiskConfig())
    said = capsys.readouterr().out
    assert run.host.persistent == (place if on_host else 0)
    assert ("GiB persistent" in said) == (place == 15 / 16)
    assert f"{STATE / 1024:.3f} GiB on the device" in said
    assert ("least in as many MiB" in said) == (remat != "offload")
    assert ("in the host's memory" in said) == (budget.host is not None and budget.device < BASE << 20)
    assert ("on disk, twice that" in said) == (place == "disk")


@pytest.mark.drawn(2)
def test_parameters_leave_the_device_last(with_places, finished, capsys):
    """Where the run's settings allow it, the device has room, and the host for the inputs of layers; those of the
    fewest layers that do not fit there are in files."""
    run = dataclasses.replace(runs.run_config(finished), mesh="data=8")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=10))
    disk, least = ("/nvme", 1 << 30), BASE - STATE - PARAMS << 20
    fitted = fitted_here(run, MemoryBudget(least, None, disk))
    assert fitted.disk == DiskConfig(*disk, parameters=True)
    assert fitted.model.remat == "full"
    assert "4 of them in memory: 0.010 GiB on the device, 0.005 of the host" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"--within is 0.010 GiB"):
        fitted_here(run, MemoryBudget(least - 1, None, disk))
    window = compile_step.window_bytes_here(fitted)
    fitted = fitted_here(run, MemoryBudget(least, (INPUTS - 1 << 20) + window, disk))
    # Of ten inputs the host has room for eight, of which the window of four layers takes four.
    assert fitted.disk == DiskConfig(*disk, parameters=True, activations=True, activation_layers=6)
    assert fitted.disk.host == 0
    said = capsys.readouterr().out
    assert "for layers in memory, is 0.004 GiB" in said
    assert "0.004 of the host for inputs of layers, those of 6 on disk" in said
    fitted = fitted_here(run, MemoryBudget(least, 40 << 20, disk))
    assert fitted.disk == DiskConfig(*disk, parameters=True, host=40 << 20)
    assert "of the host for chunks of the files" in capsys.readouterr().out


@pytest.mark.drawn(2)
def test_a_smaller_window_is_taken_where_it_fits(with_places, finished, monkeypatch, capsys):
    """A layer in the window takes a MiB here."""
    run = dataclasses.replace(runs.run_config(finished), mesh="data=8")
    inner = compile_step.step_memory_here

    def memory(run: RunConfig) -> tuple[int, int]:
        device, host = inner(run)
        return device + (run.disk.window << 20) * run.disk.parameters, host

    monkeypatch.setattr(compile_step, "step_memory_here", memory)
    least = BASE - STATE - PARAMS
    for room, window in ((4, 4), (3, 3), (2, 2)):
        fitted = fitted_here(run, MemoryBudget(least + room << 20, None, ("/nvme", 1 << 30)))
        assert fitted.disk == DiskConfig("/nvme", 1 << 30, parameters=True, window=window)
    with pytest.raises(UsageError, match=r"layers streamed from disk take 0.012 GiB"):
        fitted_here(run, MemoryBudget(least + 1 << 20, None, ("/nvme", 1 << 30)))


@pytest.mark.drawn(2)
def test_a_smaller_window_is_taken_where_it_fits_the_host(with_places, finished, capsys):
    """Of the state alone, and of streamed layers with their inputs in memory."""
    run = dataclasses.replace(runs.run_config(finished), mesh="data=8")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=10))
    disk = ("/nvme", 1 << 30)
    for parameters, least, inputs in ((False, BASE - STATE, 0), (True, BASE - STATE - PARAMS, INPUTS)):
        windows = {}
        for window in (2, 3, 4):
            there = DiskConfig(*disk, window=window, parameters=parameters)
            windows[window] = compile_step.window_bytes_here(
                memory_budget.with_remat(dataclasses.replace(run, disk=there), "full")
            )
        assert windows[2] < windows[3] < windows[4]
        for window, size in windows.items():
            fitted = fitted_here(run, MemoryBudget(least << 20, (inputs << 20) + size, disk))
            assert fitted.disk == DiskConfig(*disk, window=window, parameters=parameters)
    with pytest.raises(UsageError):
        fitted_here(run, MemoryBudget(least << 20, windows[2] - 1, disk))


@pytest.mark.drawn(2)
def test_places_that_the_disk_has_no_room_for_are_not_taken(with_places, finished, monkeypatch, capsys):
    """The state twice, as while a checkpoint is written, and inputs of layers in files."""
    run = dataclasses.replace(runs.run_config(finished), mesh="data=8")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=10))
    for parameters, least in ((False, BASE - STATE), (True, BASE - STATE - PARAMS)):
        there = DiskConfig("/nvme", parameters=parameters)
        state = compile_step.state_bytes_here(
            memory_budget.with_remat(dataclasses.replace(run, disk=there), "full")
        ).disk
        disk = ("/nvme", 2 * state)
        assert fitted_here(run, MemoryBudget(least << 20, None, disk)).disk == DiskConfig(*disk, parameters=parameters)
        with pytest.raises(UsageError):
            fitted_here(run, MemoryBudget(least << 20, None, (disk[0], disk[1] - 1)))
        assert "files take" in capsys.readouterr().out
    window = compile_step.window_bytes_here(
        memory_budget.with_remat(dataclasses.replace(run, disk=DiskConfig("/nvme", parameters=True)), "full")
    )
    host, inputs = (INPUTS - 1 << 20) + window, 6 * ((INPUTS << 20) // 10) * 8
    size = 2 * state + 6 * padded(-(-(INPUTS << 20) // 10)) * 8
    assert size >= 2 * state + inputs
    fitted = fitted_here(run, MemoryBudget(least << 20, host, ("/nvme", size + 8 * BLOCK * 6)))
    assert fitted.disk.activation_layers == 6
    with pytest.raises(UsageError, match="inputs of layers; --disk has"):
        fitted_here(run, MemoryBudget(least << 20, host, ("/nvme", 2 * state + inputs - 1)))


def test_parameters_that_are_to_be_on_disk_are_there(measured, monkeypatch, tmp_path):
    """Under a memory limit too; where the device had room for them."""
    seen: list[RunConfig] = []

    def train(config: RunConfig) -> TrainResult:
        seen.append(config)
        return TrainResult(Path(config.out) / config.name, config.steps, True, None, None)

    monkeypatch.setattr("jaxllm.train.train", train)
    words = ["--within", "1GiB", "--disk", f"{tmp_path}:2GiB", "--disk.parameters", "--model.layers", "4"]
    assert cli.main(["train", "quickstart", *words]) == 0
    assert seen[0].disk == DiskConfig(str(tmp_path), 2 << 30, parameters=True)
    assert seen[0].model.remat == "full"


@pytest.mark.drawn(2)
def test_state_on_disk_has_chunks_in_what_the_host_has_left(with_places, finished, capsys):
    """The host has no room for the whole state, and the device none for the rest: a part of the files stays there."""
    run = dataclasses.replace(runs.run_config(finished), mesh="data=8")
    disk, least = ("/nvme", 1 << 30), BASE - STATE << 20
    away = memory_budget.with_remat(dataclasses.replace(run, disk=DiskConfig(*disk)), "full")
    streamed = dataclasses.replace(away, disk=DiskConfig(*disk, parameters=True))
    window = compile_step.window_bytes_here(away)
    assert 0 < window < compile_step.window_bytes_here(streamed)
    fitted = fitted_here(run, MemoryBudget(least, 40 << 20, disk))
    assert fitted.disk == DiskConfig(*disk, host=40 << 20)
    assert not fitted.host.optimizer
    left = (40 << 20) - window
    assert f"{left / 2**30:.3f} GiB of the host for chunks of the files" in capsys.readouterr().out
    fitted = fitted_here(run, MemoryBudget(least, window + fitted.disk.chunk - 1, disk))
    assert fitted.disk == DiskConfig(*disk), "less than a chunk"
    smallest = dataclasses.replace(away, disk=DiskConfig(*disk, window=2))
    with pytest.raises(UsageError):
        fitted_here(run, MemoryBudget(least, compile_step.window_bytes_here(smallest) - 1, disk))
    assert "layers in the window take" in capsys.readouterr().out


@pytest.mark.drawn(3)
def test_a_streamed_step_is_measured_without_files(finished, tmp_path):
    """What it takes of the device does not grow with the layers; saved values without names are refused."""
    run = runs.run_config(finished)
    disk = DiskConfig(str(tmp_path / "files"), window=2, parameters=True)
    found = []
    for layers in (4, 8):
        model = dataclasses.replace(run.model, layers=layers, remat="full")
        found.append(compile_step.step_memory_here(dataclasses.replace(run, model=model, disk=disk)))
    assert found[0][0] == found[1][0]
    assert 2 * found[0][1] == found[1][1]
    assert not (tmp_path / "files").exists()
    model = dataclasses.replace(run.model, layers=8, remat="elementwise")
    _, host = compile_step.step_memory_here(dataclasses.replace(run, model=model, disk=disk))
    assert host > 3 * found[1][1]
    with pytest.raises(ConfigError, match=r"set model.remat to .full"):
        compile_step.step_memory_here(memory_budget.with_remat(dataclasses.replace(run, disk=disk), "none"))


@pytest.mark.drawn(3)
def test_streamed_layers_save_what_makes_the_step_fastest(finished, monkeypatch, capsys, tmp_path):
    """By the plan, within the host's memory and the device's, as compiled; their inputs alone where one has no room."""
    known = Cluster.parse("v6e:2x4")
    slow = dataclasses.replace(known, hardware=dataclasses.replace(known.hardware, flops_float32=1e9))
    monkeypatch.setattr(memory_budget, "_cluster_here", lambda _: slow)
    run = dataclasses.replace(runs.run_config(finished), mesh="data=8")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=6))
    disk = DiskConfig(str(tmp_path / "files"), 1 << 30, window=2, parameters=True)
    streamed = dataclasses.replace(memory_budget.with_remat(run, "full"), disk=disk)
    device, inputs = compile_step.step_memory_here(streamed)
    window, room = compile_step.window_bytes_here(streamed), 64 << 10
    budget = MemoryBudget(device + room, window + (64 << 10), (disk.directory, disk.bytes))
    fitted = memory_budget._streamed_within(streamed, budget, slow)
    assert fitted.model.remat == "elementwise"
    assert "layers save 6 x elementwise: 0.000 GiB of the host; " in capsys.readouterr().out
    took, host = compile_step.step_memory_here(fitted)
    assert took <= device + room
    assert inputs < host <= 64 << 10
    few = memory_budget._streamed_within(streamed, budget._replace(host=window + 2 * inputs), slow)
    assert few.model.remat not in ("full", "elementwise")
    assert compile_step.step_memory_here(few)[1] <= 2 * inputs
    seconds = [memory_budget._step_by_plan(one, 0, slow).seconds for one in (fitted, few, streamed)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2]
    for less in (budget._replace(device=device), budget._replace(host=None)):
        assert memory_budget._streamed_within(streamed, less, slow).model.remat == "full"
    assert memory_budget._streamed_within(streamed, budget, None).model.remat == "full"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("flops", "on_disk"), [(1e15, False), (1e5, True)])
def test_state_is_on_disk_where_recomputation_beside_the_host_is_slower(
    with_places, finished, monkeypatch, capsys, flops, on_disk
):
    """The host has room for half of the state: the rest would be persistent, and layers would be computed again."""
    known = Cluster.parse("v6e:2x4")
    slow = dataclasses.replace(known, hardware=dataclasses.replace(known.hardware, flops_float32=flops))
    monkeypatch.setattr(memory_budget, "_cluster_here", lambda _: slow)
    inner = compile_step.step_memory_here

    def memory(run: RunConfig) -> tuple[int, int]:
        moves = any(word in run.model.remat for word in ("offload", "@host"))
        return inner(run)[0], moves << 30  # more than the host has

    monkeypatch.setattr(compile_step, "step_memory_here", memory)
    run = dataclasses.replace(runs.run_config(finished), mesh="data=8")
    disk = ("/nvme", 1 << 30)
    # All of the state away, "attention" fits; half of it, "full".
    fitted = fitted_here(run, MemoryBudget(BASE - STATE // 2 << 20, STATE // 2 << 20, disk))
    said = capsys.readouterr().out
    assert bool(fitted.disk.directory) == on_disk
    assert fitted.host.optimizer != on_disk
    assert ("ms by the plan on disk" in said) == on_disk
    seconds = memory_budget._step_by_plan(fitted, 0, slow).seconds
    other = dataclasses.replace(
        run, host=HostConfig() if fitted.host.optimizer else HostConfig(optimizer=True, persistent=0.5)
    )
    if not on_disk:
        other = dataclasses.replace(other, disk=DiskConfig(*disk))
    remats = ("attention", "full") if on_disk else ("full", "attention")
    assert fitted.model.remat == remats[0]
    assert seconds < memory_budget._step_by_plan(memory_budget.with_remat(other, remats[1]), 0, slow).seconds
    assert fitted_here(run, MemoryBudget(BASE - STATE // 2 << 20, STATE // 2 << 20)).host.optimizer


def test_a_place_that_is_given_is_kept(with_places, finished):
    run = dataclasses.replace(runs.run_config(finished), host=HostConfig(optimizer=True))
    with pytest.raises(UsageError, match="the run says where its optimizer state is"):
        fitted_here(run, MemoryBudget(1 << 30, None, ("/nvme", 1)))


@pytest.mark.drawn(3)
def test_a_step_with_its_state_on_disk_is_measured_without_files(finished, tmp_path):
    """It takes less than the state in memory, by no more than the state."""
    run = runs.run_config(finished)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=8))
    away = dataclasses.replace(run, disk=DiskConfig(str(tmp_path / "files"), window=2))
    (here, _), (there, _) = compile_step.step_memory_here(run), compile_step.step_memory_here(away)
    state = compile_step.state_bytes_here(away)
    whole = compile_step.state_bytes_here(run)
    assert not (tmp_path / "files").exists()
    assert 0 < here - there <= whole.device - state.device
    assert state.disk >= whole.device - state.device


def test_what_cannot_be_fitted_is_named(measured, finished):
    run = runs.run_config(finished)
    with pytest.raises(UsageError, match=r"with every block computed again a step takes 0\.078 GiB"):
        fitted_here(run, MemoryBudget(BASE - 1 << 20))
    with pytest.raises(UsageError, match="--fit: cpu does not say how much memory it has; give --within SIZE"):
        fitted_here(run, MemoryBudget(None))
    known = r"--host: how long copies to the host take is known of .*rtx4090.*, not of 8 times cpu"
    with pytest.raises(UsageError, match=rf"{known}.*--hardware FILE.*\[cpu\].*like.*or leave --host out"):
        fitted_here(run, MemoryBudget(1 << 30, 1 << 30))


def test_a_hardware_file_gives_the_rates_of_devices_without_a_data_sheet(measured, tmp_path, monkeypatch, capsys):
    """Copies to the host are timed by the file's entry of the CPU."""
    taken, whole = [], HostTier.of

    def of(config, cluster, mesh, limit):
        taken.append((cluster.name, cluster.hardware.host, limit))
        return whole(config, cluster, mesh, limit)

    monkeypatch.setattr(HostTier, "of", of)
    monkeypatch.setattr("jaxllm.train.train", lambda run: TrainResult(Path(run.out), run.steps, True, None, None))
    file = tmp_path / "cpu.toml"
    file.write_text('[cpu]\nlike = "h100"\nflops = 1e11\nbandwidth = 2e10\nhost = 1e10\n')
    words = ["--within", "1GiB", "--host", "2GiB", "--hardware", str(file)]
    assert cli.main(["train", "quickstart", "--model.layers", "4", *words]) == 0
    assert taken[0] == ("cpu:1x8", 1e10, 2 << 30)
    assert "1.00 times as long as without a limit" in capsys.readouterr().out


def test_a_limit_says_what_it_costs(measured, finished, tmp_path, capsys):
    """Predicted seconds and their parts by the rates of a hardware file, which needs no --host; without rates FLOPs."""
    file = tmp_path / "cpu.toml"
    file.write_text('[cpu]\nlike = "h100"\nflops = 1e11\nflops_float32 = 1e11\nbandwidth = 2e12\n')
    run = dataclasses.replace(runs.run_config(finished), mesh="data=8")
    budget = MemoryBudget(BASE << 20, None, None, file)
    fitted = fitted_here(run, budget)
    assert fitted.model.remat == "full"
    said = capsys.readouterr().out
    cluster = memory_budget._known_here(file)
    assert cluster is not None
    step = memory_budget._step_by_plan(fitted, 0, cluster)
    assert str(step) in said
    assert step.recomputed > 0
    assert step.seconds == step.unlimited + step.recomputed
    assert fitted_here(run, budget._replace(hardware=None)) == fitted
    ratio = hardware_flops_per_token(fitted.model, run.data.seq_len) / train_flops_per_token(
        run.model, run.data.seq_len
    )
    assert f"a step has {ratio:.2f} times the FLOPs of one without a limit" in capsys.readouterr().out


def test_devices_say_what_fits(measured, finished, monkeypatch):
    """95% of 200 MiB are room for one layer that keeps its attention, and not for one that keeps all."""
    device = SimpleNamespace(device_kind="TPU", platform="tpu", memory_stats=lambda: {"bytes_limit": 200 << 20})
    monkeypatch.setattr(jax, "local_devices", lambda *_: [device])
    assert fitted_here(runs.run_config(finished), MemoryBudget(None)).model.remat == "elementwise"


@pytest.mark.drawn(3)
def test_the_step_is_compiled_for_the_devices_that_are_here(finished):
    """With nothing computed again it takes more; the trained step is the program that was measured."""
    run = runs.run_config(finished)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=4))
    none, full = (
        compile_step.step_memory_here(dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat)))
        for remat in ("none", "full")
    )
    assert none[0] > full[0] > 0
    assert none[1] == full[1] == 0


@pytest.mark.drawn(5)
def test_pipelines_have_the_policies_that_they_support(finished, monkeypatch, capsys):
    """The steps are compiled; of policies that pipelines refuse none is, and layers are recomputed alike."""
    found: dict[str, tuple[int, int]] = {}
    compiled = compile_step.step_memory_here

    def memory(run: RunConfig) -> tuple[int, int]:
        if run.model.remat not in found:
            found[run.model.remat] = compiled(run)
        return found[run.model.remat]

    monkeypatch.setattr(compile_step, "step_memory_here", memory)
    run = dataclasses.replace(runs.run_config(finished, batch_size=32), mesh="stage=2,data=4", accumulate=4)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=4, remat="none=2,full=2"))
    assert fitted_here(run, MemoryBudget(1 << 40)).model.remat == "none"
    sizes = {remat: device for remat, (device, _) in found.items()}
    assert set(sizes) == {"full", "elementwise", "none"}
    for remat, size in sizes.items():
        least = [name for name in ("none", "elementwise", "full") if sizes[name] <= size]
        assert fitted_here(run, MemoryBudget(size)).model.remat == least[0], remat
    with pytest.raises(UsageError, match="with every block computed again a step takes"):
        fitted_here(run, MemoryBudget(min(sizes.values()) - 1))
    monkeypatch.setattr(memory_budget, "_cluster_here", lambda _: Cluster.parse("v6e:2x4"))
    assert fitted_here(run, MemoryBudget(sizes["none"], 1 << 30)).model.remat == "none"
    capsys.readouterr()
    with pytest.raises(UsageError, match="with every block computed again a step takes"):
        fitted_here(run, MemoryBudget(min(sizes.values()) - 1, 1 << 30))
    assert "host.optimizer" in capsys.readouterr().out, "the place that pipelines refuse is named"
    assert set(found) == set(sizes)


def test_several_runs_in_one_step_have_remats_of_their_own(capsys):
    assert cli.main(["train", "quickstart", "--together", "runs.toml", "--within", "1"]) == 2
    assert "give each its model.remat" in capsys.readouterr().err


@pytest.mark.drawn(2)
def test_a_step_far_over_device_memory_is_measured():
    """The compiler stops at such a step, and says what it would need; it was told to go on, and the search ended."""
    model = dataclasses.replace(
        tiny.decoder(dtype="float32", layers=2, vocab_size=512, mlp=512, remat="none"), dtype="bfloat16"
    )
    run = RunConfig(name="far over", model=model, mesh="data=1", data=DataConfig(batch_size=16384, seq_len=2048))
    assert measured_for(run, "v5e:1x1").device > 2 * 2**34
