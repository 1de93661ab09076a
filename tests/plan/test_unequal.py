"""Plans for unequal clusters: the description file, the command, and a device order that a run is given.

Searches are held to exhaustive ones by the proofs of ``tests/proofs/plan/unequal.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.formulas.memory_estimate import predict as predict_memory
from jaxllm.plan.formulas.step_time import predict
from jaxllm.plan.hardware import HardwareError
from jaxllm.plan.unequal.device_order import OrderCosts, annealed_order, best_order
from jaxllm.plan.unequal.unequal_cluster import read_cluster
from jaxllm.plan.unequal.unequal_search import search_unequal
from jaxllm.plan.unequal.unequal_view import described_plan
from jaxllm.plan.unequal.uneven_rows import share_weights
from jaxllm.plan.unequal.unit_cost import stage_unit_cost
from jaxllm.train.combinations import check_combinations
from jaxllm.train.run import Run, mesh_check
from jaxllm.train.run_model import run_model
from jaxllm.train.unequal.unequal_rows import unequal_rows
from recipes.llama3 import llama3_8b
from sharding import MeshSpec, ShardingError
from tests.train import runs

NEW = '[[group]]\nname = "new"\ndevices = "h100:2x8"\nnetwork = "fast"\n'
OLD = '[[group]]\nname = "old"\ndevices = "a100:1x8"\nnetwork = "slow"\nspeed = 0.9\nmemory = 40\n'
NETWORK = "[network]\nfast = 50e9\nslow = 12.5e9\n"
BETWEEN = "[between]\ndefault = 1.25e9\n"


def cluster_of(tmp_path, text):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return read_cluster(file)


def test_a_file_becomes_units_and_links(tmp_path):
    found = cluster_of(tmp_path, NEW + OLD + NETWORK + BETWEEN + '"new.1 old.0" = 1e9\n')
    assert [found.describe(u) for u in range(3)] == ["new.0", "new.1", "old.0"]
    assert (found.each, found.devices) == (8, 24)
    assert found.links == ((math.inf, 50e9, 1.25e9), (50e9, math.inf, 1e9), (1.25e9, 1e9, math.inf))
    assert found.groups[1].limit == int(0.92 * 40 * 2**30)


def test_nodes_of_different_sizes_are_cut(tmp_path):
    small = OLD.replace("1x8", "1x4")
    found = cluster_of(tmp_path, NEW.replace("2x8", "1x8") + small + NETWORK + BETWEEN)
    assert [found.describe(u) for u in range(3)] == ["new.0/0", "new.0/1", "old.0"]
    assert found.links[0][1] == 450e9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NEW + OLD + NETWORK, 'no bandwidth between new and old; give between.default or "new old"'),
        (NEW + OLD + NETWORK + "[between]\ndefault = 20e9\n", "a device of old has 1.25e\\+10 to other nodes at all"),
        (NEW + OLD + NETWORK + BETWEEN + '"new.2 old.0" = 1e9\n', "group 'new' has the nodes 0 to 1, not '2'"),
        (NEW + OLD + NETWORK + BETWEEN + '"new odl" = 1e9\n', "no group 'odl'. Did you mean 'old'"),
        (NEW + OLD + NETWORK + BETWEEN + '"new old" = 1e9\n"old new" = 2e9\n', "'old new' and 'new old'; give one"),
        (NEW + NEW + NETWORK.replace("slow = 12.5e9\n", "") + BETWEEN, "two groups named 'new'"),
        (NEW + OLD + NETWORK + "idle = 1e9\n" + BETWEEN, "no group is on network.idle"),
        (NEW + OLD.replace("slow", "slwo", 1) + NETWORK + BETWEEN, "Did you mean 'slow'"),
        (NEW + OLD.replace("speed", "sped") + NETWORK + BETWEEN, "Did you mean 'speed'"),
        (NEW + OLD.replace("0.9", "1.5") + NETWORK + BETWEEN, "give 1 or less"),
        (NEW + OLD.replace("40", "100") + NETWORK + BETWEEN, "a100 has 79.25; give that or less"),
        (NEW + OLD.replace("a100:1x8", "v5p:2x2x1") + NETWORK + BETWEEN, "new of GPUs, old of TPUs"),
        (NEW + "[network]\nfast = 50e9\n", "one group of equal links, which is --on h100:2x8"),
        ("[groups]\n", "Did you mean 'group'"),
        ("x = ", "is not valid TOML"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, text, says):
    with pytest.raises(HardwareError, match=says):
        cluster_of(tmp_path, text)


def test_slices_of_different_sizes_name_the_nearest(tmp_path):
    text = NEW.replace("h100:2x8", "v5e:4x4") + OLD.replace("a100:1x8", "v5e:2x4").replace("memory = 40\n", "")
    with pytest.raises(HardwareError, match="The nearest: slices of 8 devices"):
        cluster_of(tmp_path, text + NETWORK.replace("50e9", "3e9").replace("12.5e9", "2e9") + BETWEEN)
    with pytest.raises(ShardingError, match="The nearest: v5e"):
        cluster_of(tmp_path, NEW.replace("h100:2x8", "v5e:3x4") + NETWORK + BETWEEN)


def test_costs_of_equal_units_are_those_of_the_planner(tmp_path):
    """Of units of one kind, a stage is busy as long as the planner says, but for embedding, head, and slow links."""
    cluster = cluster_of(tmp_path, NEW + OLD.replace("1x8", "2x8") + NETWORK + BETWEEN)
    run, mesh = llama3_8b(), MeshSpec.parse("stage=4,fsdp=8")
    run = dataclasses.replace(run, mesh=str(mesh), accumulate=8, model=dataclasses.replace(run.model, layers=40))
    cost, as_if = stage_unit_cost(run, mesh, cluster, 0), cluster.as_if_equal(0)
    time = predict(run, as_if, mesh)
    assert 8 * (10 * cost.layer + cost.head) == pytest.approx(time.seconds - time.bubble, rel=1e-6)
    assert cost.memory(2) - cost.memory(1) == cost.memory(3) - cost.memory(2)
    assert stage_unit_cost(run, mesh, cluster, 1).layer > 2 * cost.layer


@pytest.mark.drawn(3)
def test_groups_stay_together_and_slow_units_have_fewer_layers(tmp_path):
    """Holmes: replicas of a stage are on one network, and only messages between stages cross."""
    cluster = cluster_of(tmp_path, NEW + OLD.replace("1x8", "2x8") + NETWORK + BETWEEN)
    run = dataclasses.replace(llama3_8b(), data=dataclasses.replace(llama3_8b().data, batch_size=256))
    plans = search_unequal(run, cluster).plans
    assert list(plans) == sorted(plans, key=lambda plan: plan.seconds)
    two = next(plan for plan in plans if str(plan.mesh).startswith("data=2,stage=2"))
    assert [cluster.units[u].group for u in two.order] == [1, 1, 0, 0]
    assert two.depths[0] < two.depths[1]
    assert sum(two.depths) == 32
    assert two.seconds == pytest.approx(sum(two.parts.values()))
    assert two.even is None or two.seconds < two.even
    uneven = [plan for plan in plans if plan.run.parallel.micro_batches]
    assert uneven
    assert all(sum(plan.rows) == 256 and plan.rows[0] > plan.rows[3] for plan in uneven)
    assert all(sum(plan.state) in (pytest.approx(1), 4) for plan in uneven)
    for plan in uneven:  # the run is one that training takes, and needs no more time than with equal rows
        counts = plan.run.parallel.micro_batches
        assert sum(counts) == plan.run.accumulate * 4
        rows = unequal_rows(plan.run, plan.mesh.abstract())
        assert rows is not None
        assert tuple(n * rows.each for n in counts) == plan.rows
        mesh_check(plan.run, run_model(plan.run))(plan.mesh.abstract())
        check_combinations(plan.run, dict(plan.mesh.axes))
        assert plan.even is not None
        assert plan.seconds < plan.even
        assert f"--parallel.micro-batches {' '.join(map(str, counts))}" in described_plan(1, plan, cluster)


@pytest.mark.drawn(2)
def test_small_memory_gives_shares_of_the_optimizer_state(tmp_path):
    """Cephalo: where the memory of some devices is too small, plans have shares, and runs that training takes."""
    old = OLD.replace("1x8", "2x8").replace("memory = 40", "memory = 20")
    cluster = cluster_of(tmp_path, NEW + old + NETWORK + BETWEEN)
    run = dataclasses.replace(llama3_8b(), data=dataclasses.replace(llama3_8b().data, batch_size=32))
    shared = [plan for plan in search_unequal(run, cluster).plans if plan.run.parallel.state_shares]
    assert shared
    for plan in shared:
        shares = plan.run.parallel.state_shares
        assert plan.even is None
        assert plan.state == tuple(one / sum(shares) for one in shares)
        assert all(
            size <= cluster.groups[unit.group].limit for size, unit in zip(plan.memory, cluster.units, strict=True)
        )
        assert plan.seconds == pytest.approx(sum(plan.parts.values()))
        mesh_check(plan.run, run_model(plan.run))(plan.mesh.abstract())
        check_combinations(plan.run, dict(plan.mesh.axes))
        said = described_plan(1, plan, cluster)
        assert f"--parallel.state-shares {' '.join(map(str, shares))}" in said
        # The estimate of the run itself is that of the device which holds most.
        topology = cluster.as_if_equal(0).topology
        largest = predict_memory(plan.run, plan.mesh, topology).optimizer
        even = dataclasses.replace(plan.run, parallel=dataclasses.replace(plan.run.parallel, state_shares=()))
        assert largest == pytest.approx(max(plan.state) * predict_memory(even, plan.mesh, topology).optimizer, rel=1e-6)


def test_weights_of_shares_fit_and_are_small():
    assert share_weights([1.0, 1.0], 1.0) == (1, 1)
    assert share_weights([3.0, 1.0], 4.0) == (3, 1)
    assert share_weights([10.0, 10.0, 10.0, 0.5], 4.0) == (3, 3, 3, 1)
    assert share_weights([1.0, 1.0], 2.1) is None
    assert share_weights([10.0, 1e-3], 4.0) is None  # room for less than the smallest weight


def test_annealing_finds_the_clusters_of_many_units():
    """Sixteen units in two interleaved clusters: the slow link is crossed once, the fewest there are."""
    links = tuple(tuple(math.inf if a == b else 10.0 if a % 2 == b % 2 else 0.5 for b in range(16)) for a in range(16))
    costs = OrderCosts(16, 1, (1.0,) * 16, (0.0,) * 16, 1.0, 0.0, 0.0, 0.0, links, 32, 2, 4)
    found = annealed_order(costs)
    assert found is not None
    assert found == best_order(costs)
    assert sum(a % 2 != b % 2 for a, b in itertools.pairwise(found.order)) == 1


@pytest.mark.drawn(2)
def test_the_command_ranks_saves_and_refuses(tmp_path, capsys):
    file, recipe, saved = tmp_path / "cluster.toml", tmp_path / "planned.py", tmp_path / "plans.json"
    file.write_text(NEW + OLD.replace("1x8", "2x8") + NETWORK + BETWEEN)
    argv = ["plan", "llama3_8b", "--on", str(file), "--model.layers", "7"]
    assert cli.main([*argv, "--data.batch-size", "32"]) == 0
    assert "--parallel.micro-batches 3 3 1 1" in capsys.readouterr().out
    argv = [*argv, "--data.batch-size", "8"]  # too few rows for replicas of several micro-batches
    assert cli.main([*argv, "--explain", "1", "--save", str(recipe), "--json", str(saved)]) == 0
    said, plans = capsys.readouterr().out, json.loads(saved.read_text())
    assert "device order: " in said
    assert "non-dominated splits" in said
    assert f"saved: {recipe}:llama3_8b_cluster" in said
    assert plans[0]["predicted"]["seconds"] == pytest.approx(sum(plans[0]["predicted"]["parts"].values()))
    assert str(tuple(plans[0]["device_order"])) in recipe.read_text().replace("[", "(").replace("]", ")")
    assert cli.main([*argv, "--tokens", "1e9"]) == 2
    assert "--tokens: it is for equal devices" in capsys.readouterr().err
    assert cli.main([*argv, "--model.layers", "320"]) == 1
    assert "the smallest memory counts" in capsys.readouterr().out


def test_devices_are_in_the_order_given():
    devices = jax.devices()[:8]
    mesh = MeshSpec.parse("data=2,stage=2,fsdp=2").build(devices, (2, 0, 3, 1))
    assert [device.id for device in mesh.devices.flat] == [4, 5, 0, 1, 6, 7, 2, 3]
    with pytest.raises(ShardingError, match="each number from 0 to 2 once"):
        mesh = MeshSpec.parse("fsdp=8").build(devices, (2, 0, 2))
    with pytest.raises(ShardingError, match="whose first axes multiply to 2, 8"):
        MeshSpec.parse("data=2,fsdp=4").build(devices, (2, 0, 3, 1))


def test_a_run_takes_the_order_and_says_what_does_not_go_with_it(tmp_path):
    config = runs.run_config(tmp_path, mesh="data=4,fsdp=2", device_order=(3, 1, 0, 2))
    run = Run(config)
    assert np.array_equal([d.id for d in run.mesh.devices[:, 0]], [6, 2, 0, 4])
    for other in (
        {"parallel": ParallelConfig(zero="3level")},
        {"parallel": ParallelConfig(reduce="two_level")},
        {"elastic": dataclasses.replace(config.elastic, enabled=True)},
    ):
        with pytest.raises(ConfigError, match="device_order"):
            check_combinations(dataclasses.replace(config, **other), {"data": 2, "local": 2, "fsdp": 2})
