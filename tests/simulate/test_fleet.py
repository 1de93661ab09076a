"""Fleets: options, the autoscaler by hand, failures by hand, cost of replica-hours, and the command."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.simulate import DeploymentError, RequestTrace, ServiceObjective, TraceRequest, make_trace, simulate
from jaxllm.simulate.fleet.autoscaler import AutoscalePolicy, Autoscaler
from jaxllm.simulate.fleet.fleet_report import steps
from jaxllm.simulate.fleet.fleet_simulator import simulate_fleet
from jaxllm.simulate.fleet.replica_failures import LostRequests, ReplicaFailures
from jaxllm.simulate.simulation_report import html_report, router_table, text_report
from tests.simulate.fleet_ticks import TICK, ListedFailures
from tests.simulate.served import deployment, seconds


def test_options_are_read_and_refused():
    failures = ReplicaFailures.parse("mtbf=3600, repair=120,requests=migrate,retries=3,seed=7")
    assert failures == ReplicaFailures(3600.0, 120.0, "migrate", 3, 7)
    assert failures.availability == 3600 / 3720
    assert AutoscalePolicy.parse("min=1,max=8,target=20,load=2e9").load == 2e9
    for parse, text, said in (
        (ReplicaFailures.parse, "mtbf=1", "has no repair"),
        (ReplicaFailures.parse, "mtbf=1,repair=1,requests=drop", "fail|retry|migrate"),
        (ReplicaFailures.parse, "mtbf=1,mtbf=2,repair=1", "each once"),
        (ReplicaFailures.parse, "mtbf=0,repair=1", "above 0"),
        (ReplicaFailures.parse, "mtbf=nan,repair=1", "above 0"),
        (AutoscalePolicy.parse, "min=1,max=8", "has no target"),
        (AutoscalePolicy.parse, "min=3,max=2,target=1", "min <= max"),
        (AutoscalePolicy.parse, "min=1,max=2,target=1,metric=cpu", "requests|queue|cache|busy"),
        (AutoscalePolicy.parse, "min=1.5,max=2,target=1", "min=N"),
    ):
        with pytest.raises(ConfigError, match=said.replace("|", r"\|")):
            parse(text)


def test_lives_of_a_replica_are_its_own():
    first = list(itertools.islice(ReplicaFailures(10.0, 1.0).lives(0), 5))
    assert first == list(itertools.islice(ReplicaFailures(10.0, 1.0).lives(0), 5))
    assert first != list(itertools.islice(ReplicaFailures(10.0, 1.0).lives(1), 5))
    assert list(ReplicaFailures(float("inf"), 1.0).lives(0)) == []


def test_counts_are_drawn_as_steps():
    """Up and down at once, not along a slope from the count before."""
    assert steps([(0.0, 0), (2.0, 1), (2.5, 3)], 4.0) == (
        [0.0, 2.0, 2.0, 2.5, 2.5, 4.0],
        [0.0, 0.0, 1.0, 1.0, 3.0, 3.0],
    )


def test_the_autoscaler_is_the_hpas():
    """Growth at once, within the tolerance nothing, at most the double or four more; less when the window is over."""
    policy = AutoscalePolicy(1, 12, 10.0, down=60.0)
    scaler = Autoscaler(policy, 0.0, 2)
    assert scaler.decide(15, [10.9, 10.9]) == 2
    assert scaler.decide(30, [15.0, 14.0]) == 3
    assert scaler.decide(45, [90.0]) == 5
    assert scaler.decide(60, [0.0] * 5) == 5
    assert scaler.decide(105, [0.0] * 5) == 5
    assert scaler.decide(106, [1.0] * 5) == 1
    assert Autoscaler(AutoscalePolicy(1, 12, 10.0, down=0.0), 0.0, 3).decide(15, [0.0] * 3) == 1


def test_replicas_that_are_not_ready_are_counted_as_the_hpa_counts_them():
    """Starting and failed ones are idle when it would grow; failed ones are at the target when it would shrink."""
    policy = AutoscalePolicy(1, 9, 10.0, down=0.0)
    assert Autoscaler(policy, 0.0, 2).decide(15, [15.0], starting=1) == 2
    assert Autoscaler(policy, 0.0, 2).decide(15, [35.0], starting=1) == 4
    assert Autoscaler(policy, 0.0, 2).decide(15, [35.0], failed=1) == 4
    assert Autoscaler(policy, 0.0, 4).decide(15, [5.0, 5.0], failed=2) == 3
    assert Autoscaler(policy, 0.0, 4).decide(15, [], failed=4) == 4


def test_a_new_replica_loads_its_weights():
    policy = AutoscalePolicy(1, 2, 1.0, start=20.0)
    assert policy.start_seconds(16e9, 2e9) == 28.0
    assert replace(policy, load=16e9).start_seconds(16e9, 2e9) == 21.0


def failed_fleet(what: LostRequests, retries: int = 2):
    """One request of 4 tokens at a token each 8 ticks; its replica fails at tick 20 and is ready again at 50."""
    failures = ListedFailures(1.0, 1.0, what, retries, listed={0: [(20, 30)]})
    trace = RequestTrace("one", (TraceRequest(0.0, 4, 4), TraceRequest(40 * TICK, 4, 1)))
    return simulate_fleet(deployment(max_sequences=1), trace, failures=failures, clock=seconds(8 * TICK))


def test_requests_of_a_failed_replica():
    """They fail, or go on with what was delivered; without a ready replica a request fails too, or waits."""
    found = failed_fleet("fail")
    assert [[at / TICK for at in one.chunks] for one in found.results] == [[8, 16], []]
    assert [one.error for one in found.results] == ["its replica failed", "no replica was ready"]
    found = failed_fleet("retry")
    assert [one.error for one in found.results] == ["its replica failed after the first token", ""]
    assert found.results[1].end == 58 * TICK
    found = failed_fleet("migrate")
    assert [[at / TICK for at in one.chunks] for one in found.results] == [[8, 16, 58, 66], [74]]
    assert [step.chunks[0] for step in found.engines[0]][3] == [(0, 6)]  # the prompt, and two tokens of before
    assert (found.failures, found.resent) == (1, 1)
    assert found.availability == 44 / 74
    assert failed_fleet("migrate", retries=0).results[0].error.startswith("its replicas failed more often")


def test_figures_of_a_fleet():
    """Replica-hours are those that replicas are there for; a report has availability, lost requests and a chart."""
    trace = make_trace("poisson:900", lengths="100/20", count=80, seed=3)
    priced = deployment("v6e:1x1")
    assert priced.dollars_per_hour
    policy = AutoscalePolicy(1, 4, 1.0, period=0.004, down=0.01, start=0.003, load=1e12)
    failures = ReplicaFailures(0.03, 0.01, "fail")
    found = simulate_fleet(priced, trace.at_rate(4000), autoscale=policy, failures=failures)
    figures = found.figures(ServiceObjective())
    fleet = figures["fleet"]
    assert fleet["failures"] > 0 < fleet["lost"] == figures["failed"]
    assert 1 <= fleet["fewest"] < fleet["most"] <= 4 + 4  # those that drain are there beside the others
    assert fleet["dollars"] == pytest.approx(priced.dollars_per_hour * fleet["replica_hours"])
    assert fleet["replica_hours"] == pytest.approx(fleet["replicas"] * found.seconds / 3600)
    text = text_report(found, figures)
    assert "replica-hours" in text
    assert f"requests lost                       {fleet['lost']}" in text
    page = html_report(found, figures)
    assert "<h2>Replicas</h2>" in page
    assert "requests lost" in page
    assert "shortest" in router_table({"shortest": found})
    plain = simulate(priced, trace)
    assert "replica-hours" not in text_report(plain, plain.figures(ServiceObjective()))


@pytest.mark.parametrize("metric", ["requests", "queue", "cache", "busy"])
def test_each_metric_scales(metric):
    """A fleet under load grows by each metric, and shrinks in the quiet after it."""
    burst = [TraceRequest(0.0, 100, 40) for _ in range(40)]
    trace = RequestTrace("burst", (*burst, TraceRequest(2.0, 4, 1)))
    policy = AutoscalePolicy(1, 3, {"requests": 4.0, "queue": 2.0}.get(metric, 0.1), metric, 0.01, down=0.1, start=0.01)
    found = simulate_fleet(deployment(max_sequences=4, pages=60), trace, autoscale=policy)
    ready = [counts["ready"] for _, counts in found.timeline]
    assert max(ready) == 3
    assert ready[-1] == 1
    assert not any(one.error for one in found.results)


def test_limits_must_hold_the_replicas_of_the_start():
    trace = make_trace("poisson:10", lengths="4/1", count=2)
    with pytest.raises(DeploymentError, match="1 replicas at the start are not between min=2"):
        simulate_fleet(deployment(), trace, autoscale=AutoscalePolicy(2, 3, 1.0))


def test_the_command_shows_a_fleet(capsys, tmp_path):
    words = ["simulate", "llama3_8b", "--on", "h100:1", "--trace", "poisson:4", "--lengths", "100/20", "--no-curve"]
    words += ["--requests", "12"]
    failing = ["--replicas", "2", "--failures", "mtbf=2,repair=1,requests=retry"]
    scaled = ["--autoscale", "min=1,max=3,target=2,period=1,start=0,load=1e12", "--html", str(tmp_path / "page.html")]
    assert cli.main([*words, *failing, *scaled]) == 0
    said = capsys.readouterr().out
    assert "availability of a replica" in said
    assert "2 x h100:1x1" in said
    assert "<h2>Replicas</h2>" in (tmp_path / "page.html").read_text()
    assert cli.main([*words, *failing, "--extra-servers", "0.5"]) != 0
    assert cli.main([*words, "--replicas", "0"]) != 0
