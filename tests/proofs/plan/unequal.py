"""Plans for unequal clusters against exhaustive search, pipelines against replayed schedules, and their runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.parallel.pipeline.schedule_generators import make
from jaxllm.parallel.pipeline.schedule_table import tabulate
from jaxllm.plan.unequal.depth_split import DepthSplit, best_split, depth_splits, split_of
from jaxllm.plan.unequal.device_order import OrderCosts, annealed_order, exact_order
from jaxllm.plan.unequal.unequal_cluster import UnequalCluster, read_cluster
from jaxllm.plan.unequal.unequal_search import search_unequal
from jaxllm.plan.unequal.uneven_rows import split_rows, split_state
from jaxllm.plan.unequal.unit_cost import replica_unit_cost, stage_unit_cost
from jaxllm.train import RunConfig
from jaxllm.train.combinations import check_combinations
from recipes.llama3 import llama3_8b
from tests.proofs.first_run.parity import compare
from tests.proofs.harness import proof
from tests.proofs.plan.search import meshes, plans


@functools.cache
def compositions(total: int, parts: int) -> np.ndarray:
    """All ways to write ``total`` as ``parts`` positive numbers in order. [N parts]"""
    cuts = itertools.combinations(range(1, total), parts - 1)
    return np.array([np.diff([0, *cut, total]) for cut in cuts], int).reshape(-1, parts)


@functools.cache
def orders(units: int) -> np.ndarray:
    """All orders of so many units. [N units]"""
    return np.array(list(itertools.permutations(range(units))))


def exhaustive(costs: OrderCosts) -> float:
    """Seconds of the fastest of all orders with the fastest of all depths, from the definition of a step's time."""
    order, links = orders(len(costs.layer)), np.array(costs.links)
    placed = order.reshape(-1, costs.stages, costs.replicas)
    layer = np.array(costs.layer)[placed].max(2)
    beside = np.zeros_like(layer)
    beside[:, -1] = np.array(costs.head)[placed[:, -1]].max(1)
    if costs.stages > 1:
        beside[:, :-1] = (costs.message / links[placed[:, :-1], placed[:, 1:]]).max(2)
    once = (costs.sums / links[placed[..., :, None], placed[..., None, :]]).max((1, 2, 3))
    a_byte = (1 / links[placed[:, :, None], placed[:, None, :]]).sum(2).max((1, 2)) / costs.stages
    best = math.inf
    for depths in compositions(costs.layers, costs.stages):
        if depths.max() > costs.most:
            continue
        busy = beside + depths * layer
        moved = costs.ends + (0.0 if (depths == depths[0]).all() else costs.moved * depths.max())
        seconds = busy.sum(1) + (costs.micro_batches - 1) * busy.max(1) + once + moved * a_byte
        best = min(best, seconds.min())
    return best


def drawn_costs(seed: int, units: int = 8) -> OrderCosts:
    """Units of up to three kinds in up to three groups, or each with links of its own; costs of all sizes."""
    draw = random.Random(seed)
    kinds = [(draw.uniform(0.5, 3.0), draw.uniform(0.0, 4.0)) for _ in range(draw.choice((1, 2, 3)))]
    kind = [draw.randrange(len(kinds)) for _ in range(units)]
    group = [draw.randrange(3) for _ in range(units)]
    between = {pair: draw.choice((1.0, 4.0, 10.0)) for pair in itertools.combinations_with_replacement(range(3), 2)}
    measured = draw.random() < 0.3
    links = [[math.inf] * units for _ in range(units)]
    for a, b in itertools.combinations(range(units), 2):
        rate = between[min(group[a], group[b]), max(group[a], group[b])]
        links[a][b] = links[b][a] = rate * draw.uniform(0.5, 1.0) if measured else rate
    stages = draw.choice([n for n in (1, 2, 4, 8) if units % n == 0])
    layers = draw.randint(max(stages, 4), 10)
    return OrderCosts(
        stages,
        units // stages,
        tuple(kinds[k][0] for k in kind),
        tuple(kinds[k][1] for k in kind),
        draw.choice((0.0, 0.5, 4.0)),
        draw.choice((0.0, 1.0, 30.0)),
        draw.choice((0.0, 3.0)),
        draw.choice((0.0, 0.5, 5.0)),
        tuple(map(tuple, links)),
        layers,
        draw.randint(-(-layers // stages), layers),
        draw.choice((1, 4, 16)),
    )


@proof("plan", count=200, sample=1, bound={"branch and bound": 1e-9, "annealing": 0.25})
def unequal_orders_are_brute_force(seed: int) -> dict[str, float]:
    """Step time of eight devices in the order found, over that of the fastest of all 40,320 with all depths, less 1."""
    costs = drawn_costs(seed)
    least, found, annealed = exhaustive(costs), exact_order(costs), annealed_order(costs)
    assert found is not None
    assert annealed is not None
    return {"branch and bound": abs(found.seconds / least - 1), "annealing": annealed.seconds / least - 1}


@proof("plan", count=200, sample=10, bound=1e-12)
def unequal_splits_are_brute_force(seed: int) -> float:
    """Non-dominated splits of layers are those of all splits; the best for drawn micro-batches is the fastest."""
    draw = random.Random(seed)
    stages = draw.randint(1, 5)
    layers = draw.randint(stages, 13)
    layer = [draw.choice((1.0, 1.5, draw.uniform(0.3, 3.0))) for _ in range(stages)]
    beside = [draw.choice((0.0, draw.uniform(0.0, 5.0))) for _ in range(stages)]
    most = draw.randint(-(-layers // stages), layers)
    found = depth_splits(layer, beside, layers, most)
    every = [split_of(layer, beside, depths.tolist()) for depths in compositions(layers, stages)]
    every = [split for split in every if max(split.depths) <= most]

    def dominates(b: DepthSplit, a: DepthSplit) -> bool:
        more = max(b.total - a.total, b.slowest - a.slowest)
        return more < 1e-9 and min(b.total - a.total, b.slowest - a.slowest) < -1e-9

    front = {(round(a.total, 9), round(a.slowest, 9)) for a in every if not any(dominates(b, a) for b in every)}
    assert {(round(one.total, 9), round(one.slowest, 9)) for one in found} == front
    micro = draw.choice((1, 2, 8, 64))
    best = best_split(layer, beside, layers, most, micro)
    assert best is not None
    assert sum(best.depths) == layers
    return abs(best.seconds(micro) / min(split.seconds(micro) for split in every) - 1)


@proof("plan", count=200, sample=10, bound=1e-12)
def uneven_rows_are_brute_force(seed: int) -> float:
    """Micro-batches by unit take as long as the fastest of all splits; state shares fit, add up, and the largest is
    as small as bisection finds, where any shares fit.
    """
    draw = random.Random(seed)
    units = draw.randint(2, 5)
    seconds, beside = [draw.uniform(0.2, 2.0) for _ in range(units)], [draw.uniform(0.0, 1.0) for _ in range(units)]
    total = draw.randint(units, 14)
    counts = split_rows(seconds, beside, total)
    assert sum(counts) == total
    ready = lambda n: (np.array(beside) + n * np.array(seconds)).max(-1)  # noqa: E731
    error = abs(ready(np.array(counts)) / ready(compositions(total, units)).min() - 1)
    room, state = [draw.uniform(-0.2, 1.0) for _ in range(units)], draw.uniform(0.2, 2.0)
    shares = split_state(room, state)
    held = lambda largest: sum(min(max(one, 0.0), largest * state) for one in room)  # noqa: E731
    if held(1.0) < state:
        assert shares is None
        return error
    assert shares is not None
    assert all(0 <= share * state <= max(one, 0.0) + 1e-12 for share, one in zip(shares, room, strict=True))
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if held(middle) >= state else (middle, high)
    return max(error, abs(sum(shares) - 1), abs(max(shares) - high))


def drawn_cluster(seed: int) -> tuple[RunConfig, UnequalCluster]:
    """Eight devices in up to four units of two or three groups, and a run, of which some layouts fit."""
    draw = random.Random(seed)
    shape = draw.choice((("1x4", "1x4"), ("1x2", "1x2", "2x2"), ("2x2", "1x4"), ("1x2", "3x2")))
    networks = {name: draw.choice((1e9, 5e9, 25e9)) for name in "xyz"[: len(shape)]}
    groups = [
        f'[[group]]\nname = "{name}"\ndevices = "{draw.choice(("h100", "a100", "h200"))}:{sides}"\nnetwork = "{name}"\n'
        f"speed = {draw.choice((1.0, 0.7))}\nmemory = {draw.choice((3, 8, 40))}\n"
        for name, sides in zip(networks, shape, strict=True)
    ]
    rates = "".join(f"{name} = {rate}\n" for name, rate in networks.items())
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text("".join(groups) + f"[network]\n{rates}[between]\ndefault = {draw.choice((2e8, 1e9))}\n")
        cluster = read_cluster(file)
    model = DecoderConfig(
        vocab_size=draw.choice((4096, 32768)),
        embed_dim=draw.choice((1024, 2048)),
        layers=draw.choice((4, 5, 6)),
        pattern=(BlockConfig(AttentionConfig(8, 2, 128), MlpConfig(hidden=4096)),),
        tied=False,
        dtype="bfloat16",
    )
    run = llama3_8b()
    data = dataclasses.replace(run.data, seq_len=2048, batch_size=draw.choice((8, 16)))
    return dataclasses.replace(run, model=model, data=data), cluster


def shares_by_definition(room: Sequence[float], state: float) -> list[int] | None:
    """Weights of shares of the optimizer state, of which any with these sums and largest weight cost the same: the
    smallest sum whose largest share is within a twentieth of the least one, else the sum with the smallest such share.
    """
    parts = [max(one, 0.0) / state for one in room]
    if sum(min(one, 1.0) for one in parts) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(min(one, middle) for one in parts) >= 1 else (middle, high)
    best: list[int] = []
    for total in range(len(room), 257):
        caps = [int(total * min(one, 1.0)) for one in parts]
        if min(caps) < 1 or sum(caps) < total:
            continue
        largest = next(m for m in range(1, total + 1) if sum(min(cap, m) for cap in caps) >= total)
        weights = [min(cap, largest) for cap in caps]
        while sum(weights) > total:
            weights[weights.index(max(weights))] -= 1
        if not best or max(weights) / total < max(best) / sum(best):
            best = weights
        if max(weights) <= 1.05 * high * total:
            break
    return best or None


def refuses_shares(run: RunConfig, sizes: dict[str, int], weights: list[int]) -> bool:
    """Whether training refuses such shares of the optimizer state."""
    shared = dataclasses.replace(run.parallel, state_shares=tuple(weights))
    try:
        check_combinations(dataclasses.replace(run, parallel=shared), sizes)
    except ValueError:
        return True
    return False


@proof("plan", count=200, sample=1, bound=1e-9)
def unequal_search_is_brute_force(seed: int) -> float:
    """Step time of the plan of each mesh on a drawn cluster over that of the fastest of all layouts, orders, depths and
    rows that fit, less 1; costs of units are the planner's. What does not fit counts with shares of optimizer state.
    """
    run, cluster = drawn_cluster(seed)
    found = search_unequal(run, cluster).plans
    every_mesh: dict[frozenset[tuple[str, int]], float] = {}
    units, groups = len(cluster.units), range(len(cluster.groups))
    limit = [cluster.groups[unit.group].limit for unit in cluster.units]
    slowest = min(min(row) for row in cluster.links)
    for mesh in meshes(run, None):
        sizes = dict(mesh.axes)
        stages, replicas = sizes.get("stage", 1), sizes.get("data", 1)
        if stages * replicas != units or stages > run.model.layers:
            continue
        fastest = math.inf
        # Layouts are enumerated for layers that divide; the depths of others are chosen below.
        even = run if stages == 1 else dataclasses.replace(run, model=dataclasses.replace(run.model, layers=2 * stages))
        for one in plans(even, mesh, None):
            laid = dataclasses.replace(one, model=dataclasses.replace(one.model, layers=run.model.layers))
            if stages == 1:
                whole = [replica_unit_cost(laid, mesh, cluster, group) for group in groups]
                own = [whole[unit.group] for unit in cluster.units]
                sums = max(one.sums for one in own) / slowest
                ready = lambda n, own=own: max(one.fixed + k * one.micro_batch for one, k in zip(own, n, strict=True))  # noqa: E731
                if all(one.memory.total <= most for one, most in zip(own, limit, strict=True)):
                    moved = 0.0
                else:
                    state = own[0].memory.optimizer
                    room = [m - one.memory.total + one.memory.optimizer for one, m in zip(own, limit, strict=True)]
                    weights = shares_by_definition(room, state)
                    if weights is None or refuses_shares(laid, sizes, weights):
                        continue
                    # A unit's new parameters go to all others, in slices as long as the largest.
                    moved = (units - 1) * max(weights) / sum(weights) * own[0].memory.parameters / slowest
                fastest = min(fastest, ready([laid.accumulate] * units) + sums + moved)
                inner = math.prod(size for axis, size in sizes.items() if axis not in ("data", "tensor"))
                if laid.accumulate == 1 or (laid.parallel.zero == 1 and inner > 1):
                    continue
                once = max(one.sums_once for one in own) / slowest
                every = compositions(laid.accumulate * units, units).tolist()
                fastest = min(fastest, min(map(ready, every)) + once + moved)
                continue
            if laid.parallel.schedule != "1f1b" or laid.parallel.offload:
                continue
            costs = [stage_unit_cost(laid, mesh, cluster, group) for group in groups]
            of = [costs[unit.group] for unit in cluster.units]
            most = max((d for d in range(1, 9) if all(one.memory(d) <= one.limit for one in costs)), default=0)
            if most * stages < run.model.layers:
                continue
            first = of[0]
            given = OrderCosts(
                stages,
                replicas,
                tuple(one.layer for one in of),
                tuple(one.head for one in of),
                first.message,
                first.sums,
                first.ends,
                first.moved,
                cluster.links,
                run.model.layers,
                most,
                laid.accumulate,
            )
            fastest = min(fastest, exhaustive(given))
        if fastest < math.inf:
            every_mesh[frozenset(mesh.axes)] = fastest
    assert {frozenset(plan.mesh.axes) for plan in found} == set(every_mesh)
    seconds = [round(plan.seconds, 9) for plan in found]
    assert seconds == sorted(seconds)
    return max((abs(plan.seconds / every_mesh[frozenset(plan.mesh.axes)] - 1) for plan in found), default=0.0)


def free_running(stages: int, micro: int, seconds: list[float]) -> float:
    """End of a 1F1B step whose operations start as soon as their inputs are there; a third of a stage is forward."""
    schedule = make("1f1b", stages, micro)
    ends: dict[tuple[int, str, int], float] = {}
    left, free = [list(order) for order in schedule.orders], [0.0] * stages
    while any(left):
        for p in range(stages):
            while left[p]:
                op = left[p][0]
                needs = [(q, one.kind, one.micro) for q, one in schedule.needs(p, op)]
                if any(need not in ends for need in needs):
                    break
                free[p] = (
                    max(free[p], *(ends[need] for need in needs), 0.0) + seconds[p] * (1 if op.kind == "F" else 2) / 3
                )
                ends[p, op.kind, op.micro] = free[p]
                left[p].pop(0)
    return max(free)


def in_ticks(stages: int, micro: int, seconds: list[float]) -> float:
    """The same where stages wait for their neighbours in every tick with messages, as the executor's may have to."""
    table = tabulate(make("1f1b", stages, micro))
    ends = [0.0] * stages
    for kinds, right, left in zip(np.array(table.kind), table.right, table.left, strict=True):
        ends = [end + seconds[p] * int(kinds[p]) / 3 for p, end in enumerate(ends)]
        if right or left:
            ends = [max(ends[max(0, p - 1) : p + 2]) for p in range(stages)]
    return max(ends)


@proof("plan", count=300, sample=10, bound={"above": 1e-12, "below": 0.15, "in ticks": 0.35})
def unequal_pipelines_beside_replayed_schedules(seed: int) -> dict[str, float]:
    """1F1B of unequal stages, replayed: by how much it is above the formula, below it, and above where stages wait for
    their neighbours in every tick.
    """
    draw = random.Random(seed)
    stages = draw.randint(2, 8)
    micro = draw.choice((2, 3, 4)) * stages
    seconds = [draw.uniform(1.0, 2.0) for _ in range(stages)]
    formula = sum(seconds) + (micro - 1) * max(seconds)
    replayed = free_running(stages, micro, seconds) / formula - 1
    return {"above": replayed, "below": -replayed, "in ticks": in_ticks(stages, micro, seconds) / formula - 1}


MESHES = (
    "data=2,stage=2,fsdp=2",
    "stage=4,fsdp=2",
    "stage=2,fsdp=2,tensor=2",
    "stage=4,data=2",
    "data=4,fsdp=2",
    "stage=8",
)


@proof("plan", count=24, sample=1, float64=True, bound={"loss": 1e-10, "gradient": 1e-10, "curve": 1e-8})
def planned_orders_train_alike(seed: int) -> dict[str, float]:
    """A drawn device order and drawn depths, as plans for unequal clusters have them, against one device: loss, each
    leaf's gradient, ten AdamW steps.
    """
    draw = random.Random(seed)
    mesh = MESHES[seed % len(MESHES)]
    sizes = {axis: int(n) for axis, _, n in (part.partition("=") for part in mesh.split(","))}
    stages, blocks = sizes.get("stage", 1), sizes.get("stage", 1) * sizes.get("data", 1)
    depths = tuple(draw.randint(1, 3) for _ in range(stages)) if stages > 1 else ()
    micro = draw.choice((stages, stages + 1)) if stages > 1 else 2
    example: dict[str, Any] = {
        "preset": mesh,
        "device_order": tuple(draw.sample(range(blocks), blocks)),
        "plan": {"schedule": "1f1b", "depths": depths, "zero": draw.choice((2, 3))},
        "model": {"head_dim": 4, "embed_dim": 16, "mlp": 8, "vocab_size": 16, "layers": sum(depths) or 2},
        "rows": sizes.get("data", 1) * sizes.get("fsdp", 1) * micro,
        "seq_len": 16,
        "packed": draw.random() < 0.5,
        "accumulate": micro,
        "z_loss": 1e-2,
        "seed": draw.randrange(2**16),
    }
    loss, gradient, curve = compare(example, "float64", 10)
    return {"loss": loss, "gradient": gradient, "curve": curve}
