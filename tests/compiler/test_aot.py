"""Ahead-of-time compilation for a topology: the compile report."""

from __future__ import annotations

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.compiler import aot
from jaxllm.compiler.aot import CompileReport
from jaxllm.compiler.collectives import Collective
from sharding import MeshSpec
from sharding.isolate import OutOfDeviceMemory, run_isolated
from sharding.topology import Topology

CPU = Topology.parse("cpu:8")
REPORT = CompileReport(
    name="train_step",
    topology="h100:8x8",
    num_devices=64,
    jax="0.10.2",
    compiler="jax-cuda13-plugin 0.10.2",
    lower_seconds=0.5,
    compile_seconds=61.25,
    argument_bytes=40 * 2**30,
    output_bytes=41 * 2**30,
    alias_bytes=40 * 2**30,
    temp_bytes=20 * 2**30,
    code_bytes=2**20,
    host_bytes=0,
    hbm_bytes=84942979072,
    collectives=(Collective("all-gather", 8, 2**30, 12), Collective("all-gather", 8, 2**20, 3)),
    cycles=None,
    unknown_loops=0,
)


def mesh_and_array(spec: str = "fsdp"):
    mesh = MeshSpec.parse(spec).build(CPU.devices())
    return mesh, jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))


def test_memory_is_that_of_one_device():
    mesh, x = mesh_and_array()
    report = aot.compile(jax.jit(lambda x: x * 2, donate_argnums=0), x, topology=CPU, mesh=mesh, name="double")
    assert (report.name, report.topology, report.num_devices) == ("double", "cpu:8", 8)
    assert report.argument_bytes == report.output_bytes == report.alias_bytes == 64 * 16 * 4 // 8
    assert report.total_bytes == report.argument_bytes + report.temp_bytes + report.code_bytes
    assert (report.fits, report.hbm_bytes, report.cycles, report.collectives) == (True, None, None, ())
    assert report.compile_seconds > 0


def test_the_mesh_is_set_while_tracing():
    mesh, x = mesh_and_array("data=2,fsdp=4")
    step = jax.jit(lambda x: jax.sharding.reshard(x, P(None, None)))
    report = aot.compile(step, x, topology=CPU, mesh=mesh)
    assert report.collectives == (Collective("all-gather", 4, 64 * 16 * 4, 1),)


def test_json_holds_all_of_it():
    assert CompileReport.from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT
    with pytest.raises(TypeError, match="colour"):
        CompileReport.from_json({**REPORT.to_json(), "colour": "red"})


def test_the_table_says_what_is_needed_and_what_is_there():
    text = str(REPORT)
    assert "train_step on h100:8x8 (64 x NVIDIA H100 80GB HBM3); jax 0.10.2" in text
    assert "compiled in 61.2 s" in text
    lines = {line.split("  ")[1]: line.split() for line in text.splitlines() if line.startswith("  ")}
    assert lines["arguments"][-1] == "40.000"
    assert lines["results outside donated arguments"][-1] == "1.000"
    assert lines["total"][1:] == ["61.001", "of", "79.11:", "fits"]
    assert lines["all-gather"] == ["all-gather", "8", "15", "12.003"]
    large = dataclasses.replace(REPORT, temp_bytes=60 * 2**30, cycles=2_500_000, unknown_loops=1)
    assert not large.fits
    assert large.over_bytes == 101 * 2**30 + 2**20 - 84942979072
    assert "of 79.11: 21.892 too much" in str(large)
    assert "2.5 M cycles" in str(large)
    assert "1 loops of unknown length" in str(large)
    assert "none" in str(dataclasses.replace(REPORT, collectives=()))


def test_a_gpu_program_too_large_is_compiled_and_says_so():
    report = CompileReport.from_json(run_isolated("tests.compiler.programs:too_large", "h100:1x8", {"gib": 50}))
    assert report.total_bytes == pytest.approx(100 * 2**30, rel=1e-3)
    assert not report.fits


@pytest.mark.drawn(0.3)
def test_a_tpu_program_too_large_is_refused_by_its_compiler():
    with pytest.raises(OutOfDeviceMemory, match=r"40\.00 GiB on each device of v6e:2x4") as raised:
        run_isolated("tests.compiler.programs:too_large", "v6e:2x4", {"gib": 20})
    assert raised.value.need == 40 * 2**30


def test_progress_names_the_stages_and_ends():
    mesh, x = mesh_and_array()
    heard = []

    def slow(x):
        time.sleep(1.3)  # tracing takes longer than a tick
        return x

    aot.compile(
        jax.jit(slow), x, topology=CPU, mesh=mesh, progress=lambda seconds, stage: heard.append((seconds, stage))
    )
    assert heard[0][1] == "tracing"
    assert heard[0][0] >= 1.0
    assert heard[-1][1] == "done"


@pytest.mark.drawn(0.3)
def test_stages_of_an_isolated_compilation_reach_the_caller():
    stages = []
    run_isolated(
        "tests.compiler.programs:fsdp_step",
        "cpu:8",
        {"layers": 2, "width": 64},
        progress=lambda seconds, stage: stages.append(stage),
    )
    assert list(dict.fromkeys(stages)) == ["starting", "tracing", "compiling", "reading the program", "done"]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_stderr_fits_where_it_goes(terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    for seconds in range(62):
        aot.to_stderr(seconds + 0.4, "compiling")
    aot.to_stderr(62.0, "done")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.replace("\r", "\n").strip("\n").splitlines()
    assert lines[-1].split() == ["62", "s", "done"]
    assert lines[-2].split()[2] == "compiling"
    assert (len(lines), err.count("\n")) == ((63, 1) if terminal else (3, 3))


def test_what_cannot_be_compiled_is_refused():
    mesh, x = mesh_and_array()
    with pytest.raises(TypeError, match=r"not jitted: give jax\.jit"):
        aot.compile(lambda x: x, x, topology=CPU, mesh=mesh)
    with pytest.raises(ValueError, match=r"the mesh has 8 devices, cpu, and they are not the 4 of cpu:4"):
        aot.compile(jax.jit(lambda x: x), x, topology=Topology.parse("cpu:4"), mesh=mesh)
