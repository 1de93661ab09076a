"""An optimizer with a step of its own is one file and one row: trained, compiled, saved and refused as any other."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.config import ConfigError, to_dict
from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.optim import OPTIMIZERS, OptimConfig, ScheduleConfig
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import predict
from jaxllm.plan.formulas.optimizer_memory import state_bytes
from jaxllm.train import RunConfig, init_state, loss_sums, train
from jaxllm.train.combinations import check_combinations
from jaxllm.train.compile_step import compile_here
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.step.step_builder import build_optimizer, build_step, run_state
from sharding import MeshSpec, shardings_of
from sharding.topology import Topology
from tests import quick, tiny
from tests.seams.sam import RADIUS, SAM
from tests.seams.seam_files import files_that_name
from tests.train.runs import losses, run_config, stopped_at

STEPS, ROWS, LENGTH, RATE, DECAY, MOMENTUM = 3, 8, 8, 0.5, 0.1, 0.8


@contextlib.contextmanager
def with_row() -> Iterator[None]:
    """The row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZERS, "sam", SAM)
        yield


@pytest.fixture(autouse=True)
def row():
    with with_row():
        yield


def sam_run(mesh: str = "fsdp=4,tensor=2", dtype: str = "float64", **fields: Any) -> RunConfig:
    optim = OptimConfig(
        ScheduleConfig("constant", peak=RATE, warmup=0.0),
        kind="sam", b1=MOMENTUM, weight_decay=DECAY, clip_norm=None,
    )  # fmt: skip
    return RunConfig(
        model=tiny.decoder(dtype=dtype, kv_heads=4, remat="full"),
        optim=optim,
        steps=STEPS,
        mesh=mesh,
        data=DataConfig(batch_size=ROWS, seq_len=LENGTH),
        **fields,
    )


def batches(run: RunConfig) -> list[Any]:
    return [tiny.batch(number, ROWS, LENGTH, run.model.vocab_size, packed=True) for number in range(STEPS)]


def reference(run: RunConfig) -> tuple[list[float], Any]:
    """Losses and parameters by hand, on one device: only the loss of the model is the package's."""
    model = functional(run.model)

    def mean_loss(params: Any, batch: Any) -> Any:
        sums = loss_sums(model, params, batch)
        return sums.loss / sums.count

    grad = quick.jit(jax.value_and_grad(mean_loss))
    params = quick.params(run.model)
    momentum = jax.tree.map(np.zeros_like, params)
    found = []
    for batch in batches(run):
        _, first = grad(params, batch)
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(first)))
        worst = jax.tree.map(lambda p, g: p + RADIUS * np.asarray(g) / norm, params, first)  # noqa: B023
        loss, grads = grad(worst, batch)
        found.append(float(loss))
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + np.asarray(g), momentum, grads)

        def moved(path: Any, p: Any, m: Any) -> Any:
            gain = jax.tree_util.keystr(path).endswith("gain']")
            return p - RATE * (m + (0 if gain else DECAY * p))

        params = jax.tree.map_with_path(moved, params, momentum)
    return found, params


def trained_error(mesh: str) -> float:
    """Error of losses and parameters on eight devices against the reference."""
    run = sam_run(mesh, accumulate=2 if "stage" in mesh else 1)
    model = functional(run.model, run.parallel.rules())
    here = fitting_mesh(run, model, 8).build()
    transform = build_optimizer(run, model)
    abstract = run_state(run, model, transform, here)
    step = build_step(run, model, build_value_and_grad(run, model, here), transform)
    jitted = quick.jit(step, out_shardings=(shardings_of(abstract), None))
    got = []
    with jax.set_mesh(here):
        start = jax.device_put(quick.params(run.model), shardings_of(abstract.params))
        state = init_state(model, transform, here, 0, abstract, start)
        there = jax.NamedSharding(here, model.rules.spec(("batch", "seq"), here))
        for batch in batches(run):
            state, metrics = jitted(state, jax.device_put(batch, there))
            got.append(float(metrics["loss"]))
    want, params = reference(run)
    assert np.ptp(want) > 1e-2
    return max(np.abs(np.array(got) / want - 1).max(), tiny.leaf_error(jax.device_get(state.params), params))


@pytest.mark.drawn(0.3)
def test_it_trains_on_eight_devices_as_the_reference_by_hand(float64):
    """A pipeline with gradient accumulation; another mesh: `make proof seams ONLY=sharpness_aware_steps`."""
    assert trained_error("stage=2,fsdp=2,data=2") < 1e-10


@pytest.mark.drawn(0.3)
def test_its_step_is_compiled_and_reported():
    """Beside SGD's: the same state in memory, and its weights are gathered for a second evaluation."""
    found = {}
    for kind in ("sam", "sgd"):
        run = sam_run(dtype="float32")
        run = dataclasses.replace(run, optim=OptimConfig(run.optim.schedule, kind=kind, clip_norm=None))
        found[kind] = compile_here(Topology.parse("cpu:8"), to_dict(run))
    gathered = {
        kind: sum(one["count"] for one in report["collectives"] if one["kind"] == "all-gather")
        for kind, report in found.items()
    }
    assert gathered["sam"] == 2 * gathered["sgd"] > 0
    assert found["sam"]["argument_bytes"] == found["sgd"]["argument_bytes"]


def test_the_planner_counts_its_state_and_says_that_it_cannot_time_it():
    run, mesh = sam_run(dtype="float32"), MeshSpec.parse("fsdp=4,tensor=2")
    model = functional(run.model)
    abstract = run_state(run, model, build_optimizer(run, model), mesh.abstract())
    shards = [
        (leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(abstract.opt_state)
    ]
    bytes_of_params = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract.params)
    )
    want = sum(int(np.prod(shape)) * width for shape, width in shards)
    assert state_bytes(DeviceWork.of(run, mesh), bytes_of_params) == want
    with pytest.raises(ConfigError, match="2 forward and backward passes a step"):
        predict(run, mesh, Topology.parse("v6e:2x4"))


@pytest.mark.drawn(0.3)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path):
    fields = {"kind": "sam", "name": "whole", "b2": 0.95, "eps": 1e-8, "clip_norm": 1.0}
    whole = train(run_config(tmp_path, **fields)).directory
    stopped_at(tmp_path, 6, **{**fields, "name": "parts"})
    resumed = train(run_config(tmp_path, **{**fields, "name": "parts"})).directory
    assert losses(resumed) == losses(whole)
    assert losses(whole)[-1][1] < losses(whole)[0][1] - 0.05, "it learns"


def test_what_it_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match='"sam" does not use eps; it uses b1'):
        OptimConfig(kind="sam", eps=1e-6)
    run = sam_run(dtype="float32")
    half = tiny.decoder(dtype="float16", kv_heads=4, remat="full")
    with pytest.raises(ConfigError, match=r'"sam" .* the optimizer does not support loss scaling'):
        check_combinations(dataclasses.replace(run, model=half), {"fsdp": 8})


def test_without_its_row_it_is_no_optimizer(monkeypatch):
    monkeypatch.delitem(OPTIMIZERS, "sam")
    with pytest.raises(ConfigError, match=r"kind = 'sam'; legal: adamw, lion, .*, sgd\."):
        OptimConfig(kind="sam")


def test_it_is_one_file():
    """No other code of the repository names it but this test."""
    assert files_that_name("(sam|SAM)") - {"tests/seams/test_optimizer.py"} == {"tests/seams/sam.py"}
