"""Elastic runs with pipeline stages: the mesh for the devices left, and the layers of its stages."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointConfig, Checkpointer
from jaxllm.parallel.elastic.run_generation import RunGeneration
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.stage_layout import split_units
from jaxllm.train import RunConfig
from jaxllm.train.run import elastic_config, run_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import build_optimizer, run_state
from sharding import ShardingError
from tests.recipes.together_run import together_run

PLAIN = ParallelConfig()


def config_left(
    devices: int, mesh: str, parallel: ParallelConfig = PLAIN, width: int = 24, layers: int = 8
) -> RunConfig:
    """Settings for so many of eight devices; a micro-batch has two rows."""
    run = together_run()
    model = dataclasses.replace(run.model, layers=layers, embed_dim=width, dtype="float32", param_dtype="float32")
    elastic = dataclasses.replace(run.elastic, enabled=True)
    config = dataclasses.replace(run, model=model, mesh=mesh, parallel=parallel, elastic=elastic, accumulate=4)
    return elastic_config(config, devices, "cpu", RunGeneration(2, tuple(range(devices)), 8, "k", ""))


def stages_left(devices: int, mesh: str, parallel: ParallelConfig = PLAIN, width: int = 24, layers: int = 8) -> str:
    """Mesh and depths of stages for so many of eight devices."""
    found = config_left(devices, mesh, parallel, width, layers)
    return " ".join([found.mesh, *map(str, found.parallel.depths)])


def test_layers_are_split_anew_over_fewer_stages():
    left = {devices: stages_left(devices, "stage=4,data=2") for devices in range(1, 9)}
    assert left == {
        8: "stage=4,data=2",
        7: "stage=1,data=7",
        6: "stage=3,data=2 2 3 3",
        5: "stage=1,data=5",
        4: "stage=4,data=1",
        3: "stage=3,data=1 2 3 3",
        2: "stage=2,data=1",
        1: "stage=1,data=1",
    }
    assert stages_left(6, "stage=4,data=2", layers=6) == "stage=3,data=2"  # even: stored where they are used
    # Three stages do not divide this width: layers are then stored by depth alone, which needs as many on each.
    assert stages_left(6, "stage=4,data=2", width=32) == "stage=2,data=3"
    assert stages_left(6, "stage=4,data=2", width=32, layers=12) == "stage=3,data=2"
    assert stages_left(6, "stage=2,fsdp=2,data=2") == "stage=2,fsdp=3,data=1"  # data and fsdp are enough
    assert stages_left(3, "stage=2,fsdp=2,data=2") == "stage=1,fsdp=3,data=1"  # the state is in three parts, not in one


def test_layers_are_split_as_those_of_all_stages():
    depths = ParallelConfig(depths=(1, 2, 2, 1))  # embedding and head cost as much as a layer each
    assert stages_left(8, "stage=4,data=2", depths, layers=6) == "stage=4,data=2 1 2 2 1"
    assert stages_left(4, "stage=4,data=2", depths, layers=6) == "stage=4,data=1 1 2 2 1"
    assert stages_left(6, "stage=4,data=2", depths, layers=6) == "stage=3,data=2 1 3 2"
    assert stages_left(2, "stage=4,data=2", depths, layers=6) == "stage=2,data=1"
    assert stages_left(1, "stage=4,data=2", depths, layers=6) == "stage=1,data=1"  # depths are of stages alone
    assert split_units(30, 3, like=(7, 8, 8, 7)) == (9, 11, 10)


def test_fewer_stages_have_a_legal_schedule():
    interleaved = ParallelConfig(schedule="interleaved", chunks=2)
    # Three stages do not divide four micro-batches; with two, fsdp splits the state that four have split.
    assert stages_left(6, "stage=4,data=2", interleaved) == "stage=2,data=1,fsdp=3"
    assert stages_left(6, "stage=4,data=2", ParallelConfig(schedule="v_half")) == "stage=3,data=2 1 2 2 1 1 1"
    with pytest.raises(ShardingError, match="5 of 8 devices are left, and no mesh of so many fits"):
        stages_left(5, "stage=4,data=2", ParallelConfig(offload=0.5))  # without stages nothing is offloaded


def abstract_state(config: RunConfig, devices: int) -> dict[str, Any]:
    """Parameters and optimizer state."""
    model = run_model(config)
    mesh = run_mesh(config, model, jax.devices()[:devices])
    state = run_state(config, model, build_optimizer(config, model), mesh)
    return {"params": state.params, "opt_state": state.opt_state}


def test_the_state_of_one_split_is_that_of_another(tmp_path: Path, rng: np.random.Generator):
    """Saved over four stages, restored over three and two of which some have more layers: bitwise."""
    before = abstract_state(config_left(8, "stage=4,data=2"), 8)

    def drawn(leaf: Any) -> jax.Array:
        values = rng.integers(0, 2**31, leaf.shape).astype(np.int32)
        return jax.device_put(values.view(leaf.dtype), leaf.sharding)

    state = jax.tree.map(drawn, before)
    with Checkpointer(tmp_path, CheckpointConfig()) as saved:
        saved.save(1, state, {})
        saved.wait()
        for devices, depths in ((6, (2, 3, 3)), (2, ())):
            config = config_left(devices, "stage=4,data=2")
            assert config.parallel.depths == depths
            restored, _ = saved.restore(abstract_state(config, devices))
            for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
                assert one.sharding.num_devices == devices
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_split_is_the_best_of_all():
    for units, stages in itertools.product(range(3, 10), range(2, 4)):
        for first, last in itertools.product(range(3), repeat=2):

            def busiest(depths: tuple[int, ...], first: int = first, last: int = last) -> int:
                return max(n + first * (i == 0) + last * (i == len(depths) - 1) for i, n in enumerate(depths))

            every = [d for d in itertools.product(range(1, units + 1), repeat=stages) if sum(d) == units]
            like = (3 - first, 3, 3 - last)
            assert busiest(split_units(units, stages, like)) == min(map(busiest, every)), (units, stages)
