"""Parameters on disk: the resident run to rounding, the same bits with any window and after kills, counted bytes."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.checkpoint import Checkpointer
from jaxllm.models import MoeConfig
from jaxllm.optim import OptimConfig
from jaxllm.train import RunConfig, train
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_step import part_of
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.disk.streamed_bytes import micro_batch_major_reads, step_traffic
from jaxllm.train.records.run_directory import RunDirectory
from jaxllm.train.step.routing_losses import RoutingConfig
from tests.proofs.first_run.resume import STEPS, kill_at_random, outcome
from tests.proofs.first_run.resume import start as start_run
from tests.proofs.harness import proof
from tests.proofs.offload.optimizer_on_disk import hashes
from tests.proofs.parallelism import processes
from tests.train.runs import losses, run_config

STREAMED = ("--disk.parameters", "--model.remat", "full")
"""Settings of a streamed run beside ``--disk``."""
MEMORY = Path("/dev/shm")
"""A file system in the host's memory."""


def run(
    folder: Path,
    layers: int,
    disk: DiskConfig,
    kind: str = "adamw",
    experts: bool = False,
    remat: str = "full",
    **fields: Any,
) -> Any:
    """A run whose layers are recomputed as ``remat`` says, without gradient clipping unless ``fields`` have it."""
    common = {"steps": 12, "every": 12, "mesh": "fsdp=4,context=2", "clip_norm": None}
    made = run_config(folder, **(common | fields))
    block = made.model.pattern[0]
    dtype = "float64" if jax.config.jax_enable_x64 else "float32"  # pyright: ignore[reportAttributeAccessIssue]
    pattern = (dataclasses.replace(block, mlp=MoeConfig(4, 2, 16)),) if experts else (block,)
    return dataclasses.replace(
        made,
        model=dataclasses.replace(
            made.model, layers=layers, pattern=pattern, remat=remat, dtype=dtype, param_dtype=dtype
        ),
        routing=RoutingConfig(balance_loss=0.1, z_loss=0.01) if experts else RoutingConfig(),
        optim=OptimConfig(made.optim.schedule, kind=kind, clip_norm=made.optim.clip_norm),
        disk=disk,
    )


def drawn_policy(rng: random.Random, layers: int) -> str:
    """What layers save beside their inputs: nothing, or named values, of all layers or of some."""
    policy = rng.choice(["full", "attention", "elementwise", "save:attention", "save:qkv+residual"])
    if layers == 1 or rng.random() < 0.5:
        return policy
    count = rng.randint(1, layers - 1)
    runs = [f"{policy}={count}", f"full={layers - count}"]
    return policy if policy == "full" else ",".join(rng.sample(runs, 2))


@proof("offload", count=24, sample=1, float64=True, bound={"curve": 1e-10, "parameters": 1e-10, "heldout": 1e-10})
def streamed_layers_are_resident(seed: int) -> dict[str, float]:
    """Drawn layers, windows, micro-batches, optimizers, meshes, saved values, with and without experts and their
    losses, and with and without gradient clipping: losses, gradient norms, parameters and held-out loss of twelve steps
    with everything in memory. Not to the bit: the program of one layer adds in another order than that of all
    layers."""
    rng = random.Random(seed)
    layers, window, experts = rng.randint(1, 7), rng.randint(2, 5), seed % 3 == 0
    fields: dict[str, Any] = {"clip_norm": rng.choice([None, 0.5])}
    fields |= {"kind": rng.choice(["adamw", "adafactor", "sgd"]), "accumulate": rng.choice([1, 2])}
    meshes = ["fsdp=4,context=2", "fsdp=2,tensor=2,data=2", "tensor=2,fsdp=4"]
    if experts:
        meshes = ["fsdp=4,context=2", "expert=2,fsdp=4", "expert=2,fsdp=2,tensor=2", "expert=4,data=2"]
        fields["batch_size"] = 16
    fields |= {"mesh": rng.choice(meshes), "remat": drawn_policy(rng, layers)}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        plain = train(run(here, layers, DiskConfig(), experts=experts, out=here / "plain", **fields))
        disk = DiskConfig(str(here / "files"), window=window, parameters=True)
        done = train(run(here, layers, disk, experts=experts, **fields))
        assert os.listdir(here / "files") == []
        curves = [np.array(losses(one.directory))[:, 1:] for one in (done, plain)]
        ours, theirs = (Checkpointer(one.directory / "checkpoints", read_only=True) for one in (done, plain))
        pairs = zip(*(jax.tree.leaves(one.restore_params()[0]) for one in (ours, theirs)), strict=True)
        assert done.evaluation is not None
        assert plain.evaluation is not None
        return {
            "curve": float(np.abs(curves[0] / curves[1] - 1).max()),
            "parameters": max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3)) for a, b in pairs),
            "heldout": abs(done.evaluation.nll / plain.evaluation.nll - 1),
        }


@functools.cache
def streamed(layers: int, clip_norm: float | None, remat: str = "full") -> tuple[dict[str, str], list[Any]]:
    """Leaves and losses of a streamed run with a window of two layers."""
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskConfig(str(Path(folder) / "files"), window=2, parameters=True)
        done = train(run(Path(folder), layers, disk, clip_norm=clip_norm, remat=remat))
        return hashes(done.directory), losses(done.directory)


@proof("offload", count=12, sample=1)
def windows_change_no_bit(seed: int) -> None:
    """Drawn windows, saves, steps between saves, saved values, files on a disk or in the host's memory, inputs of all
    layers, of some, of as many as the passes hide or of none in files: parameters, moments and losses of twelve steps
    are those of a window of two layers that saves the same values."""
    rng = random.Random(seed)
    layers, window = rng.choice([1, 3, 6]), rng.randint(2, 8)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=rng.choice([None, *([MEMORY] * MEMORY.is_dir())])) as files,
    ):
        inputs = (
            {"activations": True, "activation_layers": rng.choice(["auto", *range(layers + 1)])}
            if rng.random() < 0.5
            else {}
        )
        disk = DiskConfig(files, window=window, parameters=True, **inputs)
        saving = rng.choice(["lazy", "eager", "blocking"])
        every, clip_norm = rng.randint(1, 12), rng.choice([None, 0.5])
        remat = drawn_policy(rng, layers)
        done = train(run(Path(folder), layers, disk, every=every, saving=saving, clip_norm=clip_norm, remat=remat))
        assert (hashes(done.directory), losses(done.directory)) == streamed(layers, clip_norm, remat)


def start(out: Path, log: Path) -> Any:
    """``jaxllm train --disk`` of the run that is killed."""
    return start_run(out, log, "--disk", f"{out / 'files'}:64MiB", *STREAMED)


@functools.cache
def unbroken() -> tuple[list[tuple[Any, ...]], dict[str, str]]:
    """Result of a streamed run that is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder), Path(folder) / "log"
        code = start(out, log).wait(timeout=300)
        assert code == 0, f"exit status {code}:\n{log.read_text()[-3000:]}"
        return outcome(out)


def killed(seed: int, start: Callable[[Path, Path], Any]) -> None:
    """One or two SIGKILLs at random, then a start to the end, whose bits are those of ``unbroken``.

    Args:
        seed: of the times.
        start: starts the run in a process of its own.
    """
    rng = random.Random(seed)
    expected = unbroken()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder), Path(folder) / "log"
        for _ in range(rng.randint(1, 2)):
            kill_at_random(out, log, rng, start)
            assert not (out / "files").exists() or os.listdir(out / "files") == []
            checkpoints = RunDirectory(out / "tiny").checkpoints
            if checkpoints.exists():
                with Checkpointer(checkpoints, read_only=True) as checkpointer:
                    for step in checkpointer.steps():
                        checkpointer.verify(step)
        code = start(out, log).wait(timeout=300)
        assert code == 0, f"exit status {code}:\n{log.read_text()[-3000:]}"
        assert outcome(out) == expected
    assert len(expected[0]) == STEPS


@proof("offload", count=100, sample=1)
def kills_with_parameters_on_disk(seed: int) -> None:
    """One or two SIGKILLs at random: no file of the tier is left, every checkpoint is whole, and the run ends with the
    bits of one that is not killed."""
    killed(seed, start)


@proof(
    "offload",
    cases=["fsdp=4,context=2"],
    sample=1,
    float64=True,
    parallel=False,
    bound={"curve": 1e-10, "parameters": 1e-10},
)
def processes_with_parameters_on_disk(mesh: str) -> dict[str, float]:
    """Four processes of two devices, each with the shards of its devices in files of its own, and the inputs of layers
    too, against one process with everything in memory."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as resident:
        here, other = Path(folder), Path(resident)
        more = ("--disk", f"{here / 'files'}:64MiB", *STREAMED, "--disk.activations")
        four = processes.Processes(here, mesh, more=more)
        assert four.wait() == [0] * processes.PROCESSES, four.said(0)[-3000:]
        assert os.listdir(here / "files") == []
        plain: RunConfig = processes.together_run()
        plain = dataclasses.replace(
            plain,
            mesh=mesh,
            out=str(other),
            data=dataclasses.replace(plain.data, source=str(processes.write_text(other)), cache_dir=str(other)),
            model=dataclasses.replace(plain.model, remat="full"),
        )
        train(plain)
        (curve, params), (want_curve, want) = processes.outcome(here), processes.outcome(other)
        worst = max(np.linalg.norm(params[p] - w) / max(np.linalg.norm(w), 1e-3) for p, w in want.items())
        return {"curve": float(np.abs(curve / want_curve - 1).max()), "parameters": float(worst)}


@proof("offload", count=300, sample=10)
def traffic_is_the_formula(seed: int) -> None:
    """Tiers of drawn models and windows in the order of a streamed step: bytes read and written by the tiers' counts
    are those of the formula (at most, where gradients are clipped and the window is more than half of the layers), and
    micro-batch-major order reads as many times more as there are micro-batches."""
    rng = random.Random(seed)
    window, ends, moments = rng.randint(2, 6), rng.random() < 0.8, rng.randint(0, 2)
    clipped = rng.random() < 0.5
    segments = {str(s): rng.randint(1, 7) for s in range(rng.randint(1, 3))}
    place = SingleDeviceSharding(jax.devices()[0])

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=place)

    layers = {s: {"w": leaf(count, rng.randint(1, 3000)), "b": leaf(count, 1)} for s, count in segments.items()}
    params = {"embedding": {"table": leaf(50, 20)}, "segments": layers, "head": {"weight": leaf(20, 50)}}
    state = tuple(params if ends else part_of({**params, "embedding": {}, "head": {}}, "") | {"segments": layers}
                  for _ in range(moments))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = DiskConfig(folder, window=window, parameters=True)
        files = StateFiles(config, (state, leaf()))
        own = StateFiles(config, params, "params")
        for tier in (files.tier, own.tier):
            for file in tier.renew():
                for part, size in enumerate(file.layout.sizes):
                    file.write_part(part, np.zeros(size, np.uint8))
        numbers = {unit: n for n, unit in enumerate(files.units)}
        order = list(range(len(own.units)))
        traffic = step_traffic(own, files, clipped=clipped)
        for _ in range(3):
            before = own.tier.moved + files.tier.moved
            own.tier.begin([*order, *[*reversed(order)] * (2 if clipped else 1)])
            back = [numbers[own.units[n]] for n in reversed(order) if own.units[n] in numbers]
            rest = [n for n, unit in enumerate(files.units) if not unit.segment]
            files.tier.begin(back + rest)
            for unit in [*order, *[*reversed(order)] * clipped]:
                own.tier.take(unit)
                own.tier.release(unit, lambda: None)
            for unit in reversed(order):
                own.tier.take(unit)
                own.tier.give(unit, lambda buffer: None)
                if (number := numbers.get(own.units[unit])) is not None:
                    files.tier.take(number)
                    files.tier.give(number, lambda buffer: None)
            for number in rest:
                files.tier.take(number)
                files.tier.give(number, lambda buffer: None, keep=False)
            moved = own.tier.moved + files.tier.moved - before
        assert moved["write"] == traffic.written
        if clipped and len(order) < 2 * window:
            assert 0.5 * traffic.read <= moved["read"] <= traffic.read
        else:
            assert moved["read"] == traffic.read
        count, sizes = rng.randint(2, 5), [own.layout(n).size for n in order]
        for _ in range(2):
            before = own.tier.moved["read"]
            sweeps = [*order, *reversed(order)] * count
            own.tier.begin(sweeps)
            for unit in sweeps:
                own.tier.take(unit)
                own.tier.release(unit, lambda: None)
            read = own.tier.moved["read"] - before
        assert read == micro_batch_major_reads(sizes, window, count)
        assert read == count * micro_batch_major_reads(sizes, window, 1)
