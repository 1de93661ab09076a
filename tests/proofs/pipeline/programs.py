"""Compiled pipeline schedules: they hold the activations, and send the messages, of the schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.compiler.aot import CompileReport
from jaxllm.data import Batch, DataConfig
from jaxllm.models import DecoderConfig, functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.offload_bands import OffloadedChunks, offload_bands
from jaxllm.parallel.pipeline.schedule_generators import NAMES, VEES, default_chunks, make, peak_of_vee
from jaxllm.parallel.pipeline.schedule_table import tabulate
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from jaxllm.train.run import build_value_and_grad
from recipes.llama3 import llama3_70b, llama3_405b
from sharding import MeshSpec
from sharding.state import abstract_params
from sharding.topology import Topology
from tests import environment, tiny
from tests.proofs.harness import proof

STAGES = 4
WIDTH, LENGTH, ROWS = 64, 32, 2


def model_of(schedule: str) -> DecoderConfig:
    """Two layers a virtual stage, of which each keeps its input alone; wide beside a batch's numbers."""
    layers = 2 * STAGES * default_chunks(schedule)
    return tiny.decoder(layers=layers, embed_dim=WIDTH, dtype="float32", remat="full", tied=False)


@functools.lru_cache
def compiled(schedule: str, micro_batches: int) -> tuple[int, str]:
    """Temporary bytes of a device, and the program, of loss and gradients."""
    run = RunConfig(
        model=model_of(schedule),
        data=DataConfig(batch_size=ROWS * micro_batches, seq_len=LENGTH),
        accumulate=micro_batches,
        parallel=ParallelConfig(schedule=schedule),  # type: ignore[arg-type]
    )
    model = functional(run.model, run.parallel.rules())
    mesh = MeshSpec.parse(f"stage={STAGES}").build(jax.devices()[:STAGES])
    params = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    there = jax.NamedSharding(mesh, jax.P())
    tokens = jax.ShapeDtypeStruct((ROWS * micro_batches, LENGTH), jnp.int32, sharding=there)
    with jax.set_mesh(mesh):
        made = (
            jax.jit(build_value_and_grad(run, model, mesh))
            .lower(params, Batch(*[tokens] * 4))
            .compile(environment.AS_EVER)
        )  # type: ignore[arg-type]
    memory: Any = made.memory_analysis()
    return memory.temp_size_in_bytes, made.as_text() or ""


def pools(schedule: str, micro_batches: int) -> tuple[int, int, int]:
    """By formula: slots for saved inputs of virtual stages, messages, and bytes of both."""
    made = make(schedule, STAGES, micro_batches)
    table = tabulate(made)
    if schedule in VEES:
        assert made.peak <= peak_of_vee(schedule, STAGES)
    else:
        p, m = STAGES, micro_batches
        peaks = {
            "gpipe": m, "1f1b": min(m, p), "interleaved": (2 * (p - 1) + p + 1) / 2, "gis": min(m, p),
            "gis_min": (p + 3) / 2, "zb_h1": min(m, p), "zb_h2": min(m, 2 * p - 1),
        }  # fmt: skip
        assert made.peak == peaks[schedule]
    assert table.saves == made.peak * made.chunks
    one = ROWS * LENGTH * WIDTH * 4
    return table.saves, table.messages, one * (2 * table.saves + table.messages + 1)


@proof("pipeline", cases=NAMES, sample=1, bound={"slots": 0.1})
def activations_follow_the_formula(schedule: str) -> dict[str, float]:
    """The program's buffer of saved inputs has the schedule's peak of slots, with 8 micro-batches and with 24.

    With more micro-batches its memory grows by what the formula says, and by the batch: no buffer is there twice.
    """
    taken, wanted = [], []
    for micro in (8, 24):
        saves, _, held = pools(schedule, micro)
        shape = f"f32[{{}},2,{ROWS},{LENGTH},{WIDTH}]"
        temporaries, program = compiled(schedule, micro)
        assert shape.format(saves) in program, f"no buffer of {saves} slots"
        assert shape.format(saves + 1) not in program
        taken.append(temporaries)
        wanted.append(held + 4 * micro * ROWS * LENGTH * 4)
    more = (taken[1] - taken[0]) - (wanted[1] - wanted[0])
    return {"slots": abs(more) / (2 * ROWS * LENGTH * WIDTH * 4)}


TOPOLOGIES = ("v5e:2x2", "h100:1x4")
BIG = ("v5e:4x4", "h100:2x8")


def small_run(
    schedule: str,
    layers: int = 1,
    rows: int = 1,
    offload: float = 0.0,
    which: OffloadedChunks = "all",
    stages: int = STAGES,
) -> RunConfig:
    """Every dimension is whole tiles of a TPU. So many layers a virtual stage, and rows a micro-batch."""
    model = tiny.decoder(
        dtype="float32", embed_dim=256, heads=2, kv_heads=2, head_dim=128, mlp=256, vocab_size=1024,
        layers=layers * stages * default_chunks(schedule), tied=False, remat="full",
    )  # fmt: skip
    return RunConfig(
        name=schedule,
        model=dataclasses.replace(model, dtype="bfloat16"),
        mesh=f"stage={stages}",
        parallel=ParallelConfig(schedule=schedule, offload=offload, offload_chunks=which),  # type: ignore[arg-type]
        accumulate=8,
        data=DataConfig(batch_size=8 * rows, seq_len=256),
    )


@proof(
    "pipeline",
    cases=[(name, on) for name in NAMES for on in TOPOLOGIES],
    sample=1,
    bound={"host": 0.0, "stays": 0.5},
)
def offloaded_activations_are_on_the_host(case: tuple[str, str]) -> dict[str, float]:
    """Host memory is slots x layers x a layer's input, to the byte; half of the layers, of gpipe's all.

    "stays": of gpipe, whose pool is the largest, the part of its bytes that the device still takes.
    """
    schedule, on = case
    layers, rows, micro = 8, 16, 16
    share = 1.0 if schedule == "gpipe" else 0.5

    def compiled(offload: float) -> CompileReport:
        run = small_run(schedule, layers, rows, offload)
        data = dataclasses.replace(run.data, batch_size=micro * rows)
        return compile_for(dataclasses.replace(run, accumulate=micro, data=data), on)

    table = tabulate(make(schedule, STAGES, micro))
    one = layers * rows * 256 * 256 * 2
    report = compiled(share)
    errors = {"host": abs(report.host_bytes - (table.hosted + 1) * share * one), "stays": 0.0}
    if schedule == "gpipe":
        without = compiled(0.0)
        assert without.host_bytes == 0
        errors["stays"] = 1 - (without.temp_bytes - report.temp_bytes) / (table.saves * one)
    return errors


CHUNKED = [name for name in NAMES if default_chunks(name) > 1]
"""Schedules of several chunks on a stage."""
LONGEST = [
    *((name, on, STAGES) for name in CHUNKED for on in TOPOLOGIES),
    *((name, on, 16) for name in ("interleaved", "gis_min") for on in BIG),
]


@proof("pipeline", cases=LONGEST, sample=1, bound={"host": 0.0, "device": 5.0}, counts=("saved",))
def longest_lived_chunks_are_on_the_host(case: tuple[str, str, int]) -> dict[str, float]:
    """Half of a stage's layers, those of the chunks that live longest first: host memory is by the table, to the byte.

    "device": slots of a chunk's layers that the device takes more than by the table, beside half of the layers of every
    chunk: those on their way, of which there are twice as many. "saved": slots that it takes less; with 16 stages
    there are some.
    """
    schedule, on, stages = case
    layers, rows, micro = 8, 16, 2 * stages if stages > STAGES else 16
    one = rows * 256 * 256 * 2

    def found(which: OffloadedChunks) -> tuple[CompileReport, int, int]:
        """The program; by the table its bytes on the host, and those on the device that depend on the choice."""
        run = small_run(schedule, layers, rows, 0.5, which, stages)
        run = dataclasses.replace(run, accumulate=micro, data=dataclasses.replace(run.data, batch_size=micro * rows))
        made = make(schedule, stages, micro)
        (bands,) = offload_bands(made, [layers], 0.5, which)
        tables = [(band, (band.end - band.first) * one, tabulate(made, band.away)) for band in bands]
        host = sum(size * (table.hosted + 1) for band, size, table in tables if band.away)
        device = sum(size * table.saves for band, size, table in tables if len(band.away) < made.chunks)
        return compile_for(run, on), host, device

    (report, host, device), (even, _, device_even) = found("longest"), found("all")
    saved = (even.temp_bytes - report.temp_bytes) / (layers * one)
    assert device <= device_even
    assert stages == STAGES or saved > 0
    more = (device_even - device) / (layers * one) - saved
    return {"host": abs(report.host_bytes - host), "device": max(0.0, more), "saved": saved}


@proof("pipeline", cases=[(name, on) for name in NAMES for on in TOPOLOGIES], sample=1, bound={"bytes": 1e-3})
def messages_follow_the_formula(case: tuple[str, str]) -> dict[str, float]:
    """Bytes of the program's permutations: an activation each way that the schedule uses, in every tick.

    The text of a program does not say in which ticks the branch is taken that sends; fewer are, ``Table.sends``.
    """
    schedule, on = case
    run = small_run(schedule)
    report = compile_for(run, on)
    table = tabulate(make(schedule, STAGES, run.accumulate))
    ways = bool(table.pairs_right) + bool(table.pairs_left)
    wanted = table.ticks * ways * run.data.seq_len * run.model.embed_dim * 2
    assert table.sends <= table.ticks * ways
    found = sum(row.total_bytes for row in report.collectives if row.kind == "collective-permute")
    return {"bytes": abs(found - wanted) / wanted}


@dataclasses.dataclass(frozen=True)
class Pod:
    """A plan for a pod, of a recipe that has another one without stages."""

    recipe: Callable[[], RunConfig]
    on: str
    mesh: str
    rows: int
    micro_batches: int
    depths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.recipe.__name__} on {self.on}, {self.mesh}, {self.micro_batches} micro-batches of {self.rows} rows"
        )

    def run(self) -> RunConfig:
        """The recipe, pipelined; ZeRO-2, so that a layer's weights are gathered once a step."""
        run = self.recipe()
        return dataclasses.replace(
            run,
            mesh=self.mesh,
            accumulate=self.micro_batches,
            data=dataclasses.replace(run.data, batch_size=self.rows),
            parallel=ParallelConfig(sequence=True, schedule="1f1b", zero=2, depths=self.depths),
        )


SIXTEEN = (7, *(8,) * 14, 7)
"""Layers of 126: the first stage has the embedding and the last one the head besides."""
PODS = (
    Pod(llama3_70b, "h100:32x8", "stage=4,fsdp=8,tensor=8", 64, 8),
    Pod(llama3_70b, "v5p:4x8x8", "stage=4,fsdp=16,tensor=4", 128, 8),
    Pod(llama3_70b, "v6e:16x16", "stage=4,fsdp=16,tensor=4", 128, 8),
    Pod(llama3_405b, "h100:128x8", "stage=16,fsdp=8,tensor=8", 256, 32, SIXTEEN),
    Pod(llama3_405b, "v5p:8x8x16", "stage=16,fsdp=8,tensor=8", 256, 32, SIXTEEN),
)


@proof("pipeline", cases=PODS, sample=1, bound={"of_memory": 1.0, "messages": 1e-3})
def pods(pod: Pod) -> dict[str, float]:
    """The share of a device's memory that the step takes, and how far what stages send is from the formula."""
    run, topology = pod.run(), Topology.parse(pod.on)
    report = compile_for(run, pod.on)
    print(report)
    sizes = dict(MeshSpec.parse(pod.mesh).axes)
    table = tabulate(make("1f1b", sizes["stage"], pod.micro_batches))
    rows = pod.rows // pod.micro_batches // sizes["fsdp"]
    message = rows * run.data.seq_len // sizes["tensor"] * run.model.embed_dim * 2
    found = sum(
        row.total_bytes
        for row in report.collectives
        if row.kind == "collective-permute" and row.group_size == sizes["stage"]
    )
    wanted = 2 * table.ticks * message
    assert topology.hbm_bytes is not None
    return {"of_memory": report.total_bytes / topology.hbm_bytes, "messages": abs(found - wanted) / wanted}
