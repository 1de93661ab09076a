"""Runs with adapters that are trained in one step: as each alone, with every method and on meshes."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.peft import AdapterConfig
from jaxllm.train import Run, RunConfig, train, train_together
from jaxllm.train.records.run_directory import RunDirectory
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.run_model import saved_params
from jaxllm.train.together.shared_base import LoadedOnce, start_together
from jaxllm.train.together.together_step import joint_step
from tests import environment, tiny
from tests.proofs.harness import proof
from tests.train import runs

BLOCK = BlockConfig(AttentionConfig(heads=4, kv_heads=2, head_dim=16), MlpConfig(hidden=64))
MODEL = DecoderConfig(vocab_size=280, embed_dim=64, layers=1, pattern=(BLOCK,), dtype="float64", param_dtype="float64")
WEIGHTS = {"rank": 3, "alpha": 5.0, "targets": ("*",)}
METHODS: dict[str, AdapterConfig] = {
    **{kind: AdapterConfig(kind, **WEIGHTS) for kind in ("lora", "rslora", "dora", "qlora", "lora_ga", "longlora")},
    "prefix": AdapterConfig("prefix", tokens=4),
    "prompt": AdapterConfig("prompt", tokens=4),
    "mixlora": AdapterConfig("mixlora", experts=4, **WEIGHTS),
    "pesc": AdapterConfig("pesc", experts=4, width=6, **WEIGHTS),
}
MESHES = ("data=2,fsdp=4", "data=4,tensor=2", "data=4,stage=2", "data=4,context=2")
MEASURES = ("loss", "grad_norm", "learning_rate")
CASES = [
    *((kind, "data=8") for kind in METHODS),
    *(("lora", mesh) for mesh in MESHES),
    *(("mixlora", mesh) for mesh in MESHES[:2]),
]


@functools.cache
def base_run() -> Path:
    """Directory of a folder with the run that all start from, and a second text."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train(run_config(folder, "data=8", steps=2))
    runs.write_text(folder / "other", documents=50)
    return folder


def run_config(folder: Path, mesh: str, **fields: Any) -> RunConfig:
    """A run in float64 on the text of ``folder``."""
    return runs.run_config(
        folder,
        model=MODEL,
        mesh=mesh,
        batch_size=16,
        seq_len=32,
        heldout_fraction=0.0,
        accumulate=2,
        every=2,
        log_every=100,
        **fields,
    )


def runs_of(out: Path, kind: str, mesh: str) -> list[RunConfig]:
    """Two runs of one base, which differ in seed, data, learning rate and optimizer."""
    folder = base_run()
    adapted = {"init_from": str(folder / "runs/tiny"), "adapter": METHODS[kind], "steps": 4, "out": str(out)}
    config = run_config(folder, mesh, **adapted)
    other = dataclasses.replace(config.data, source=str(folder / "other/text.txt"), seed=4)
    # Not Lion, which makes whole steps of the rounding of gradients that are zero, as those of mixlora's router are at
    # the start, whatever program they come from.
    adan = OptimConfig(ScheduleConfig("constant", 1e-3), kind="adan", clip_norm=0.5)
    return [
        dataclasses.replace(config, name="one"),
        dataclasses.replace(config, name="two", seed=9, data=other, optim=adan),
    ]


def moved(x: jax.Array) -> jax.Array:
    """A parameter of an adapter after some training: factors that are zero at the start have gradients of zero."""
    return x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype, out_sharding=x.sharding)


def gradient_error(configs: list[RunConfig]) -> float:
    """Largest error of loss and gradients of the runs together, less those of each alone, after some training."""
    initial = LoadedOnce(configs[0])
    prepared = [Run(config, init_model=initial.model) for config in configs]
    one, error = prepared[0], 0.0
    grads, saved = build_value_and_grad(one.config, one.model, one.mesh), saved_params(one.config, one.model)
    together = joint_step(grads, [lambda state, batch, gradients: (state, gradients)] * 2, saved)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(one.mesh))
        savers = [stack.enter_context(run.saver()) for run in prepared]
        base, states, _ = start_together(prepared, savers, initial)
        states = tuple(dataclasses.replace(state, params=jax.tree.map(moved, state.params)) for state in states)
        batches = tuple(run.put_batch(run.data.train.batch_at(1)) for run in prepared)
        found, alone = jax.jit(together)(base, states, batches)[1], jax.jit(grads)
        for run, state, batch, (sums, got) in zip(prepared, states, batches, found, strict=True):
            assert run.base is not None
            own, wanted = alone(run.base.with_base(state, base).params, batch)
            assert any(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(jax.device_get(wanted)))
            error = max(error, abs(float(sums.loss / own.loss) - 1), tiny.leaf_error(*jax.device_get((got, wanted))))
    return error


def results(directory: Path) -> tuple[np.ndarray, Any]:
    """Loss, gradient norm and learning rate of every step of a run, and its last state without the base."""
    rows = [row for row in RunDirectory(directory).read_metrics() if "nll" in row]
    with Checkpointer(directory / "checkpoints", read_only=True) as checkpointer:
        return np.array([[row[name] for name in MEASURES] for row in rows]), checkpointer.map_leaves()


@proof(
    "adapters",
    cases=CASES,
    sample=1,
    bound={"gradients": 1e-10, "curves": 1e-10, "states": 1e-10},
    float64=True,
)
def runs_together_are_each_alone(case: tuple[str, str]) -> dict[str, float]:
    """Gradients, loss curves, and adapters with their optimizer states after four steps, of two runs in one step.

    The runs differ in seed, data, learning rate and optimizer.
    """
    kind, mesh = case
    with tempfile.TemporaryDirectory() as name, runs.shared_programs(), environment.optimized(enabled=False):
        folder = Path(name)
        gradients = gradient_error(runs_of(folder / "gradients", kind, mesh))
        configs = runs_of(folder / "runs", kind, mesh)
        assert all(result.complete for result in train_together(configs))
        curves = states = 0.0
        for config in configs:
            alone = train(dataclasses.replace(config, out=str(folder / "alone"))).directory
            (rows, leaves), (wanted, others) = (results(path) for path in (folder / "runs" / config.name, alone))
            curves = max(curves, float(np.abs(rows / wanted - 1).max()))
            assert len(rows) == 4
            assert leaves.keys() == others.keys()
            numbers = [path for path, leaf in others.items() if np.issubdtype(leaf.dtype, np.number)]
            states = max(states, *(tiny.leaf_error(leaves[path], others[path]) for path in numbers))
    return {"gradients": gradients, "curves": curves, "states": states}


@proof(
    "adapters",
    cases=[("lora", "data=8"), ("mixlora", "data=2,fsdp=4"), ("dora", "data=4,tensor=2")],
    sample=1,
    float64=True,
)
def runs_together_resume_bitwise(case: tuple[str, str]) -> None:
    """Two runs in one step, stopped by a signal and started again: every loss and every value of their states."""
    kind, mesh = case
    with tempfile.TemporaryDirectory() as name, runs.shared_programs(), environment.optimized(enabled=False):
        folder = Path(name)
        whole, parts = (runs_of(folder / out, kind, mesh) for out in ("whole", "parts"))
        train_together(whole)
        with pytest.MonkeyPatch.context() as patch:
            runs.signal_at(patch, 1)
            assert [result.steps for result in train_together(parts)] == [2] * 2
        assert all(result.complete for result in train_together(parts))
        for config in whole:
            (rows, leaves), (wanted, others) = (results(folder / out / config.name) for out in ("parts", "whole"))
            np.testing.assert_array_equal(rows, wanted)
            assert leaves.keys() == others.keys()
            for path, leaf in others.items():
                np.testing.assert_array_equal(leaves[path], leaf, err_msg=path)
