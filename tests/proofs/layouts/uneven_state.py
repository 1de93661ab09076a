"""Uneven optimizer state: devices that hold unequal shares train what one device does, and save what even shards do."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoint import Checkpointer
from jaxllm.data import DataConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig, train
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_step import DiskStep, compiled_programs, lowered_programs
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import build_disk_step, build_optimizer, build_step, init_run_state, run_state
from jaxllm.train.unequal.unequal_rows import unequal_rows
from jaxllm.train.unequal.uneven_slices import uneven_index
from jaxllm.train.unequal.uneven_state import UnevenState, uneven_state
from sharding import MeshSpec
from tests import environment, quick, tiny
from tests.proofs.harness import proof
from tests.proofs.layouts.uneven_rows import KINDS, MESHES
from tests.train import runs

STEPS, SEQ_LEN = 20, 16
CELLS = [
    (mesh, KINDS[(place + turn) % len(KINDS)])
    for place, mesh in enumerate(MESHES)
    for turn in range(2)
    if KINDS[(place + turn) % len(KINDS)] != "dense" or "expert" not in mesh
]
"""Every mesh of eight devices with the axis data or fsdp, each with up to two architectures."""


def example_of(mesh: str, kind: str) -> RunConfig:
    """Run of a case, from the seed: shares, optimizer, clipping, uneven rows or not, accumulation, architecture."""
    rng = np.random.default_rng(environment.derive(environment.seed(), mesh, kind, "uneven state"))

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    sizes = dict(MeshSpec.parse(mesh).axes)
    fsdp, zero = sizes.get("fsdp", 1), one(1, 2, 3) if "data" in mesh else 1
    over_fsdp = fsdp > 1 and zero == 1 and one(True, "data" not in mesh)
    devices = sizes.get("data", 1) * (fsdp if over_fsdp else 1)
    shares = tuple(int(n) for n in rng.integers(1, 7, devices))
    accumulate, counts = one(1, 2), ()
    if accumulate == 2 and one(True, False):
        counts = (3, *(2,) * (devices - 2), 1)
    each = (1 if over_fsdp else fsdp) * sizes.get("expert", 1)
    moe = None if kind == "dense" else (8, 2, 8, False, 8 if kind == "shared expert" else 0)
    return RunConfig(
        model=tiny.decoder(
            dtype="float64",
            heads=8,
            kv_heads=8 if kind == "latent attention" else one(2, 8),
            head_dim=4,
            embed_dim=16,
            mlp=8,
            vocab_size=16,
            layers=2,
            moe=moe,
            latent=8 if kind == "latent attention" else 0,
        ),
        parallel=ParallelConfig(
            zero=zero, context="all_gather", micro_batches=counts, state_shares=shares, sequence=one(False, True)
        ),
        optim=OptimConfig(
            ScheduleConfig(peak=1e-2, warmup=0.1), one("adamw", "adamw", "sgd"), clip_norm=one(None, 0.05, 1.0)
        ),
        data=DataConfig(batch_size=each * accumulate * devices, seq_len=SEQ_LEN),
        mesh=mesh,
        accumulate=accumulate,
        steps=STEPS,
        z_loss=1e-2,
        seed=int(rng.integers(2**16)),
    )


@dataclasses.dataclass
class Trained:
    """Outcome of some steps.

    Attributes:
        metrics: loss, and norms of gradients, parameters and updates of each step. [steps, 4]
        params: the last parameters.
        opt_state: arrays of the last optimizer state, whole.
        held: the parts; None on one device.
        abstract: the train state with even shards.
    """

    metrics: np.ndarray
    params: Any
    opt_state: list[np.ndarray]
    held: UnevenState | None
    abstract: Any


def trained(run: RunConfig, steps: int, *, alone: bool = False) -> Trained:
    """Trains a run for some steps on its mesh, or on one device with all rows at once."""
    if alone:
        run = dataclasses.replace(run, mesh="dp", parallel=ParallelConfig(), accumulate=1)
    devices, model = jax.devices()[:1] if alone else jax.devices(), run_model(run)
    mesh = fitting_mesh(run, model, len(devices), "cpu").build(devices)
    transform = build_optimizer(run, model)
    abstract = even = run_state(run, model, transform, mesh)
    held = uneven_state(run, mesh, abstract.opt_state)
    assert (held is None) == alone
    if held is not None:
        abstract = dataclasses.replace(abstract, opt_state=held.leaves())
    grads, rows = build_value_and_grad(run, model, mesh), unequal_rows(run, mesh)
    there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
    metrics, step = [], None
    with jax.set_mesh(mesh):
        state = init_run_state(run, model, transform, mesh, abstract, uneven=held)
        for number in range(steps):
            batch = tiny.batch(run.seed + number, run.data.batch_size, SEQ_LEN, run.model.vocab_size, packed=True)
            batch = jax.device_put(batch if rows is None else rows.arrange(batch), there)
            if step is None and held is None:
                step = quick.jit(build_step(run, model, grads, transform))
            elif step is None:
                assert held is not None
                lowered = lowered_programs(build_disk_step(run, model, grads, abstract, held), abstract, batch, held)
                step = DiskStep(compiled_programs(lowered, quick.OPTIONS), held)
            state, found = step(state, batch)  # type: ignore[misc]
            metrics.append([float(found[name]) for name in ("loss", "grad_norm", "param_norm", "update_norm")])
    leaves = jax.tree.leaves(state.opt_state)
    whole = [held.assembled(n) if held and n not in held.kept else np.asarray(x) for n, x in enumerate(leaves)]
    return Trained(np.array(metrics), jax.device_get(state.params), whole, held, even)


@proof(
    "layouts",
    cases=CELLS,
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "gradients": 1e-10, "curve of 20 steps": 1e-10, "parameters": 1e-10, "state": 1e-10},
)
def uneven_state_float64(cell: tuple[str, str]) -> dict[str, float]:
    """Loss, norms of gradients, parameters and updates, parameters and gathered state after 20 steps, drawn shares."""
    run = example_of(*cell)
    want, got = trained(run, STEPS, alone=True), trained(run, STEPS)
    relative = np.abs(got.metrics - want.metrics) / np.maximum(np.abs(want.metrics), 1e-3)
    return {
        "loss": float(relative[0, 0]),
        "gradients": float(relative[0, 1]),
        "curve of 20 steps": float(relative.max()),
        "parameters": tiny.leaf_error(got.params, want.params),
        "state": tiny.leaf_error(got.opt_state, want.opt_state),
    }


SHARES = [
    (mesh, over)
    for mesh in MESHES
    for over in ("data", "data x fsdp")
    if ("data" in mesh if over == "data" else "fsdp" in mesh)
]
"""Mesh, and the axes whose devices have shares of their own."""


@proof("layouts", cases=SHARES, sample=1)
def uneven_state_bytes(case: tuple[str, str]) -> None:
    """Bytes of the live arrays of the state on each device after a step are its share, to one row of each array, and on
    the device with the smallest share fewer than with even shards.
    """
    mesh, over = case
    rng = np.random.default_rng(environment.derive(environment.seed(), *case))
    sizes = dict(MeshSpec.parse(mesh).axes)
    axes = [axis for axis in ("data", "fsdp") if axis in sizes and axis in over]
    devices = math.prod(sizes[axis] for axis in axes)
    shares = tuple(int(n) for n in (9, *rng.integers(1, 9, devices - 2), 1))
    base = example_of(mesh, "mixture" if "expert" in sizes else "dense")
    plan = dataclasses.replace(
        base.parallel, zero=1 if "fsdp" in axes else 3, state_shares=shares, micro_batches=(), sequence=False
    )
    rows = math.prod(sizes.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    model = tiny.decoder(
        dtype="float32", heads=8, kv_heads=8, head_dim=8, embed_dim=64, mlp=64, vocab_size=64, layers=2,
        moe=(8, 2, 64, False) if "expert" in sizes else None,
    )  # fmt: skip
    data = DataConfig(batch_size=rows, seq_len=SEQ_LEN)
    run = dataclasses.replace(base, parallel=plan, model=model, data=data, accumulate=1)
    found = trained(run, 1)
    held = found.held
    assert held is not None
    arrays = [x for x in jax.tree.leaves(found.abstract.opt_state) if x.ndim]
    for device in held.mesh.devices.flat:
        share, live = shares[uneven_index(held.mesh, held.over, device)], held.held(device)
        assert all(x.devices() == {device} for x in live)
        size = sum(x.nbytes for x in live)
        assert size == held.bytes_on(device)
        want = row = even = 0.0
        for x in arrays:
            cut = held.cut(x, x.shape[0] == model.layers)
            whole = math.prod(jax.NamedSharding(held.mesh, cut.whole).shard_shape(x.shape)) * x.dtype.itemsize
            want += whole * share / sum(shares)
            row += whole / max(cut.bounds[-1], 1)
            even += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        assert abs(size - want) <= row
        if share == 1:
            assert size < even


RESUMES = [
    (first, second)
    for first in ("data=4,tensor=2 3 3 1 1", "data=2,fsdp=4 1 5", "data=2,fsdp=2,tensor=2 zero1 5 2 1 1")
    for second in (
        "data=4,tensor=2 1 2 1 4",
        "data=4,tensor=2",
        "data=4,tensor=2 disk",
        "data=2,fsdp=4 3 1",
        "fsdp=8 zero1 1 2 3 4 4 3 2 1",
    )
]
"""Mesh and shares until a stop, and those from then on: others, none, or the state on disk."""


def _settings(text: str, folder: Path) -> dict[str, Any]:
    mesh, *rest = text.split()
    shares = tuple(int(part) for part in rest if part.isdecimal())
    plan = ParallelConfig(state_shares=shares, zero=1 if "zero1" in rest else 3)
    more = {"disk": DiskConfig(str(folder / "files"))} if "disk" in rest else {}
    return {"mesh": mesh, "parallel": plan, **more}


def _saved(folder: Path, name: str, step: int) -> dict[str, Any]:
    with Checkpointer(folder / "runs" / name / "checkpoints", read_only=True) as checkpointer:
        checkpointer.verify(step)
        return dict(checkpointer.manifest(step).leaves)


@proof("layouts", cases=RESUMES, sample=1)
def uneven_state_resumes(case: tuple[str, str]) -> None:
    """A run with shares stops with the very bytes that the same run with even shards saves; with other shares, even
    ones or its state on disk, on any mesh, both go on to the same bytes.
    """
    first, second = case
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        given = {"batch_size": 8, "every": 3}
        before, after = _settings(first, folder), _settings(second, folder)
        even = dataclasses.replace(before["parallel"], state_shares=())
        with runs.shared_programs():
            for which, plan in (("uneven", before["parallel"]), ("even", even)):
                runs.stopped_at(folder, 5, name=which, **{**before, "parallel": plan}, **given)
            assert _saved(folder, "uneven", 5) == _saved(folder, "even", 5)
            for which in ("uneven", "even"):
                assert train(runs.run_config(folder, name=which, **after, **given)).complete
        assert _saved(folder, "uneven", runs.STEPS) == _saved(folder, "even", runs.STEPS)
