"""Optimizer state on disk: bits of resident AdamW after 50 steps, kills at random, damage of any byte."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.train import RunConfig, train
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_tier import DiskTier
from jaxllm.train.disk.state_file import DiskTierError, FileLayout
from jaxllm.train.records.run_directory import RunDirectory
from tests import environment
from tests.proofs.first_run.resume import STEPS, kill_at_random, outcome, unbroken
from tests.proofs.first_run.resume import start as start_run
from tests.proofs.harness import proof
from tests.proofs.parallelism.processes import finish
from tests.train.runs import losses, run_config


def run(folder: Path, layers: int, disk: DiskConfig, **fields: Any) -> RunConfig:
    """A run of 50 steps with gradient clipping."""
    made = run_config(folder, **({"steps": 50, "every": 50} | fields))
    return dataclasses.replace(made, model=dataclasses.replace(made.model, layers=layers), disk=disk)


def hashes(directory: Path) -> dict[str, str]:
    """Hash of every leaf of the newest checkpoint."""
    with Checkpointer(directory / "checkpoints", read_only=True) as checkpointer:
        return {path: leaf.hash for path, leaf in checkpointer.manifest().leaves.items()}


@functools.cache
def resident(layers: int) -> tuple[dict[str, str], list[Any]]:
    """Leaves and losses of the run with its state in memory."""
    with tempfile.TemporaryDirectory() as folder:
        done = train(run(Path(folder), layers, DiskConfig()))
        return hashes(done.directory), losses(done.directory)


@proof("offload", count=12, sample=1)
def disk_is_resident_adam(seed: int) -> None:
    """Drawn windows, layers, saves and starts in between: parameters, moments and losses of 50 steps of one program."""
    rng = random.Random(seed)
    layers, window = rng.choice([1, 3, 6]), rng.randint(2, 8)
    with tempfile.TemporaryDirectory() as folder:
        here, disk = Path(folder), DiskConfig(str(Path(folder) / "files"), window=window)
        every, saving = rng.randint(5, 50), rng.choice(["lazy", "eager", "blocking"])
        done = train(run(here, layers, disk, every=every, saving=saving))
        assert (hashes(done.directory), losses(done.directory)) == resident(layers)


def start(out: Path, log: Path) -> Any:
    """``jaxllm train --disk`` of the run that is killed."""
    return start_run(out, log, "--disk", f"{out / 'files'}:64MiB")


@proof("offload", count=100, sample=1)
def kills_with_state_on_disk(seed: int) -> None:
    """One or two SIGKILLs at random: the files of the state are gone with the process, every checkpoint that is there
    is whole, and the run ends with the bits of an unbroken one whose state was in memory."""
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


@proof(
    "offload",
    cases=["fsdp=4,context=2"],
    sample=1,
    float64=True,
    parallel=False,
    bound={"curve": 1e-10, "parameters": 1e-10},
)
def processes_with_state_on_disk(mesh: str) -> dict[str, float]:
    """Four processes of two devices, each with the shards of its devices in files of its own, against one process with
    its state in memory."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        found = finish(Path(folder), mesh, ("--disk", f"{files}:64MiB"))
        assert os.listdir(files) == []
        return found


@proof("offload", count=300, sample=10)
def passes_are_a_dictionary(seed: int) -> None:
    """The tier under drawn sizes, windows, orders and freezes against a dictionary: contents of every unit at every
    pass, what frozen files have later, one write of each unit in a pass, a read or a forward of each; and a flipped
    bit of a drawn part is named when it is read."""
    rng = np.random.default_rng(seed)
    units, window = int(rng.integers(1, 9)), int(rng.integers(2, 6))
    layouts = [
        FileLayout(f"unit {u}", [f"part {u}.{p}" for p in range(3)], rng.integers(0, 9000, 3).tolist())
        for u in range(units)
    ]
    with tempfile.TemporaryDirectory(dir=environment.ROOT) as folder:
        tier = DiskTier(Path(folder), layouts, window, log=[])
        contents: list[list[bytes]] = []
        for file, layout in zip(tier.renew(), layouts, strict=True):
            contents.append([rng.bytes(size) for size in layout.sizes])
            for number, data in enumerate(contents[-1]):
                file.write_part(number, np.frombuffer(data, np.uint8).copy())
        frozen: list[tuple[Any, list[list[bytes]]]] = []
        for _ in range(int(rng.integers(1, 6))):
            if rng.random() < 0.3:
                frozen.append((tier.freeze(), [list(one) for one in contents]))
            assert tier.log is not None
            tier.log.clear()
            order = rng.permutation(units).tolist()
            tier.begin(order)
            for unit in order:
                buffer, layout = tier.take(unit), layouts[unit]
                assert [layout.part(buffer, p).tobytes() for p in range(3)] == contents[unit]
                contents[unit] = [rng.bytes(size) for size in layout.sizes]

                def fill(
                    buffer: np.ndarray, layout: FileLayout = layout, new: tuple[bytes, ...] = tuple(contents[unit])
                ) -> None:
                    for number, data in enumerate(new):
                        layout.part(buffer, number)[:] = np.frombuffer(data, np.uint8)

                tier.give(unit, fill, keep=bool(rng.random() < 0.8))
            written = [event.unit for event in tier.log if event.what == "write"]
            came = [event.unit for event in tier.log if event.what == "forward"]
            read = [event.unit for event in tier.log if event.what == "read"]
            assert written == order
            assert not set(came) & set(read), "forwarded from memory, and read too"
            assert sorted(came + read) == list(range(units))
            assert len(tier._slots) <= window
        for files, then in [*frozen, (tier.freeze(), contents)]:
            assert [[file.read_part(p).tobytes() for p in range(3)] for file in files] == then
        parts = [(u, p) for u, layout in enumerate(layouts) for p, size in enumerate(layout.sizes) if size]
        if parts:
            unit, part = parts[int(rng.integers(len(parts)))]
            file = tier.freeze()[unit]
            byte = bytearray(contents[unit][part])
            byte[int(rng.integers(len(byte)))] ^= 1 << int(rng.integers(8))
            known = list(file._sums)
            file.write_part(part, np.frombuffer(bytes(byte), np.uint8).copy())
            file._sums = known
            with pytest.raises(DiskTierError, match=f"part {unit}.{part} is damaged"):
                file.read_part(part)
