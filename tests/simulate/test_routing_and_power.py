"""Router policies on views by hand, and the power cap: levels, energy and service with more servers."""

from __future__ import annotations

import pytest

from jaxllm import cli
from jaxllm.plan.formulas.serving_step import StepCost
from jaxllm.simulate import DeploymentError, make_trace, simulate
from jaxllm.simulate.oversubscription import oversubscribe
from jaxllm.simulate.power import PowerModel
from jaxllm.simulate.power_cap import CapPolicy, PowerGovernor
from jaxllm.simulate.routing import (
    ByPriority,
    EngineView,
    MixingPenalty,
    PrefixAware,
    RoundRobin,
    RoutedRequest,
    ShortestQueue,
)
from tests.simulate.served import deployment


def view(*requests: tuple[int, float, int], prefixes: str = "") -> EngineView:
    """Engine with requests of (prompt, predicted, generated)."""
    return EngineView([RoutedRequest(p, n, generated=g) for p, n, g in requests], frozenset(prefixes))


ONE = RoutedRequest(100, 50.0)


def test_engines_in_turn_and_by_queue():
    engines = [view((1, 1.0, 0), (1, 1.0, 0)), view((9, 9.0, 0)), view((9, 9.0, 0))]
    turn = RoundRobin()
    assert [turn.choose(ONE, engines) for _ in range(4)] == [0, 1, 2, 0]
    assert ShortestQueue().choose(ONE, engines) == 1


def test_a_prefix_is_worth_some_queue():
    asked = RoutedRequest(100, 10.0, prefix="a", prefix_tokens=80)
    few, many = view(*[(1, 1.0, 0)] * 4, prefixes="a"), view(*[(1, 1.0, 0)] * 5, prefixes="a")
    assert PrefixAware().choose(asked, [view(), few]) == 1
    assert PrefixAware().choose(asked, [view(), many]) == 0


def test_mixing_prefill_into_decoding_engines_costs():
    """A long prompt goes where nobody decodes, a short one where the queue of prompts is short; by the seconds."""
    decoding, queued = view(*[(10, 90.0, 5)] * 3), view((100, 90.0, 0), (150, 90.0, 0))
    router = MixingPenalty(prefill=1e-3, sequence=1e-4)
    assert router.cost(ONE, decoding) == pytest.approx(1e-3 * 100 * 4 + 2e-4 * 3 * 50)
    assert router.cost(ONE, queued) == pytest.approx(1e-3 * (250 + 100) + 2e-4 * 2 * 50)
    assert router.choose(ONE, [decoding, queued]) == 1
    assert router.choose(RoutedRequest(10, 50.0), [decoding, queued]) == 0
    cached = RoutedRequest(100, 50.0, prefix="a", prefix_tokens=90)
    assert router.cost(cached, view(prefixes="a")) == pytest.approx(1e-3 * 10)


def test_classes_have_their_engines():
    engines = [view((1, 1.0, 0)), view(), view((1, 1.0, 0)), view()]
    assert ByPriority(2).choose(RoutedRequest(1, 1.0, key="low"), engines) == 1
    assert ByPriority(2).choose(RoutedRequest(1, 1.0, key="high"), engines) == 3


def test_energy_is_by_phase():
    cost = StepCost(compute=2.0, memory=3.0, network=1.0, launch=1.0)
    model = PowerModel(idle=0.1, compute=1.0, memory=0.5, network=0.25)
    assert model.step_energy(cost, 400.0) == 400 * (2 + 1.5 + 0.5)
    assert model.energy([cost, cost], 20.0, 400.0) == 2 * 1600 + 6 * 40
    assert model.mean_power(cost, 400.0) == pytest.approx(1600 / 7)


def test_levels_rise_and_fall_with_a_margin():
    policy = CapPolicy(low_threshold=0.8, high_threshold=0.9, margin=0.05)
    governor = PowerGovernor(100.0, 100.0, 1, policy=policy)
    levels = []
    for share in (0.7, 0.85, 0.78, 0.74, 0.95, 0.87, 0.82, 0.76, 0.70):
        governor._level = governor._leveled(share)
        levels.append(governor._level)
    assert levels == [0, 1, 1, 0, 2, 2, 1, 1, 0]
    with pytest.raises(ValueError, match="power cap"):
        CapPolicy(low_clock=1.2)
    with pytest.raises(ValueError, match="a period above 0"):
        CapPolicy(period=0.0)


def test_a_cap_slows_what_computes_and_takes_less_power():
    """Engine 0 has low priority; both compute only, so a clock of 0.5 doubles the time and quarters the power."""
    one, model = deployment("h100:1x2"), PowerModel(idle=0.0)
    policy = CapPolicy(0.1, 2.0, 0.05, 0.5, 1.0, period=0.02)
    trace = make_trace("closed:4", lengths="16/8", count=8)
    clock = lambda *_: StepCost(compute=0.01)  # noqa: E731
    governor = PowerGovernor(1400.0, 700.0, 1, 1, policy, model=model)
    capped = simulate(one, trace, clock=clock, governor=governor)
    times = [{round(step.cost.seconds, 6) for step in steps[4:]} for steps in capped.engines]
    assert times == [{0.02}, {0.01}]
    watts = [watts for *_, watts in governor.readings()]
    assert watts[0] == pytest.approx(1400)
    assert watts[3] == pytest.approx(700 + 700 / 4)
    assert governor.capped["low"] > 0
    assert governor.capped["high"] == 0
    assert not governor.breaches()


def test_the_meter_has_the_energy_of_all_steps():
    """Readings times their period are the energy of the steps and of idling, however long a step is."""
    governor = PowerGovernor(1000.0, 700.0, 1, caps=False, policy=CapPolicy(period=0.013))
    clock = lambda batches, shape, passes: StepCost(compute=0.01, memory=0.002 * shape.tokens)  # noqa: E731
    found = simulate(deployment("h100:1x2"), make_trace("poisson:100", lengths="30/6", count=9), clock=clock,
                     governor=governor)  # fmt: skip
    readings = governor.readings()
    seconds = readings[-1][1]
    spent = sum(governor.model.energy([s.cost for s in own], seconds, 700.0) for own in found.engines)
    assert sum(watts * (end - start) for start, end, watts in readings) == pytest.approx(spent, rel=1e-9)


def test_more_servers_stay_within_the_budget_under_a_cap():
    trace = make_trace("uniform:40000", lengths="200/4", count=80)
    tight = CapPolicy(0.3, 0.4, 0.05, 0.5, 0.6, period=1e-4)
    found = oversubscribe(deployment("h100:1x4"), trace, 0.5, tight)
    assert found.engines == 6
    assert found.peak <= found.uncapped_peak
    assert found.capped["low"] > 0
    assert found.latency["low"] >= 1.0
    loose = oversubscribe(deployment("h100:1x4"), trace, 0.5, CapPolicy(5.0, 5.0))
    assert loose.latency == {"low": 1.0, "high": 1.0}
    assert loose.capped == {"low": 0.0, "high": 0.0}
    assert (len(loose.breaches) > 0) == (loose.peak > 1)
    assert len(loose.breaches) == loose.uncapped_breaches
    with pytest.raises(DeploymentError, match="two engines or more"):
        oversubscribe(deployment(), trace)
    with pytest.raises(DeploymentError, match="no watts"):
        oversubscribe(deployment("v6e:2x2"), trace)


def test_the_command_compares_routers_and_caps(capsys):
    argv = ["simulate", "quickstart", "--on", "h100:4", "--mesh", "tensor=1", "--trace", "poisson:900", "--no-curve"]
    argv += ["--lengths", "60/4", "--requests", "8", "--router", "all", "--extra-servers", "0.3"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "5 engines within 2.8 kW" in said
    assert {"round-robin", "shortest-queue", "prefix-aware", "mixing-penalty"} <= set(said.split())
