"""Experts that are not on the device: computed by the host's processor, or read from files, with the same results."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxllm.infer.streaming.expert_schedule import ExpertCosts, always, by_cost, never, schedule
from jaxllm.infer.streaming.expert_stage import ExpertStage
from jaxllm.infer.streaming.fit_request import FitRequest
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from tests.infer import engines

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


def test_experts_elsewhere_are_refused_by_name():
    for text, said in (("absent=host", "experts=SLOTS"), ("experts=2,absent=never", "absent=load")):
        with pytest.raises(ValueError, match=said):
            OffloadBudget.parse(text)
    with pytest.raises(ValueError, match="whole layers"):
        FitRequest.parse("fit,absent=host")
    budget = OffloadBudget.parse("device=1GiB,experts=2,absent=schedule")
    assert OffloadBudget.parse(str(budget)) == budget
    assert budget.placement([1, 1]).absent == "schedule"
    with pytest.raises(ValueError, match="a number of slots"):
        WeightPlacement(absent="host")
    with pytest.raises(ValueError, match="as many"):
        ExpertCosts(1.0, 1.0, (1, 2), (1.0,))
    with pytest.raises(ValueError, match="0 or more"):
        ExpertCosts(-1.0, 1.0, (1,), (1.0,))
    placement = WeightPlacement(1, expert_slots=2, absent="by_cost")
    with pytest.raises(ValueError, match="batch_invariant does not go with absent"):
        engines.build(engines.ENGINES["invariant"], "mixtral", placement=placement)
