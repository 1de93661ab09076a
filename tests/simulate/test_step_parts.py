"""Parts of a serving step: the makespan is the longest path of its operations; the best parts those of a search."""

from __future__ import annotations

import functools

import pytest

from jaxllm.models import DecoderConfig
from jaxllm.plan.formulas.serving_step import BatchWork, ServingStepModel
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate.step_parts import best_parts, cuts, makespan, parted_step
from sharding import MeshSpec
from tests import tiny


def longest_path(compute, network, sublayers):
    """Seconds of the longest chain of operations, each of which waits for those that it needs and for its resource."""
    parts = len(compute)

    @functools.cache
    def ends(kind: str, turn: int) -> float:
        if turn < 0:
            return 0.0
        part = turn % parts
        if kind == "device":
            return max(ends("device", turn - 1), ends("links", turn - parts)) + compute[part]
        return max(ends("links", turn - 1), ends("device", turn)) + network[part]

    return max(ends("links", sublayers * parts - 1 - part) for part in range(parts))


def model_of(config: DecoderConfig, name: str = "h100:1x4") -> ServingStepModel:
    return ServingStepModel(config, Cluster.parse(name), MeshSpec.parse("tensor=4"))


def test_makespan_is_the_longest_path(rng):
    for _ in range(200):
        parts, sublayers = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        compute, network = rng.random(parts).tolist(), (rng.random(parts) * rng.choice([0, 0.3, 3])).tolist()
        assert makespan(compute, network, sublayers) == pytest.approx(longest_path(compute, network, sublayers))
        assert makespan(compute, [0.0] * parts, sublayers) == pytest.approx(sum(compute) * sublayers)


def test_the_best_parts_are_the_best_of_all_cuts():
    config = tiny.decoder(layers=3, heads=8, kv_heads=4, head_dim=64, embed_dim=512, vocab_size=64)
    model, found = model_of(config), {}
    for first in range(1, 9):
        for second in range(9 - first):
            for third in range(9 - first - second):
                fourth = 8 - first - second - third
                sizes = [512 * one for one in (first, second, third, fourth) if one]
                costs, at = [], 0
                for size in sizes:
                    costs.append(model.step([BatchWork.of([at], [size])], size, 0))
                    at += size
                compute = [(c.compute + c.memory + c.launch) / 6 for c in costs]
                found[tuple(sizes)] = longest_path(compute, [c.network / 6 for c in costs], 6)
    assert set(cuts(4096, 4, 8)) == set(found)
    best = best_parts(model, 4096)
    assert best.seconds == pytest.approx(min(found.values()))
    assert found[best.sizes] == pytest.approx(best.seconds)
    whole = parted_step(model, [4096])
    assert whole.seconds == pytest.approx(model.step([BatchWork.of([0], [4096])], 4096, 0).seconds)
    with pytest.raises(ValueError, match="rows = 4 in up to 4 parts; give 8 rows or more"):
        best_parts(model, 4)
