"""Replayed steps against measured ones: four processes on this machine's cores, layouts that were never profiled.

    python -m tests.proofs.plan.replayed_steps [ROUNDS]     measures and prints the table

Operators are measured one by one, steps by training; both in turn, in the same processes. With two cores two processes
share each: while one waits for a message the other has the core to itself, which the replay takes into account.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from jaxllm.config import to_dict
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.plan.profile.operator_profile import read_profile
from jaxllm.plan.profile.step_prediction import ranked_layouts
from jaxllm.train import RunConfig
from jaxllm.train.run_sharding import described_mesh
from tests import environment
from tests.proofs.harness import proof
from tests.proofs.plan.ranking import kendall

PROCESSES = 4
LIMIT = 3000.0
"""Seconds for all."""
MESHES = (
    "data=4",
    "fsdp=4",
    "tensor=4",
    "stage=4",
    "data=2,fsdp=2",
    "data=2,tensor=2",
    "stage=2,data=2",
)


def profiled_run() -> RunConfig:
    """Decoder of 2.6M parameters, 16 rows of 128 in four micro-batches."""
    block = BlockConfig(AttentionConfig(heads=8, kv_heads=4, head_dim=32), MlpConfig(hidden=512))
    model = DecoderConfig(vocab_size=512, embed_dim=256, layers=4, pattern=(block,), tied=False, remat="none")
    return RunConfig(name="replayed", model=model, data=DataConfig(seq_len=128, batch_size=16), accumulate=4)


def measured_here(run: RunConfig, meshes: tuple[str, ...], rounds: int, out: Path) -> None:
    """Starts the processes, each on a core, and waits for what they write to ``out``."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    told = out / "told.json"
    told.write_text(json.dumps({"run": to_dict(run), "meshes": meshes, "rounds": rounds, "out": str(out)}))
    cores = sorted(os.sched_getaffinity(0))
    common = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAXLLM_COORDINATOR": address,
        "JAXLLM_PROCESSES": str(PROCESSES),
    }
    running = []
    for rank in range(PROCESSES):
        command = [sys.executable, "-m", "tests.proofs.plan.replay_process", str(cores[rank % len(cores)]), str(told)]
        env = common | {"JAXLLM_PROCESS_ID": str(rank)}
        running.append(subprocess.Popen(command, cwd=environment.ROOT, env=env))
    try:
        statuses = [process.wait(LIMIT) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    if any(statuses):
        raise RuntimeError(f"processes that measure ended with {statuses}")


def compared(run: RunConfig, out: Path) -> dict[str, tuple[float, float]]:
    """Measured and predicted seconds of each mesh, from what processes wrote."""
    took = {mesh: median(times) for mesh, times in json.loads((out / "steps.json").read_text()).items()}
    runs = [dataclasses.replace(run, mesh=mesh) for mesh in took]
    found = ranked_layouts([(one, described_mesh(one, PROCESSES)) for one in runs], read_profile(out / "profile.json"))
    assert not (refused := [one.refusal for one in found if one.replay is None]), refused
    return {one.run.mesh: (took[one.run.mesh], one.replay.seconds) for one in found if one.replay is not None}


ROUNDS = 5
"""Turns of all operators and layouts; medians count."""


@proof(
    "plan",
    cases=("four processes on the cores of this machine",),
    sample=0,
    parallel=False,
    bound={"place of the first": 2, "median": 0.25, "one less tau": 0.4, "half of the spread": 1.0},
    counts=tuple(f"{what}, {mesh}, ms" for mesh in MESHES for what in ("measured", "predicted")),
)
def replay_tells_measured_steps(_: str) -> dict[str, float]:
    """Relative error of predicted steps, place of the predicted best among the measured ones, order of all."""
    with tempfile.TemporaryDirectory() as folder:
        measured_here(profiled_run(), MESHES, ROUNDS, Path(folder))
        found = compared(profiled_run(), Path(folder))
    took = {mesh: pair[0] for mesh, pair in found.items()}
    first = min(found, key=lambda mesh: found[mesh][1])
    seconds = {f"{what}, {mesh}, ms": round(1e3 * value, 1) for mesh, pair in found.items()
               for what, value in zip(("measured", "predicted"), pair, strict=True)}  # fmt: skip
    return {
        "place of the first": sorted(took, key=lambda mesh: took[mesh]).index(first) + 1,
        "median": median(abs(said / real - 1) for real, said in found.values()),
        "one less tau": 1 - kendall([*found.values()]),
        "half of the spread": 2 * min(took.values()) / max(took.values()),
        **seconds,
    }


def main(rounds: int, folder: str = "") -> None:
    """Measures and prints a row for each layout."""
    out = Path(folder or tempfile.mkdtemp())
    if rounds:
        measured_here(profiled_run(), MESHES, rounds, out)
    print(out)
    for mesh, (took, said) in compared(profiled_run(), out).items():
        print(f"{mesh:18} measured {took:.3f} s, predicted {said:.3f} s, {said / took - 1:+.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
