"""What streamed layers save and where, against all choices; its bytes and seconds are those of the plan."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.plan.capacity_table import FileTraffic, disk_seconds, file_traffic, run_kinds
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.tiers.limited_step import MovedBytes, limited_step
from jaxllm.plan.tiers.saved_choice import PolicyCost, SavedRoom, fastest, policy_costs, saved_choice
from jaxllm.train import RunConfig
from jaxllm.train.config import DataConfig
from jaxllm.train.disk.config import DiskConfig
from sharding import MeshSpec

ON = Cluster.parse("h100:1x8")
MESH = MeshSpec.parse("fsdp=8")


def drawn_costs(rng: random.Random, units: int) -> dict[str, PolicyCost]:
    """Costs of policies of which each saves more than "full", and computes less again."""
    least, most = [rng.randint(1, 9) for _ in range(units)], [float(rng.randint(5, 30)) for _ in range(units)]
    costs = {"full": PolicyCost(tuple(least), tuple(most))}
    for number in range(rng.randint(0, 4)):
        saved = tuple(one + rng.randint(0, 12) for one in least)
        costs[f"policy {number}"] = PolicyCost(saved, tuple(flops * rng.random() for flops in most))
    return costs


def compared(seed: int) -> None:
    """Drawn costs, windows, micro-batches, rates and rooms: the choice against all policies of all units of which at
    most one is not "full" and has the first or the last units, with all numbers of units in files."""
    rng = random.Random(seed)
    units, micros, window = rng.randint(1, 6), rng.randint(1, 3), rng.randint(2, 5)
    costs = drawn_costs(rng, units)
    room = SavedRoom(rng.randint(0, 60 * micros), rng.choice([0, rng.randint(0, 90 * micros)]), 0)
    rates = dataclasses.replace(
        ON.hardware, disk=rng.uniform(0.2, 4), disk_write=rng.choice([None, 1.0]), host=rng.uniform(0.5, 9)
    )
    state, forward, clipped = rng.randint(0, 200), rng.uniform(1, 100), rng.random() < 0.5

    def seconds(again: float, disk: float, away: float) -> float:
        moved = FileTraffic(state, 2 * state, disk, state, clipped and state + disk, away)
        own = forward + 2 * forward + again
        return own + disk_seconds(moved, rates, forward, own - forward)

    best = None
    for policies in itertools.product(costs, repeat=units):
        others = {policy for policy in policies if policy != "full"}
        runs = [policy for policy, _ in itertools.groupby(policies)]
        if len(others) > 1 or len(runs) > 2:
            continue
        saved = [costs[policy].saved[unit] for unit, policy in enumerate(policies)]
        again = sum(costs[policy].again[unit] for unit, policy in enumerate(policies))
        for files in range(units + 1):
            written = [saved[unit] for unit in range(files) for _ in range(micros)]
            host = sum(saved[unit] for unit in range(files, units) for _ in range(micros))
            host += max((sum(some) for some in itertools.combinations(written, min(window, len(written)))), default=0)
            if host > room.host or sum(written) > room.disk:
                continue
            time = seconds(again, sum(written), micros * sum(saved))
            best = time if best is None else min(best, time)
    found = fastest(costs, micros, window, room, seconds)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.seconds == pytest.approx(best, rel=1e-12)
        assert found.host <= room.host
        assert found.disk <= room.disk


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_fastest_of_all(seed):
    compared(seed)


def streamed_run(layers: int = 6, **fields: object) -> RunConfig:
    """A streamed run of Llama-like layers."""
    block = BlockConfig(AttentionConfig(heads=32, kv_heads=8, head_dim=128), MlpConfig(hidden=14_336))
    model = DecoderConfig(vocab_size=1000, embed_dim=4096, layers=layers, pattern=(block,), remat="full")
    data = DataConfig(source="text", seq_len=4096, batch_size=16)
    run = RunConfig(name="streamed", model=model, data=data, mesh=str(MESH), accumulate=2)
    return dataclasses.replace(run, disk=DiskConfig("/nvme", window=2, parameters=True), **fields)


@pytest.mark.parametrize(("host", "disk"), [(2, 0), (8, 0), (64, 0), (2, 64), (1, 3), (0.2, 64)])
def test_the_choice_has_the_bytes_and_seconds_of_the_plan(host, disk):
    """Of a run with it: bytes of the host and of files by the capacity table, seconds by the limited step."""
    run = streamed_run()
    choice = saved_choice(run, MESH, ON, SavedRoom(host * 2**30, disk * 2**30, 2**40))
    assert choice is not None
    assert choice.files == (6 if host < 1 else 0) or disk
    chosen = choice.of(run)
    kinds = run_kinds(chosen, MESH, ON)["activations"]
    assert (kinds.host, kinds.disk) == (choice.host, choice.disk)
    assert choice.host <= host * 2**30
    assert choice.disk <= disk * 2**30
    files = file_traffic(chosen, MESH, ON)
    moved = MovedBytes(files=files.written)
    step, full = (limited_step(one, moved, MESH, ON) for one in (chosen, run))
    own, forward = step.unlimited + step.recomputed, (full.unlimited + full.recomputed) / 4
    assert choice.seconds == pytest.approx(own + disk_seconds(files, ON.hardware, forward, own - forward))
    for policy in ("full", "attention", "elementwise", "save:attention+qkv"):
        other = dataclasses.replace(run, model=dataclasses.replace(run.model, remat=policy))
        if run_kinds(other, MESH, ON)["activations"].host <= host * 2**30:
            assert limited_step(other, moved, MESH, ON).seconds >= step.seconds * (1 - 1e-9)


def test_nothing_fits_without_room_for_inputs():
    assert saved_choice(streamed_run(), MESH, ON, SavedRoom(2**20, 0, 2**40)) is None
    choice = saved_choice(streamed_run(), MESH, ON, SavedRoom(2**40, 0, 0))
    assert choice is not None
    assert set(choice.policies) == {"full"}, "the device has no room for values"


def test_policies_that_others_are_no_worse_than_are_left_out():
    """Each that is left saves less or computes less than any other."""
    costs = policy_costs(DeviceWork.of(dataclasses.replace(streamed_run(), disk=DiskConfig()), MESH))
    assert {"full", "elementwise"} <= set(costs)
    for one, other in itertools.permutations(costs.values(), 2):
        assert one.saved < other.saved or one.again < other.again
