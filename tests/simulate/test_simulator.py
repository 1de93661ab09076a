"""Serving simulator: the engine's steps, conservation of tokens, closed loops, routers, and error messages."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxllm import cli
from jaxllm.infer.runner.runner_protocol import Runner
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import (
    Deployment,
    DeploymentError,
    RequestTrace,
    ServiceObjective,
    TraceRequest,
    make_trace,
    simulate,
)
from jaxllm.simulate.request_trace import LENGTHS, draw_lengths, token_ids
from jaxllm.simulate.simulator import SimulatedEngine, best_rate, rate_curve
from recipes.llama3 import llama3_70b
from sharding import MeshSpec
from tests.infer import traces
from tests.simulate.served import deployment, seconds


def recorded(runner: type) -> type:
    """Runner that records its chunks, as ``SimulatedStep.chunks`` has them."""

    class Recorded(runner):
        chunks: list

        def run(self, shape, packed, masks=None):
            x = shape.inputs.views(packed[0])
            rows = zip(x["kv_lens"], np.diff(x["starts"]), x["slots"], strict=True)
            found = [(int(length - count), int(count)) for length, count, slot in rows if slot < shape.slots and count]
            self.__dict__.setdefault("chunks", []).append(found)
            return super().run(shape, packed, masks) if masks is not None else super().run(shape, packed)

    return Recorded


def test_steps_are_those_of_an_engine_that_computes(rng, monkeypatch):
    """Every step of an overloaded engine whose runner computes real tokens, and the times of all requests."""
    arrivals = traces.overload(rng, 40)
    monkeypatch.setattr(traces, "Timed", recorded(traces.Timed))
    runner: Any = traces.play(arrivals, config=traces.SIZES)[1]
    sizes = {name: getattr(traces.SIZES, name) for name in traces.SIZES.__dataclass_fields__}
    trace = RequestTrace("overload", tuple(TraceRequest(a.at, len(a.prompt), a.tokens) for a in arrivals))
    found = simulate(deployment(**sizes), trace, clock=seconds(traces.BASE, traces.SLOPE))
    (steps,) = found.engines
    assert [step.chunks[0] for step in steps] == runner.chunks
    assert [r.chunks[0] for r in found.results] == pytest.approx([a.first for a in arrivals])
    assert [r.end for r in found.results] == pytest.approx([a.last for a in arrivals])


def test_a_paper_runner_is_a_runner():
    assert isinstance(SimulatedEngine(deployment()).runner, Runner)


def test_tokens_are_conserved(rng):
    """Tokens computed are those of prompts and completions, less the last of each and what the prefix cache has."""
    trace = make_trace("poisson:400", lengths="200/30", count=30, seed=3, prefixes=3, prefix_tokens=64)
    found = simulate(deployment(), trace)
    computed = sum(n for own in found.engines for step in own for one in step.chunks for _, n in one)
    assert found.preemptions == 0
    assert found.hit_tokens > 30 * 64 * 0.5, "most requests find their prefix"
    assert computed + found.hit_tokens == sum(one.prompt + one.tokens - 1 for one in trace.requests)
    assert [one.result.tokens for one in found.requests] == [one.tokens for one in trace.requests]


def test_a_pool_that_is_too_small_preempts():
    trace = make_trace("closed:16", lengths="60/100", count=16)
    roomy, tight = (simulate(deployment(pages=pages), trace) for pages in (600, 40))
    assert (roomy.preemptions, tight.preemptions > 0) == (0, True)
    assert tight.seconds > roomy.seconds
    swapped = simulate(deployment(pages=40, preemption="swap"), trace)
    assert swapped.preemptions > 0
    assert swapped.seconds != tight.seconds


def test_a_closed_loop_has_as_many_requests_as_clients():
    found = simulate(deployment(), make_trace("closed:5", lengths="40/20", count=23))
    events = sorted([(r.sent, 1) for r in found.results] + [(r.end, -1) for r in found.results])
    assert max(np.cumsum([n for _, n in events])) == 5
    assert all(r.end > r.sent for r in found.results)


def test_several_engines_serve_faster():
    trace = make_trace("poisson:200", lengths="100/20", count=40)
    one, two = (simulate(deployment(f"h100:1x{n}"), trace, clock=seconds(0.01)) for n in (1, 2))
    assert {r.engine for r in two.requests} == {0, 1}
    assert two.seconds < one.seconds


def test_replicas_of_an_engine_share_its_steps():
    found = simulate(deployment("h100:1x2", "data=2"), make_trace("closed:8", lengths="40/20", count=16))
    assert {len(step.chunks) for step in found.engines[0]} == {2}
    assert all(r.tokens == 20 for r in found.results)


def test_decode_loops_take_the_time_of_their_steps():
    """Eight tokens a step: as long as eight steps, within the growth of the context."""
    trace = make_trace("closed:4", lengths="32/65", count=4)
    one, eight = (simulate(deployment(decode_steps=n), trace) for n in (1, 8))
    assert len(eight.engines[0]) < len(one.engines[0]) / 4
    assert eight.seconds == pytest.approx(one.seconds, rel=1e-3)


def test_a_slower_clock_is_a_slower_service():
    trace = make_trace("poisson:50", lengths="64/16", count=40)
    slo = ServiceObjective(0.1, 0.02)
    fast, slow = (simulate(deployment(), trace, clock=seconds(t)).figures(slo) for t in (0.005, 0.05))
    assert slow["ttft"]["p50"] > fast["ttft"]["p50"]
    assert (fast["within_slo"], slow["within_slo"]) == (1.0, 0.0)


def test_cost_and_energy_need_price_and_watts():
    trace = make_trace("closed:4", lengths="32/16", count=8)
    tpu, gpu = (simulate(deployment(on), trace).figures(ServiceObjective()) for on in ("v6e:1x1", "h100:1x1"))
    dollars = 2.70 / 3600 * tpu["seconds"] / (8 * 16) * 1e6
    assert tpu["dollars_per_million_tokens"] == pytest.approx(dollars)
    assert (tpu["joules_per_token"], gpu["dollars_per_million_tokens"]) == (None, None)
    assert 0.15 * 700 * gpu["seconds"] < gpu["joules_per_token"] * 8 * 16 < 700 * gpu["seconds"]


def test_the_best_rate_is_found():
    assert best_rate(lambda rate: float(rate < 7), 0.9, 1, 2, 0.01) == pytest.approx(7, rel=0.02)
    assert best_rate(lambda rate: 0.0, 0.9, 1, 2) == 0.0
    assert best_rate(lambda rate: 1.0, 0.9, 1, 2) > 1000


def test_the_knee_is_where_a_queue_would_build():
    """A step of 16 sequences takes 10 ms, so 160 requests of ten tokens a second keep every slot busy."""
    trace = make_trace("uniform:40", lengths="4/10", count=30)
    slo = ServiceObjective(0.2, 0.05)
    knee, tried = rate_curve(lambda one: simulate(deployment(), one, clock=seconds(0.01)), trace, slo)
    assert 120 < knee < 260
    assert [rate for rate, _ in tried] == sorted(rate for rate, _ in tried)
    assert all((one["within_slo"] >= 0.9) == (rate <= knee) for rate, one in tried)


def test_named_lengths_have_their_published_means(rng):
    drawn = draw_lengths("sharegpt", 40_000, rng)
    assert drawn.mean(axis=0) == pytest.approx([161.31, 337.99], rel=0.03)
    assert np.median(draw_lengths("code", 40_000, rng), axis=0) == pytest.approx([1500, 13], rel=0.03)
    assert all(one.source for one in LENGTHS.values())


def test_prompts_share_their_prefix_and_nothing_else():
    requests = [TraceRequest(0.0, 6, 1, prefix, 3) for prefix in ("a", "b", "a")] + [TraceRequest(0.0, 6, 1)]
    names: dict[str, int] = {}
    ids = [token_ids(requests, n, names) for n in range(4)]
    assert ids[0][:3] == ids[2][:3]
    assert len({tuple(one[:3]) for one in ids}) == 3
    assert len({tuple(one) for one in ids}) == 4


def test_rates_stretch_a_trace():
    trace = make_trace("poisson:4", count=50)
    faster = trace.at_rate(16.0, seconds=10.0)
    assert faster.rate == pytest.approx(16.0, rel=0.02)
    assert faster.requests[-1].at >= 9
    with pytest.raises(ValueError, match="no arrival rate"):
        make_trace("closed:4", count=5).at_rate(1.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("poison:4", "Did you mean 'poisson'"),
        ("poisson:-1", "NUMBER above 0"),
        ("none.jsonl", "No such file"),
    ],
)
def test_malformed_traces_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        make_trace(text)


def test_a_malformed_line_is_named(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at": 0, "prompt": "some text here", "max_tokens": 3}\n{"at": 1, "max_tokens": 3}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl:2: .*prompt_tokens"):
        make_trace(str(file))
    file.write_text(file.read_text().splitlines()[0])
    assert make_trace(str(file)).requests == (TraceRequest(0.0, 4, 3),)


def test_what_does_not_fit_is_said(capsys):
    model = llama3_70b().model
    with pytest.raises(DeploymentError, match=r"needs 13\d\.\d GiB for weights .* Give more devices"):
        _ = Deployment(model, Cluster.parse("h100:1x1"), MeshSpec.parse("tensor=1"), longest=8192).spec
    with pytest.raises(DeploymentError, match="do not divide"):
        deployment("h100:1x8", "tensor=3")
    with pytest.raises(DeploymentError, match="max_len = 700"):
        simulate(deployment(), make_trace("poisson:1", lengths="600/100", count=2))
    with pytest.raises(ValueError, match="legal: ttft=SECONDS"):
        ServiceObjective.parse("tfft=1")
    assert cli.main(["simulate", "llama3_70b", "--on", "h100:1"]) == 2
    assert "Give more devices" in capsys.readouterr().err
    assert cli.main(["plan", "quickstart", "--serve", "--on", "v6e:1x1", "--requests", "2", "--goal", "energy"]) == 2
    assert "no watts are known for v6e" in capsys.readouterr().err


def test_the_command_reports(tmp_path, capsys):
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    argv = [
        "simulate",
        "quickstart",
        "--on",
        "h100:2",
        "--mesh",
        "tensor=1",
        "--trace",
        "poisson:400",
        "--lengths",
        "60/16",
    ]
    argv += ["--requests", "8", "--price", "h100=2", "--no-curve", "--html", str(page), "--json", str(figures)]
    assert cli.main(argv) == 0
    said, found = capsys.readouterr().out, json.loads(figures.read_text())
    assert "2 x one device, bfloat16 on h100:1x2" in said
    assert f"{found['dollars_per_million_tokens']:,.2f}" in said
    assert found["requests"] == 8
    assert page.read_text().count("<svg") == 7
    assert cli.main(["simulate", "nothing", "--on", "h100:2"]) == 2
    assert "Legal: a recipe" in capsys.readouterr().err
    assert cli.main([*argv[:4], "--price", "h9=2", "--trace", "poisson:1"]) == 2
    assert "kinds: v4" in capsys.readouterr().err
