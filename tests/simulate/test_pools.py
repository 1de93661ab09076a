"""Disaggregated pools: tokens, bytes and times of transfers, and the placement of pools."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxllm import cli
from jaxllm.files import read_json
from jaxllm.models import AttentionConfig, BlockConfig, MlpConfig
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import DeploymentError, RequestTrace, ServiceObjective, TraceRequest, make_trace
from jaxllm.simulate.pools import DisaggregatedPools, simulate_pools
from jaxllm.simulate.power import PowerModel
from jaxllm.simulate.search.pool_search import (
    colocated,
    first_tokens_met,
    mixed_splits,
    place,
    pool_splits,
    provision,
    share_met,
    spent,
)
from tests.simulate.served import MODEL, deployment


def pools(**sizes) -> DisaggregatedPools:
    one = deployment(**sizes)
    return DisaggregatedPools(one, one)


@pytest.mark.drawn(1)
def test_phases_are_apart_and_tokens_are_conserved():
    trace = make_trace("poisson:400", lengths="100/20", count=30)
    found = simulate_pools(pools(), trace)
    assert [one.result.tokens for one in found.requests] == [20] * 30
    assert sum(n for own in found.prefill for s in own for one in s.chunks for _, n in one) == 30 * 100
    assert sum(n for own in found.decode for s in own for one in s.chunks for _, n in one) == 30 * 19
    assert all(count == 1 for own in found.decode for s in own for one in s.chunks for _, count in one)
    assert all(start >= 100 for own in found.decode for s in own for one in s.chunks for start, _ in one)


def test_transfers_are_the_kv_cache_over_the_link():
    """Seven pages of 16 tokens for a prompt of 100, one after the other over a link of 10 MB/s."""
    trace = make_trace("closed:3", lengths="100/20", count=3)
    trace = RequestTrace("at once", trace.requests)
    found = simulate_pools(dataclasses.replace(pools(), link=1e7), trace)
    size = 7 * 16 * 4 * 2 * 4 * 32 * 2  # tokens x layers x (keys, values) x heads x head dim x bytes
    assert [round(b) for *_, b in found.transfers] == [size] * 3
    ordered = sorted(found.transfers)
    assert all(end - start == pytest.approx(size / 1e7) for start, end, _ in ordered)
    assert all(after[0] >= before[1] - 1e-12 for before, after in itertools.pairwise(ordered))
    for one in found.requests:
        assert one.result.chunks[1] - one.result.chunks[0] > size / 1e7


def test_figures_are_of_both_pools(tmp_path, capsys):
    """By hand: energy of each pool with idling, price of both, requests and transfers as they were simulated."""
    priced = dataclasses.replace(Cluster.parse("h100:1x1").hardware, dollars_per_hour=2.0)
    one = dataclasses.replace(deployment(), cluster=Cluster("h100:1x1", priced, Cluster.parse("h100:1x1").topology))
    both, trace = DisaggregatedPools(one, one), make_trace("poisson:400", lengths="100/20", count=30)
    found, slo, power = simulate_pools(both, trace), ServiceObjective(), PowerModel()
    figures = found.figures(slo)
    each = [
        one.joules([step.cost for own in engines for step in own], found.seconds, power)
        for engines in (found.prefill, found.decode)
    ]
    assert None not in each
    assert figures["joules_per_token"] == pytest.approx(sum(filter(None, each)) / 600)
    assert figures["dollars_per_million_tokens"] == pytest.approx(4.0 * found.seconds / 3600 / 600 * 1e6)
    assert (figures["devices"], both.where) == (2, "2 x h100")
    assert figures["transferred_bytes"] == sum(size for *_, size in found.transfers)
    assert list(found.shown.values()) == [0, 1]
    file, page = tmp_path / "found.json", tmp_path / "page.html"
    argv = ["simulate", "llama3_8b", "--on", "h100:4", "--trace", "sharegpt:20", "--requests", "20", "--no-curve"]
    pools_of = [*argv, "--pools", "prefill=tensor:1 x2, decode=tensor:2", "--max-len", "4096"]
    assert cli.main([*pools_of, "--json", str(file), "--html", str(page)]) == 0
    assert "KV cache sent to decode engines" in capsys.readouterr().out
    assert read_json(file)["transferred_bytes"] > 0
    assert "Batches of a decode engine" in page.read_text()
    for wrong, said in (
        (["--pools", "prefill=tensor:1, decode=tensor:2"], "give as many"),
        (["--pools", "prefill=tensor:2, decode=tensor:2", "--overlap", "nano"], "leave it out"),
        (["--pools", "prefill=tensor:2, decode=tensor:2", "--router", "all"], "leave --router"),
        (["--lengths", "code"], "says its lengths"),
    ):
        assert cli.main([*argv, *wrong]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_windows_send_only_what_decode_reads():
    blocks = (BlockConfig(AttentionConfig(8, 4, 32, window=32), MlpConfig(64)),)
    near = pools(model=dataclasses.replace(MODEL, pattern=blocks))
    assert near.transfer_bytes(400) == near.transfer_bytes(208) < pools().transfer_bytes(208)


def test_decode_is_not_delayed_by_prompts():
    """Long prompts beside decoding sequences: no decode step is longer than in a pool that only decodes."""
    requests = (TraceRequest(0.0, 32, 60), *(TraceRequest(1e-3 * n, 480, 2) for n in range(1, 8)))
    trace = RequestTrace("interference", requests)
    apart = simulate_pools(pools(), trace)
    assert apart.requests[0].result.tpot < 1.5 * min(s.cost.seconds for s in apart.decode[0])


def test_a_request_of_one_token_needs_no_decode():
    found = simulate_pools(pools(), make_trace("poisson:100", lengths="64/1", count=4))
    assert not found.transfers
    assert not found.decode[0]
    assert all(one.result.tokens == 1 for one in found.requests)


def test_pools_that_do_not_fit_each_other_are_refused():
    with pytest.raises(DeploymentError, match="one format"):
        DisaggregatedPools(deployment(), deployment(kv_dtype="int8"))
    with pytest.raises(DeploymentError, match="max_len = 700"):
        simulate_pools(pools(), make_trace("poisson:1", lengths="600/100", count=2))


def test_splits_use_all_devices():
    found = list(pool_splits(deployment("h100:1x4")))
    assert {(p.prefill.devices, p.prefill.engines, p.decode.devices, p.decode.engines) for p in found} == {
        (1, 1, 3, 3), (2, 2, 2, 2), (3, 3, 1, 1), (2, 1, 2, 1), (2, 1, 2, 2), (2, 2, 2, 1),
    }  # fmt: skip
    assert [one.engines for one in colocated(deployment("h100:1x4"))] == [4, 2, 1]


@pytest.mark.drawn(1)
def test_placements_are_by_goodput_per_device():
    trace = make_trace("uniform:200", lengths="100/4", count=6)
    ways = [pools(), next(colocated(deployment()))]
    slo = ServiceObjective(0.05, 0.01)
    found, pruned = (place(ways, trace, slo, tolerance=0.5, prune=prune) for prune in (False, True))
    assert sorted(one.placement.devices for one in found) == [1, 2]
    assert pruned == found[: len(pruned)]
    assert found[0].goodput_per_device >= found[1].goodput_per_device > 0


def priced(**dollars: float):
    return [dataclasses.replace(Cluster.parse(f"{name}:1x1").hardware, dollars_per_hour=price)
            for name, price in dollars.items()]  # fmt: skip


def test_prefill_alone_bounds_pools_with_it():
    """First tokens are the prefill pool's own, so no decode pool makes more requests meet the objective."""
    trace = make_trace("bursty:2000", lengths="100/6", count=24)
    one = pools()
    for ttft in (0.001, 0.002, 0.004):
        slo = ServiceObjective(ttft, 1.0)
        assert first_tokens_met(one.prefill, trace, slo) == share_met(one, trace, slo)
        assert share_met(one, trace, ServiceObjective(ttft, 2e-4)) <= first_tokens_met(one.prefill, trace, slo)


def test_mixed_splits_are_of_one_kind_or_two():
    found = list(mixed_splits(deployment(), priced(h100=2.0, a100=1.0), most=2))
    kinds = [tuple(part.cluster.hardware.name for part in (one.prefill, one.decode))
             if isinstance(one, DisaggregatedPools) else (one.cluster.hardware.name,) for one in found]  # fmt: skip
    assert len(found) == 2 * 3 + 4
    assert set(kinds) == {("h100",), ("a100",), *itertools.product(("h100", "a100"), repeat=2)}
    assert all(one.devices <= 2 for one in found)


@pytest.mark.drawn(1)
def test_the_cheapest_pools_are_those_of_all():
    trace = make_trace("poisson:3000", lengths="100/6", count=16)
    ways = list(mixed_splits(deployment(), priced(h100=2.0, a100=1.1), most=3))
    slo = ServiceObjective(0.002, 2.5e-4)
    for spending in ("cost", "power"):
        found = provision(ways, trace, slo, spending)
        enough = [spent(one, spending) for one in ways if share_met(one, trace, slo) >= slo.share]
        assert (found and found[1]) == min(enough, default=None)
        assert found is None or share_met(found[0], trace, slo) >= slo.share
    with pytest.raises(DeploymentError, match="v6e has no watts"):
        provision([deployment("v6e:1x1")], trace, slo, "power")
    with pytest.raises(DeploymentError, match="h100 has no price"):
        provision([deployment()], trace, slo, "cost")
