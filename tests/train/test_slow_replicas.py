"""Stages inside replicas, and slow replicas whose messages between stages are projected."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import functional
from jaxllm.train import train
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.run_sharding import sharding_table
from jaxllm.train.step.loss import value_and_grad
from jaxllm.train.step.pipelined_loss import pipeline_plan, pipelined_loss_sums
from sharding import shardings_of
from tests import quick, tiny
from tests.train import runs
from tests.train.outer_runs import batch_at, parallel_error, parts_of, run_of, trained
from tests.train.slow_replicas import AVERAGE, MODEL, SGD, compiled_text, definition_error, message_bytes


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "outer", [AVERAGE, dataclasses.replace(AVERAGE, slow=(1,), stage_rank=MODEL.embed_dim)], ids=["whole", "full rank"]
)
def test_an_outer_step_after_every_step_is_data_parallelism(float64, outer):
    assert parallel_error(outer, "stage=2", model=MODEL) <= 1e-10


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("rank", "schedule", "cut", "slow"),
    [(5, "1f1b", (2,), (1,)), (9, "gpipe", (2,), (0, 1)), (3, "interleaved", (1, 2, 3), (0,))],
)
def test_gradients_are_those_of_the_model_with_projections(float64, rank, schedule, cut, slow):
    assert definition_error(rank, schedule, cut, slow) <= 1e-10


@pytest.mark.drawn(2)
def test_slow_replicas_send_less(float64):
    outer = dataclasses.replace(AVERAGE, slow=(1,), stage_rank=5)
    found = message_bytes(*compiled_text(run_of("replica=2,stage=2", outer, SGD, 1, model=MODEL, accumulate=2)))
    whole = 2 * 8 * MODEL.embed_dim * 8  # rows, positions, width, bytes of a float64
    assert found == {0: {whole}, 1: {whole * 5 // MODEL.embed_dim}}


def test_an_evaluation_is_of_the_rows_of_all_replicas(float64):
    run = run_of("replica=2,stage=2,fsdp=2", AVERAGE, SGD, 1, model=MODEL)
    model, _, mesh, abstract, _ = parts_of(run)
    start, batch = quick.params(MODEL), batch_at(0)
    with jax.set_mesh(mesh):
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        params = jax.device_put(start, shardings_of(abstract.params))
        found = quick.jit(pipelined_loss_sums(model, *pipeline_plan(run, 2)))(params, jax.device_put(batch, there))
    want, _ = quick.jit(value_and_grad(functional(MODEL)))(start, batch)
    assert float(found.nll) == pytest.approx(float(want.nll), rel=1e-10)
    assert float(found.count) == float(want.count)


@pytest.mark.drawn(0.5)
def test_a_run_with_slow_replicas_resumes_bitwise(tmp_path):
    outer = OuterConfig("sparseloco", every=3, compress="topk:0.1,int8", slow=(1,), stage_rank=8)
    model = dataclasses.replace(runs.run_config(tmp_path, name="whole").model, layers=2)
    fields: dict[str, Any] = {"mesh": "replica=2,stage=2,fsdp=2", "outer": outer, "model": model}
    with runs.shared_programs():
        whole = train(runs.run_config(tmp_path, name="whole", **fields))
        directory = runs.stopped_at(tmp_path, 5, name="stopped", **fields)
        again = train(runs.run_config(tmp_path, name="stopped", **fields))
    assert runs.losses(directory) == runs.losses(whole.directory)
    assert again.evaluation == whole.evaluation is not None


def test_what_is_refused(float64):
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"slow": (1,)}, "give the slow replicas and a positive rank"),
        ({"stage_rank": 4}, "give the slow replicas and a positive rank"),
        ({"slow": (1, 1), "stage_rank": 4}, "numbers of replicas from 0 on, each once"),
    )
    for fields, why in refused:
        with pytest.raises(ValueError, match=why):
            OuterConfig("diloco", **fields)
    with pytest.raises(ValueError, match="slow is of an outer step"):
        OuterConfig(slow=(1,), stage_rank=4)
    for mesh, slow, rank, why in (
        ("replica=2,fsdp=2", (1,), 4, r"messages between stages.*give the mesh the axis stage"),
        ("replica=2,stage=2", (2,), 4, "the mesh has the replicas 0 to 1"),
        ("replica=2,stage=2", (1,), tiny.decoder().embed_dim + 1, "at most the model's width"),
    ):
        outer = dataclasses.replace(AVERAGE, slow=slow, stage_rank=rank)
        with pytest.raises(ConfigError, match=why):
            trained(run_of(mesh, outer, SGD, 1, model=MODEL))


def test_the_sharding_table_says_what_slow_replicas_send(float64):
    outer = OuterConfig("diloco", every=10, slow=(1,), stage_rank=MODEL.embed_dim // 4)
    remark = sharding_table(run_of("replica=2,stage=2", outer, model=MODEL), 4).remark
    assert remark.startswith("outer step of 2 replicas every 10 steps: a device sends")
    whole, slow = (
        float(re.search(what + r": \d+ x \S+ \S+ = (\S+) KiB", remark).group(1))  # type: ignore[union-attr]
        for what in ("messages sent by a device in a step", "in the slow replicas 1")
    )
    assert slow == whole / 4 > 0
    beyond = run_of("replica=2,stage=2", dataclasses.replace(outer, slow=(2,)), model=MODEL)
    with pytest.raises(ConfigError, match="the mesh has the replicas 0 to 1"):
        sharding_table(beyond, 4)
