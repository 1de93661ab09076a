"""Remat solver with the host's memory: nothing is faster, both budgets are kept, copies count where exposed."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from jaxllm.cli.recipe_arguments import configure, find_recipe
from jaxllm.data import DataConfig
from jaxllm.models import MlpConfig
from jaxllm.models.remat import RematError, moved_values, offloaded_share, policies_by_layer
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.remat_solver import (
    HOSTED,
    LOOPS,
    NAMED,
    SHARE,
    HostTier,
    LayerCost,
    RematCandidate,
    StepBytes,
    hidden_share,
    solve,
    solve_policies,
)
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import train_flops_per_token
from sharding import MeshSpec
from tests import tiny
from tests.plan.test_recompute import SINGLE, bytes_of_layer

NAMES = (*HOSTED, *NAMED)
HOST = {"offload:0": 40, "offload": 110, "full": 0, "attention": 0, "elementwise": 0, "none": 0}
BASE, STREAM = 1000, 70 * 16 / 144


def fastest_is_found(seed: int) -> float:
    """Time of the solution over that of the fastest of all assignments, less 1; one segment or two."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 7))
    split = int(rng.integers(0, layers - 1))
    model = tiny.decoder(layers=layers)
    other = dataclasses.replace(model.pattern[0], mlp=MlpConfig(hidden=8))
    model = dataclasses.replace(model, prefix=(other,) * split)
    segments, forward = model.segments, float(rng.uniform(1, 10))
    layer = {
        name: LayerCost(
            float(rng.normal(0, 50)), float(rng.uniform(0, 90)) * (name in HOSTED), list(rng.uniform(0, 3, 2))
        )
        for name in NAMES
    }
    tier = HostTier(int(rng.uniform(0, 400)), float(rng.uniform(0, 0.4)), float(rng.uniform(0.1, 2)))
    room = float(rng.normal(0, 200))

    def total(counts: list[list[tuple[str, int]]]) -> tuple[float, float, float]:
        device, host, again = (
            sum(n * part(name, s) for s, row in enumerate(counts) for name, n in row)
            for part in (
                lambda name, s: len(segments[s][0]) * layer[name].device,
                lambda name, s: len(segments[s][0]) * layer[name].host,
                lambda name, s: layer[name].flops[s],
            )
        )
        return device, host, again * tier.seconds_per_flop + tier.exposed(host, forward, 2 * forward + again)

    ways = [
        [
            [(name, names.count(name)) for name in NAMES if name in names]
            for names in itertools.combinations_with_replacement(NAMES, n)
            if len(set(names)) <= LOOPS
        ]
        for _, n in segments
    ]
    legal = [
        seconds
        for way in itertools.product(*ways)
        for device, host, seconds in [total(list(way))]
        if device <= room and host <= tier.bytes
    ]
    found = solve_policies(model, layer, room, tier, forward)
    if found is None:
        assert not legal
        return 0.0
    device, host, seconds = total(found)
    assert device <= room + 1e-6
    assert host <= tier.bytes + 1e-6
    assert [sum(n for _, n in row) for row in found] == [n for _, n in segments]
    return seconds / min(legal) - 1


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_faster(seed):
    assert fastest_is_found(seed) < 1e-5


def config(layers: int) -> RunConfig:
    return RunConfig(model=tiny.decoder(layers=layers), data=DataConfig(seq_len=64))


def measure_of(run: RunConfig):
    def measure(remat: str) -> StepBytes:
        device = host = 0.0
        for name in policies_by_layer(remat, run.model.segments):
            if (share := offloaded_share(name)) is not None:
                device, host = device - 20, host + 40 + 70 * share
            else:
                own = {"input": STREAM, **SINGLE}
                there = sum(own[value] for value in moved_values(name))
                device += bytes_of_layer(name) - there
                host += there
        return StepBytes(round(BASE + device), round(host))

    return measure


def test_layers_move_to_the_host_where_copies_are_hidden():
    """A budget below that of full remat; a fast link hides all copies, a slow one makes recomputation cheaper."""
    run, found = config(8), []
    for seconds_per_byte in (0.0, 1e-5):
        solved = solve(run, BASE - 50, measure_of(run), HostTier(900, seconds_per_byte, 1e-9))
        assert solved.chosen.bytes <= BASE - 50
        layers = policies_by_layer(solved.remat, run.model.segments)
        assert any("input" in moved_values(name) or offloaded_share(name) is not None for name in layers)
        assert (solved.chosen.exposed == 0) == (seconds_per_byte == 0)
        found.append(solved.chosen)
    fast, slow = found
    assert slow.host < fast.host, "a slow link takes the inputs of layers alone"
    assert slow.flops > fast.flops == solved.named["elementwise"].flops
    with pytest.raises(RematError, match=r"at least 0.000 by any policy.*with 0.000 GiB of the host"):
        solve(run, BASE - 50, measure_of(run), HostTier(30, 0.0, 1e-9))
    with pytest.raises(RematError, match="with every block computed again"):
        solve(run, BASE - 50, measure_of(run))


def test_a_share_of_the_tokens_moves_where_all_of_them_do_not_fit():
    """MEMO's share: the most, by sixteenths, that the host holds and a forward pass hides."""
    run = config(8)
    measure, room = measure_of(run), 8 * (40 + 70 / 4)
    solved = solve(run, BASE - 150, measure, HostTier(int(room), 0.0, 1e-9))
    assert solved.remat == "offload:0.25"
    assert solved.chosen.host == room
    assert solved.chosen.flops < solved.named["offload:0"].flops

    rng = np.random.default_rng(0)
    for _ in range(50):
        none, whole = (RematCandidate(0, 0.0, int(bytes_)) for bytes_ in sorted(rng.integers(0, 1000, 2)))
        tier = HostTier(int(rng.integers(0, 1000)), float(rng.uniform(0, 2)), 1.0)
        forward = float(rng.uniform(0, 1000))
        fit = [
            share
            for share in np.arange(0, 1.01, SHARE)
            for there in [none.host + share * (whole.host - none.host)]
            if there <= tier.bytes and there * tier.seconds_per_byte <= forward
        ]
        assert hidden_share(none, whole, tier, forward) == (0.0 if not fit or fit[-1] == 1 else fit[-1])


def test_the_tier_of_a_cluster():
    run = dataclasses.replace(config(2), data=DataConfig(seq_len=64, batch_size=8))
    tier = HostTier.of(run, Cluster.parse("v5e:2x2"), MeshSpec.parse("fsdp=4"), 2**30)
    assert tier.bytes == 2**30
    assert tier.seconds_per_byte == 1 / Cluster.parse("v5e:2x2").hardware.host
    assert tier.exposed(0.0, 1.0, 2.0) == 0
    assert tier.exposed(1.0, 0.0, 0.0) == 2 * tier.seconds_per_byte


def test_a_row_of_a_million_tokens_moves_the_share_that_the_host_holds():
    """Llama 3 8B on eight H200, a row of 2^20 tokens over context, by hand. Its attention takes so long that it hides
    the copies of more than 250 GiB, so the host's memory decides; for short rows the link does."""
    cluster, mesh, layers, tokens = Cluster.parse("h200:1x8"), MeshSpec.parse("context=8"), 32, 2**20 // 8
    numbers = {"offload:0": 2 * 4096 + 4096, "offload": 3 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14336}
    recipe = configure(find_recipe("llama3_8b"), [])

    def share(length: int, limit: float) -> tuple[float, HostTier]:
        run = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, seq_len=length, batch_size=1))
        tier = HostTier.of(run, cluster, mesh, int(limit))
        none, whole = (
            RematCandidate(0, 0.0, numbers[name] * 2 * length // 8 * layers) for name in ("offload:0", "offload")
        )
        return hidden_share(none, whole, tier, train_flops_per_token(run.model, length) / 3), tier

    long, tier = share(2**20, 250 * 2**30)
    of_token = 2 * tokens * layers
    held = (250 * 2**30 / of_token - numbers["offload:0"]) / (numbers["offload"] - numbers["offload:0"])
    assert long == math.floor(held / SHARE) * SHARE == 0.5
    assert train_flops_per_token(recipe.model, 2**20) / 3 * tier.seconds_per_flop / tier.seconds_per_byte > 250 * 2**30
    assert share(2**20, 60 * 2**30)[0] == 0  # less than the layers' inputs and results of attention
    assert share(2**20, 500 * 2**30)[0] == 0  # all of it: no share
    short, _ = share(2**13, 250 * 2**30)
    assert short < long
