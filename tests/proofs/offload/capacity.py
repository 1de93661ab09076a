"""Capacity by tier: published fits and misfits of ZeRO-Infinity, and bytes of the files and arrays of drawn runs."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path

import jax
import pytest

from benchmarks.memory.published_capacity import CLAIMS, FIGURE_2A, LENGTH
from jaxllm.models import MoeConfig
from jaxllm.optim import OptimConfig
from jaxllm.plan.capacity_table import _layer_bytes, run_bytes
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import predict_work
from jaxllm.plan.formulas.tier_bytes import transformer_bytes
from jaxllm.plan.hardware import Cluster
from jaxllm.train.compile_step import _on_disk
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.step_bytes import shard_bytes
from jaxllm.train.run import run_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import build_optimizer, run_state
from sharding import MeshSpec
from tests.proofs.harness import proof
from tests.train.runs import run_config


@proof("offload", cases=list(range(len(CLAIMS))), sample=len(CLAIMS))
def published_capacities(number: int) -> None:
    """Whether a tier holds a published size, by formula and as published; each claim about each of its tiers."""
    claim = CLAIMS[number]
    assert claim.found() == claim.fits, claim.source
    parameters = 12 * claim.layers * claim.width**2
    assert parameters == pytest.approx(claim.billions * 1e9, rel=0.05), "layers and width of another size"


@proof("offload", cases=list(range(len(FIGURE_2A))), sample=len(FIGURE_2A))
def published_bytes(number: int) -> None:
    """Bytes of model states, checkpoints and working memory as printed in the paper's figure, to its last digit."""
    row = FIGURE_2A[number]
    of_node = transformer_bytes(row.layers, row.width, row.heads, 32, LENGTH)
    states = of_node.parameters + of_node.gradients + of_node.optimizer
    assert round(states / 2**40, 2) == pytest.approx(row.states, abs=0.006)
    assert of_node.activations / 2**40 == pytest.approx(row.checkpoints, abs=0.006)
    idle, busy = (transformer_bytes(row.layers, row.width, row.heads, rows, LENGTH).working for rows in (0, 4))
    assert (busy - idle) / 2**30 == pytest.approx(row.activation_working, abs=0.006)
    if row.model_working:
        assert idle / 2**30 == pytest.approx(row.model_working, abs=0.006)


@proof("offload", count=60, sample=2, bound={"layers": 1e-6, "files": 1e-6})
def capacity_is_of_the_files(seed: int) -> dict[str, float]:
    """Drawn models, meshes, optimizers and windows: predicted bytes of a layer's parameters and state, of what is
    outside of layers, and of files, less those of the run's abstract arrays and of the layouts of its files."""
    rng = random.Random(seed)
    mesh = rng.choice(["fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=4", "fsdp=2,tensor=2,data=2"])
    with tempfile.TemporaryDirectory() as folder:
        made = run_config(Path(folder), batch_size=8, steps=2, every=2, mesh=mesh)
        block = made.model.pattern[0]
        if rng.random() < 0.3:
            block = dataclasses.replace(block, mlp=MoeConfig(4, 2, 16))
        model = dataclasses.replace(
            made.model, layers=rng.randint(1, 6), pattern=(block,), embed_dim=16 * rng.randint(1, 4), remat="full"
        )
        optim = OptimConfig(made.optim.schedule, kind=rng.choice(["adamw", "lion", "sgd"]), clip_norm=None)
        disk = DiskConfig("none", window=rng.randint(2, 8), parameters=rng.random() < 0.6)
        run = dataclasses.replace(made, model=model, optim=optim, disk=disk)
        cluster = Cluster.parse("h100:1x8")
        spec = MeshSpec.parse(mesh)
        work = DeviceWork.of(dataclasses.replace(run, disk=DiskConfig()), spec)
        layers, ends, count = _layer_bytes(work, predict_work(work, cluster.topology))
        found = run_bytes(run, spec, cluster)

        functional = run_model(run)
        abstract = run_state(
            run, functional, build_optimizer(run, functional), run_mesh(run, functional, jax.devices())
        )
    _, files, params = _on_disk(run, abstract)
    segments = {unit.segment for unit in params.units}
    assert len(params.units) == count
    errors = []
    for names, layer in zip(sorted(segments), layers, strict=True):
        errors += [_apart(layer.parameters, shard_bytes(params.abstract_rows(names)))]
        errors += [_apart(layer.state, shard_bytes(files.abstract_rows(names)))]
    whole = shard_bytes(params.kept_of(abstract.params))
    errors += [_apart(ends.parameters, whole), _apart(ends.state, shard_bytes(files.abstract_rows("")))]

    # A process has the files of eight devices. Shards that several have are in a file once, and counted for each.
    state = sum(sum(files.layout(n).sizes) for n in range(len(files.units)))
    stored = sum(sum(params.layout(n).sizes) for n in range(len(params.units))) if disk.parameters else 0
    true = 2 * (state + stored) / 8
    assert found.disk >= true * (1 - 1e-6)
    return {"layers": max(errors), "files": _apart(found.disk, true) if mesh == "fsdp=8" else 0.0}


def _apart(found: float, true: float) -> float:
    return abs(found - true) / max(true, 1)
