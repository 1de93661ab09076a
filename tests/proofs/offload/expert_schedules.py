"""Schedules of a layer's experts over device and host: the least of all mappings, by an oracle that plays them out."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import numpy as np

from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES, ExpertCosts
from tests.proofs.harness import proof


def drawn(rng: np.random.Generator) -> tuple[dict[int, int], list[int], ExpertCosts]:
    """Rows of wanted experts, those in slots, and costs, of which any may be the largest."""
    wanted = rng.choice(64, int(rng.integers(1, 9)), replace=False).tolist()
    rows = {expert: int(rng.choice([1, 1, 2, 5, 16, 100, 300])) for expert in wanted}
    here = [expert for expert in wanted if rng.random() < 0.4]
    each = np.sort(10 ** rng.uniform(-2, 1, 4))
    load, device = (float(10 ** rng.uniform(-2, 1)) for _ in range(2))
    return rows, here, ExpertCosts(load, device, (1, 4, 16, 128), tuple(each.tolist()))


def played(rows: Mapping[int, int], here: Collection[int], host: Collection[int], costs: ExpertCosts) -> float:
    """Seconds until link, device and host have done a mapping, event by event: the device takes whatever is there."""
    absent = [expert for expert in rows if expert not in here and expert not in host]
    arrivals = [0.0] * sum(e in here and e not in host for e in rows) + list(
        itertools.accumulate([costs.load] * len(absent))
    )
    device = processor = 0.0
    for arrival in arrivals:
        device = max(device, arrival) + costs.device
    for expert in host:
        left = rows[expert]
        while left:
            some = min(left, costs.rows[-1])
            processor += next(t for n, t in zip(costs.rows, costs.host, strict=True) if n >= some)
            left -= some
    return max(device, processor)


@proof("offload", count=300, sample=5, bound={"above": 1e-12, "sum": 1e-12})
def schedules_are_the_least(seed: int) -> dict[str, float]:
    """Drawn layers of up to eight experts: seconds of ``schedule`` above those of the best of all mappings, and the sum
    of all experts' seconds by ``by_cost`` above the best sum.

    No other choice is faster than ``schedule``: neither that of each expert alone, nor a fixed mapping.
    """
    rows, here, costs = drawn(np.random.default_rng(seed))
    experts = list(rows)
    mappings = [set(itertools.compress(experts, bits)) for bits in itertools.product((0, 1), repeat=len(experts))]
    best = min(played(rows, here, mapping, costs) for mapping in mappings)
    made = {name: choose(rows, here, costs) for name, choose in SCHEDULES.items()}
    seconds = {name: played(rows, here, mapping, costs) for name, mapping in made.items()}
    assert seconds["schedule"] <= min(seconds.values()) * (1 + 1e-12)
    assert not made["load"]
    assert made["host"] == set(experts) - set(here)

    def total(host: set[int]) -> float:
        on_device = sum(costs.device + (0 if e in here else costs.load) for e in experts if e not in host)
        return on_device + sum(played({e: rows[e]}, [], [e], costs) for e in host)

    of_absent = [mapping for mapping in mappings if not mapping.intersection(here)]
    least = min(map(total, of_absent))
    return {"above": seconds["schedule"] / best - 1, "sum": total(made["by_cost"]) / least - 1}
