"""Resharding: saved on one mesh, restored on another, every leaf is the same, and the run continues unchanged.

Layers may lie in the stages of a pipeline, and be stored alone or stacked.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.checkpoint import CheckpointConfig, Checkpointer
from jaxllm.checkpoint.relayout import RelayoutOptions, leaf_sources, relayout_leaves
from jaxllm.checkpoint.storage import leaf_hashing
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig, TrainState, abstract_state, train_step
from jaxllm.train.run import build_value_and_grad
from sharding import MeshSpec, shardings_of
from tests import environment, quick, tiny
from tests.proofs.harness import proof

AXES = ("data", "fsdp", "context", "expert", "ulysses", "tensor")
MESHES = [
    ",".join(f"{axis}={n}" for axis, n in zip(AXES, sizes, strict=True) if n > 1) or "data=1"
    for sizes in itertools.product([1, 2, 4, 8], repeat=len(AXES))
    if math.prod(sizes) in (1, 2, 4, 8)
]
"""All meshes of one, two, four and eight devices."""
PIPELINES = (
    "stage=2",
    *(f"stage=2,{axis}=2" for axis in ("data", "fsdp", "ulysses", "tensor")),
    "stage=2,fsdp=2,tensor=2",
)
"""Of which each kind of model is trained on three."""
SCHEDULES = ("gpipe", "1f1b", "zb_h1")
BEFORE, AFTER = 2, 10
OPTIM = OptimConfig(schedule=ScheduleConfig(peak=1e-2, warmup=0.1))
MODELS = {
    "dense": {"heads": 8, "kv_heads": 8, "head_dim": 4, "mlp": 8, "vocab_size": 16, "tied": False},
    "mixture": {"heads": 8, "kv_heads": 8, "head_dim": 4, "vocab_size": 16, "moe": (8, 2, 8, False)},
}


class Run:
    """Training of one model on one mesh, compiled."""

    def __init__(self, mesh: str, kind: str):
        # The plan is the mesh's own, so that few programs are compiled for many pairs.
        rng = random.Random(f"{mesh} {kind}")
        self.config = tiny.decoder(**MODELS[kind])
        plan = ParallelConfig(zero=rng.choice([1, 2, 3]), sequence=rng.random() < 0.5, schedule=rng.choice(SCHEDULES))
        self.model = functional(self.config, plan.rules())
        spec = MeshSpec.parse(mesh)
        self.mesh = spec.build(jax.devices()[: math.prod(n for _, n in spec.axes)])
        self.transform = optimizer(OPTIM, BEFORE + AFTER, self.model.logical_axes())
        self.abstract = abstract_state(self.model, self.transform, self.mesh)
        run = RunConfig(model=self.config, mesh=mesh, parallel=plan, accumulate=2 if "stage" in mesh else 1)
        grads = build_value_and_grad(run, self.model, self.mesh)
        step = train_step(grads, self.transform, schedule(OPTIM.schedule, BEFORE + AFTER))
        self.step = quick.jit(step, out_shardings=(shardings_of(self.abstract), None))

    def begin(self) -> TrainState:
        with jax.set_mesh(self.mesh):
            params = jax.device_put(quick.params(self.config), shardings_of(self.abstract.params))
            init = quick.jit(self.transform.init, out_shardings=shardings_of(self.abstract.opt_state))
            everywhere = self.abstract.step.sharding
            return TrainState(
                params,
                init(params),
                jax.device_put(jnp.zeros((), jnp.int32), everywhere),
                jax.device_put(jax.random.key(0), everywhere),
            )

    def steps(self, state: TrainState, first: int, count: int) -> tuple[TrainState, list[float]]:
        losses = []
        with jax.set_mesh(self.mesh):
            spec = self.model.rules.spec(("batch", "seq"), self.mesh)
            for number in range(first, first + count):
                batch = tiny.batch(number, 8, 16, 16, packed=True)
                state, metrics = self.step(state, jax.device_put(batch, jax.NamedSharding(self.mesh, spec)))
                losses.append(float(metrics["loss"]))
        return state, losses


@functools.cache
def pool(kind: str) -> list[str]:
    """Twenty meshes that this seed's pairs are of, every axis among them, three with stages: few programs."""
    rng = random.Random(environment.derive(environment.seed(), "reshard", kind))
    meshes = [mesh for mesh in MESHES if kind == "mixture" or "expert" not in mesh]
    found: list[str] = []
    for axis in AXES if kind == "mixture" else [axis for axis in AXES if axis != "expert"]:
        found.append(rng.choice([mesh for mesh in meshes if axis in mesh and mesh not in found]))
    found += rng.sample(PIPELINES, 3)
    return found + rng.sample([mesh for mesh in meshes if mesh not in found], 20 - len(found))


@functools.lru_cache(maxsize=40)
def run_of(mesh: str, kind: str) -> Run:
    return Run(mesh, kind)


def saved(folder: Path, state: Any) -> Checkpointer:
    with Checkpointer(folder, CheckpointConfig(saving="lazy")) as checkpointer:
        checkpointer.save(BEFORE, state, {})
    return Checkpointer(folder, read_only=True)


def through_single_layers(source: Checkpointer, folder: Path) -> Checkpointer:
    """The same with unstacked layers, and stacked again."""
    for number, layers in enumerate(("single", "stacked")):
        with Checkpointer(folder / str(number)) as out:
            sources = leaf_sources(source.manifest().leaves, RelayoutOptions(layers=layers))  # type: ignore[arg-type]
            out.save_streamed(BEFORE, relayout_leaves(source.open_leaves(), sources, None), {})
        source = Checkpointer(folder / str(number), read_only=True)
    return source


@proof("checkpoint", count=100, sample=1, float64=True, bound={"ten losses": 1e-8})
def reshard_matrix(seed: int) -> dict[str, float]:
    """Any two meshes; parameters, optimizer state, step and RNG key; half of the time through unstacked layers."""
    rng = random.Random(seed)
    kind = rng.choice(sorted(MODELS))
    one, other = rng.sample(pool(kind), 2)
    first, second = run_of(one, kind), run_of(other, kind)
    block, leaf_hashing.BLOCK_BYTES = leaf_hashing.BLOCK_BYTES, rng.choice([96, 1000, 2**26])
    try:
        with tempfile.TemporaryDirectory() as folder:
            state, _ = first.steps(first.begin(), 0, BEFORE)
            source = saved(Path(folder) / "first", state)
            hashes = {path: leaf.hash for path, leaf in source.manifest().leaves.items()}
            assert len(hashes) > 20
            if rng.random() < 0.5:
                source = through_single_layers(source, Path(folder))
            found, _ = source.restore(second.abstract)
            again = saved(Path(folder) / "second", found).manifest()
            assert {path: leaf.hash for path, leaf in again.leaves.items()} == hashes, (one, other)
    finally:
        leaf_hashing.BLOCK_BYTES = block
    _, want = first.steps(state, BEFORE, AFTER)
    _, got = second.steps(found, BEFORE, AFTER)
    return {"ten losses": max(abs(a / b - 1) for a, b in zip(got, want, strict=True))}
