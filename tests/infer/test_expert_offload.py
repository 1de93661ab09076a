"""Experts that are not on the device: computed by the host's processor, or read from files, with the same results."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from jaxllm.infer import SamplingParams
from jaxllm.infer.runner.runner_protocol import StepFailedError
from jaxllm.infer.streaming.experts.expert_schedule import ExpertCosts, always, by_cost, never, schedule
from jaxllm.infer.streaming.experts.expert_stage import ExpertStage
from jaxllm.infer.streaming.fit_request import FitRequest
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.quant.packing import pack_params
from tests.infer import engines
from tests.infer.damaged_files import SAID, damaged

COSTS = ExpertCosts(load=3.0, device=1.0, rows=(1, 4, 16), host=(1.0, 2.0, 8.0))


def stage_of(engine: Any) -> ExpertStage:
    assert isinstance(engine.runner, StreamedRunner)
    assert engine.runner.experts is not None
    return engine.runner.experts


def test_experts_go_where_they_cost_least():
    """Expert 0 is in a slot; of the others the one with many rows is copied."""
    rows, here = {0: 1, 1: 9, 2: 1, 3: 3}, [0]
    assert never(rows, here, COSTS) == set()
    assert always(rows, here, COSTS) == {1, 2, 3}
    assert by_cost(rows, here, COSTS) == {2, 3}
    assert schedule(rows, here, COSTS) == {2, 3}
    assert COSTS.layer(1, 1, [1, 3]) == 4.0  # the copy, and the device; the host needs 3
    assert COSTS.layer(1, 3, []) == 10.0  # three copies, and the device after the last
    assert COSTS.on_host(17) == 9.0
    slow = dataclasses.replace(COSTS, device=5.0)
    assert schedule({0: 1, 1: 1}, [0, 1], slow) == {0, 1}  # though they are in slots
    assert by_cost({0: 1, 1: 1}, [0, 1], slow) == set()


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("model", "absent"), [("mixtral", "schedule"), ("deepseek_v3", "host"), ("gpt_oss", "by_cost")]
)
def test_the_host_computes_absent_experts(model, absent, rng, float64):
    config = engines.ENGINES["tight, recompute"]
    placement = WeightPlacement(1, 1, expert_slots=2, absent=absent, expert_costs=COSTS)
    engine = engines.build(config, model, "float64", placement=placement)
    made = engines.serve(engine, engines.traffic(rng, config, 4))
    assert engines.error(model, "float64", made) <= 1e-10
    counts = stage_of(engine).counts
    assert counts.on_host > 0
    assert counts.loads <= counts.wanted - counts.hits + counts.predicted
    assert absent == "schedule" or counts.loads == counts.wanted - counts.hits - counts.on_host + counts.predicted
    assert engine.runner.counters()["experts_on_host"] == counts.on_host  # type: ignore[attr-defined]
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[union-attr]


@pytest.mark.drawn(3)
def test_costs_are_measured_in_the_first_step(rng):
    config = engines.ENGINES["one after the other"]
    engine = engines.build(config, "mixtral", placement=WeightPlacement(1, 9, expert_slots=1, absent="by_cost"))
    stage = stage_of(engine)
    engines.serve(engine, engines.traffic(rng, config, 1))
    (costs,) = stage.costs.values()
    assert costs.rows == (1, 4, 5)
    assert min(costs.load, costs.device, *costs.host) > 0
    for slots in stage.slots.values():  # measuring left every expert in its slot
        assert np.sum(slots.table < slots.slots) == slots.slots


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("model", "host_bytes", "absent"),
    [("mixtral", 0, "load"), ("gpt_oss", 5000, "load"), ("deepseek_v3", 4000, "host")],
)
def test_experts_in_files_are_resident_experts(model, host_bytes, absent, rng, float64, tmp_path):
    """The host keeps no more than its bytes; the files are found again."""
    config = engines.ENGINES["tight, recompute"]
    placement = WeightPlacement(
        1, 1, 0, tmp_path, expert_slots=2, expert_host_bytes=host_bytes, absent=absent, expert_costs=COSTS
    )
    engine = engines.build(config, model, "float64", placement=placement)
    requests = engines.traffic(rng, config, 4)
    assert engines.error(model, "float64", engines.serve(engine, requests)) <= 1e-10
    stage = stage_of(engine)
    (files,) = stage.files
    counts, seen = stage.counts, files.counts
    assert counts.loads == counts.wanted - counts.hits - counts.on_host + counts.predicted
    pending = sum(map(len, stage._reads_ahead.values()))
    # Experts that are computed by the host are read for each step, and the costs are given.
    assert counts.loads + counts.on_host <= seen.reads + seen.from_host <= counts.loads + counts.on_host + pending
    assert files.held_bytes <= host_bytes
    assert (seen.from_host > 0) == (host_bytes > 0)
    assert engine.runner.counters()["expert_reads_disk"] == seen.reads  # type: ignore[attr-defined]
    engine.runner.close()  # type: ignore[attr-defined]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("experts-*/*.bin")}
    assert len(written) == len(stage.slots)
    next(iter(written)).write_bytes(b"other")
    again = engines.build(config, model, "float64", placement=placement)
    assert engines.error(model, "float64", engines.serve(again, requests[:1])) <= 1e-10
    same = [path.stat().st_mtime_ns == time for path, time in written.items()]
    assert same == [False, *[True] * (len(written) - 1)]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("damage", SAID)
def test_an_expert_that_cannot_be_read_ends_the_requests_of_its_step(damage, tmp_path, float64):
    """By name; with the file back the engine says what it said before, and no slot holds what never came."""
    placement = WeightPlacement(1, 9, expert_slots=1, disk=tmp_path, host_units=0, expert_host_bytes=0)
    engine = engines.build(engines.ENGINES["roomy"], "mixtral", "float64", placement=placement)
    params = SamplingParams(max_tokens=6, temperature=0.0, seed=1)
    want = engines.serve(engine, [{"prompt": [5, 6, 7], "params": params}])[0].sequences[0].tokens
    stage, file = stage_of(engine), sorted(tmp_path.glob("experts-*/*.bin"))[1]
    for own in stage._experts.values():
        own._checked.clear()  # type: ignore[union-attr]
    with damaged(file, damage):
        request = engine.submit([5, 6, 7], params, salt="new")
        while engine.busy:
            engine.step()
    assert isinstance(request.failure, StepFailedError)
    assert re.search(rf"{file.name} \(layer 1, expert [0-3]\).*{SAID[damage]}", str(request.failure))
    assert stage.counts.failures >= 1
    again = engine.submit([5, 6, 7], params, salt="new")
    while engine.busy:
        engine.step()
    assert again.sequences[0].tokens == want


def test_experts_elsewhere_are_refused_by_name():
    for text, said in (
        ("absent=host", "experts=SLOTS"),
        ("experts=1,experts_host=1GiB", "disk=DIR"),
        ("experts=2,absent=never", "absent=load"),
    ):
        with pytest.raises(ValueError, match=said):
            OffloadBudget.parse(text)
    with pytest.raises(ValueError, match="slots which load them"):
        FitRequest.parse("fit,absent=host")
    budget = OffloadBudget.parse("device=1GiB,disk=d,experts=2,experts_host=1MiB,absent=schedule")
    assert OffloadBudget.parse(str(budget)) == budget
    assert budget.placement([1, 1]).absent == "schedule"
    assert budget.placement([1, 1]).expert_host_bytes == 2**20
    with pytest.raises(ValueError, match="a number of slots"):
        WeightPlacement(absent="host")
    with pytest.raises(ValueError, match="a directory as disk"):
        WeightPlacement(expert_slots=1, expert_host_bytes=0)
    with pytest.raises(ValueError, match="as many"):
        ExpertCosts(1.0, 1.0, (1, 2), (1.0,))
    with pytest.raises(ValueError, match="0 or more"):
        ExpertCosts(-1.0, 1.0, (1,), (1.0,))
    placement = WeightPlacement(1, expert_slots=2, absent="by_cost")
    with pytest.raises(ValueError, match="batch_invariant does not go with absent"):
        engines.build(engines.ENGINES["invariant"], "mixtral", placement=placement)


@pytest.mark.drawn(2)
def test_packed_experts_are_written_by_programs_that_a_folder_keeps(tmp_path):
    """Names of programs are names of files, which have 255 bytes at most."""
    params = pack_params(
        engines.functional(engines.model_of("mixtral", "float32")), engines.params_of("mixtral", "float32"), "int8"
    )
    engine = engines.build(
        engines.ENGINES["roomy"], "mixtral", params=params, placement=WeightPlacement(1, expert_slots=2),
        manifest=tmp_path / "programs",
    )  # fmt: skip
    (request,) = engines.serve(engine, [{"prompt": [5, 6, 7], "params": SamplingParams(max_tokens=4)}])
    assert len(request.sequences[0].tokens) == 7
    assert max(map(len, engine.runner.programs)) < 100
    engine.runner.close()
