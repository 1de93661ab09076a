"""Layout switches: a run that changes its mesh, against one that does not."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoint import Checkpointer
from jaxllm.models import MoeConfig
from jaxllm.optim import OptimConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import train
from jaxllm.train.recovery.layout_switch import LayoutSwitch, switched_train
from tests.proofs.harness import proof
from tests.train.runs import losses, run_config

STEPS = 20
MESHES = (
    "data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2", "fsdp=2,data=2,context=2", "stage=2,fsdp=4",
    "stage=4,data=2", "tensor=2,context=2,data=2",
)  # fmt: skip


@proof("layouts", count=20, sample=1, float64=True, bound={"curve": 1e-10, "parameters": 1e-10, "heldout": 1e-10})
def switched_runs_keep_their_curve(seed: int) -> dict[str, float]:
    """20 steps over two to four drawn meshes, with and without experts, micro-batches and ZeRO stages, against one
    mesh: losses and gradient norms of all steps, parameters, held-out loss.
    """
    rng = random.Random(seed)
    experts = seed % 3 == 0
    meshes = rng.sample([mesh for mesh in MESHES if not (experts and "stage" in mesh)], rng.randint(2, 4))
    steps = sorted(rng.sample(range(1, STEPS), len(meshes) - 1))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        made = run_config(here, steps=STEPS, every=STEPS, mesh="data=1")
        block = made.model.pattern[0]
        model = dataclasses.replace(
            made.model,
            layers=4,
            pattern=(dataclasses.replace(block, mlp=MoeConfig(4, 2, 16)),) if experts else (block,),
            dtype="float64",
            param_dtype="float64",
        )
        kind = rng.choice(["adamw", "muon", "adafactor"])
        common: dict[str, Any] = {"model": model, "optim": OptimConfig(made.optim.schedule, kind=kind)}
        common |= {"accumulate": rng.choice([1, 2]) if not any("stage" in mesh for mesh in meshes) else 4}
        made = dataclasses.replace(made, **common, parallel=ParallelConfig(zero=rng.choice([2, 3])))
        made = dataclasses.replace(made, data=dataclasses.replace(made.data, batch_size=32))
        whole = train(dataclasses.replace(made, mesh=meshes[-1], out=str(here / "whole")))
        switches = [LayoutSwitch(step, mesh) for step, mesh in zip(steps, meshes[1:], strict=True)]
        done = switched_train(dataclasses.replace(made, mesh=meshes[0]), switches, lambda config: config)
        curves = [np.array(losses(one.directory))[:, 1:] for one in (done, whole)]
        ours, theirs = (Checkpointer(one.directory / "checkpoints", read_only=True) for one in (done, whole))
        pairs = zip(*(jax.tree.leaves(one.restore_params()[0]) for one in (ours, theirs)), strict=True)
        assert done.evaluation is not None
        assert whole.evaluation is not None
        return {
            "curve": float(np.abs(curves[0] / curves[1] - 1).max()),
            "parameters": max(float(np.abs(one - other).max()) for one, other in pairs),
            "heldout": abs(done.evaluation.nll / whole.evaluation.nll - 1),
        }
