"""Failures of tiers, where batches, meshes, slots and the host's processor take part: errors by name, and it goes on.

Layers on one device are in `test_streaming`, experts that slots take from files in `test_expert_offload`, the KV cache
by tier in `test_blocks`; what a server answers in `tests/serve/test_streamed_server`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sharding
from jaxllm.cli.errors import is_user_error
from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.runner.runner_protocol import StepFailedError
from jaxllm.infer.streaming.blocks.block_runner import BlockRunner
from jaxllm.infer.streaming.blocks.cache_placement import CachePlacement
from jaxllm.infer.streaming.blocks.pool_store import FilePools
from jaxllm.infer.streaming.experts import expert_stage
from jaxllm.infer.streaming.experts.expert_schedule import ExpertCosts
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.infer.streaming.weight_file import CacheUnavailableError, WeightsUnavailableError
from tests.infer import engines
from tests.infer.damaged_files import SAID, Damage, damaged

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, seed=1)
PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
CONFIG = dataclasses.replace(engines.ENGINES["roomy"], max_sequences=2)


def runner_of(engine: Any) -> StreamedRunner:
    assert isinstance(engine.runner, StreamedRunner)
    return engine.runner


def submitted(engine: Engine) -> list[Any]:
    """The prompts as requests of which nothing is in the prefix cache."""
    return [engine.submit(prompt, GREEDY, salt=str(engine.metrics.steps)) for prompt in PROMPTS]


def served(engine: Engine) -> list[list[int]]:
    """Tokens of the prompts."""
    made = submitted(engine)
    while engine.busy:
        engine.step()
    assert [one.failure for one in made] == [None] * len(made)
    return [one.sequences[0].tokens for one in made]


def failed(engine: Engine, code: str) -> str:
    """Serves the prompts, of which some end by an error; what it says."""
    made, ended = submitted(engine), list[Any]()
    while not ended:
        ended = [delta for delta in engine.step() if delta.finish is not None]
    assert {delta.finish for delta in ended} == {"error"}
    failure = next(one.failure for one in made if one.failure is not None)
    assert isinstance(failure, StepFailedError)
    assert failure.code == code
    for one in made:
        engine.cancel(one)
    while engine.busy:
        engine.step()
    return str(failure)


def forget_what_was_read(engine: Engine) -> None:
    """No thread reads, nothing is read ahead, and checksums are looked at once more."""
    runner = runner_of(engine)
    wait([future for _, future in runner.window._ahead])
    for store in runner.window.stores.values():
        getattr(getattr(store, "store", store), "_checked", set()).clear()  # of a mesh: what is divided
    if runner.experts is not None:
        for own in runner.experts._experts.values():
            getattr(own, "_checked", set()).clear()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("where", "damage"), [("batches", "changed"), ("batches", "removed"), ("mesh", "bits"), ("mesh", "changed")]
)
def test_a_layers_file_fails_the_step_of_all_batches_and_devices(where, damage: Damage, tmp_path):
    placement, fields = WeightPlacement(1, host_units=0, disk=tmp_path), dict[str, Any]()
    if where == "batches":
        placement = dataclasses.replace(placement, cache=CachePlacement(2, 0, 0, tmp_path))
    else:
        fields["mesh"] = sharding.MeshSpec.parse("tensor=2").build(jax.devices()[:2])
    engine = engines.build(CONFIG, "llama", placement=placement, **fields)
    want = served(engine)
    file = sorted(tmp_path.glob("layers-*/*.bin"))[1]
    forget_what_was_read(engine)
    with damaged(file, damage):
        runner_of(engine).window.restart()  # what was read ahead was the good file's
        assert re.search(rf"{file.name} \(layer 1\).*{SAID[damage]}", failed(engine, "weights_unavailable"))
    assert served(engine) == want
    engines.check_books(engine)
    runner_of(engine).close()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("damage", ["changed", "bits", "removed"])
def test_an_expert_that_the_host_computes_cannot_be_read(damage: Damage, tmp_path):
    costs = ExpertCosts(load=1.0, device=1.0, rows=(1, 4, 16), host=(1.0, 1.0, 1.0))
    placement = WeightPlacement(
        1, 9, 0, tmp_path, expert_slots=1, expert_host_bytes=0, absent="host", expert_costs=costs, ahead="none"
    )
    engine = engines.build(CONFIG, "mixtral", placement=placement)
    want, stage = served(engine), runner_of(engine).experts
    assert stage is not None
    assert stage.counts.on_host > 0
    file = sorted(tmp_path.glob("experts-*/*.bin"))[1]
    forget_what_was_read(engine)
    with damaged(file, damage):
        assert re.search(rf"{file.name} \(layer 1, expert \d\).*{SAID[damage]}", failed(engine, "weights_unavailable"))
    assert stage.counts.failures >= 1
    assert served(engine) == want
    runner_of(engine).close()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("where", ["host", "files"])
def test_a_device_without_room_for_an_expert(where, tmp_path, monkeypatch):
    """The step's requests end by name; no slot is said to hold an expert that has not come."""
    files = {"host_units": 0, "disk": tmp_path, "expert_host_bytes": 0} if where == "files" else {}
    engine = engines.build(CONFIG, "mixtral", placement=WeightPlacement(1, 9, expert_slots=1, **files))  # type: ignore[arg-type]
    want, stage, real = served(engine), runner_of(engine).experts, jax.device_put
    assert stage is not None

    def full(tree: Any, *more: Any, **fields: Any) -> Any:
        """Experts' matrices find no room."""
        if any(getattr(x, "ndim", 0) == 3 and x.shape[0] == 1 for x in jax.tree.leaves(tree)):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for it")
        return real(tree, *more, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", full)
        said = failed(engine, "weights_unavailable")
    tier = "host" if where == "host" else "disk"
    assert re.search(rf"layer \d: an expert cannot be copied from the {tier} tier.*no room.*give fewer slots", said)
    assert stage.counts.failures >= 1
    assert served(engine) == want
    runner_of(engine).close()


def test_a_device_without_room_for_the_slots(monkeypatch):
    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for it")

    monkeypatch.setattr(expert_stage, "empty_slots", full)
    with pytest.raises(WeightsUnavailableError, match=r"slots for 3 experts .*no room.*experts=N") as caught:
        engines.build(CONFIG, "mixtral", placement=WeightPlacement(1, expert_slots=3))
    assert is_user_error(caught.value)


class FullForParts:
    """Store of a part of the KV cache for which the device has no room."""

    tier = "disk"

    def read(self) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for it")

    def write(self, pages: Any, content: Any) -> None:
        raise AssertionError("nothing was computed")


@pytest.mark.drawn(2)
def test_a_device_without_room_for_a_part_of_the_kv_cache(tmp_path):
    engine = engines.build(CONFIG, "llama", placement=WeightPlacement(2, cache=CachePlacement(2, 0, 0, tmp_path)))
    want, runner = served(engine), runner_of(engine)
    assert isinstance(runner, BlockRunner)
    stores = runner.parts.stores
    runner.parts.stores = {part: FullForParts() if part.unit == 1 else store for part, store in stores.items()}
    said = failed(engine, "kv_cache_unavailable")
    assert re.search(r"KV cache of batch \d in unit 1 cannot be copied from the disk tier.*no room.*fewer pages", said)
    runner.parts.stores = stores
    assert served(engine) == want
    runner.close()


def test_a_kv_cache_file_that_became_shorter_is_an_error(tmp_path):
    """Files have no name, so nobody but the disk itself can change one."""
    pools = FilePools((np.zeros((2, 5, 1, 4, 3), np.float32),), tmp_path, "the KV cache of batch 0 in layer 1")
    os.ftruncate(pools._file, 100)
    with pytest.raises(CacheUnavailableError, match=r"batch 0 in layer 1 .* cannot be read: the file ends after 100"):
        pools.read()


def test_directories_that_cannot_be_written_are_named(tmp_path):
    """Files of layers, of experts and of the KV cache, before anything is served."""
    nowhere = Path("/dev/null/offload")
    for placement, said in (
        (WeightPlacement(1, host_units=0, disk=nowhere), "the layers cannot be written there"),
        (WeightPlacement(1, 9, 0, nowhere, expert_slots=1, expert_host_bytes=0), "the experts cannot be written there"),
        (WeightPlacement(1, cache=CachePlacement(2, 0, 0, nowhere)), "batch 0 in layer 0 cannot be kept"),
    ):
        with pytest.raises((WeightsUnavailableError, CacheUnavailableError), match=said) as caught:
            engines.build(CONFIG, "mixtral", placement=placement)
        assert "Give a directory" in str(caught.value)
        assert is_user_error(caught.value)
