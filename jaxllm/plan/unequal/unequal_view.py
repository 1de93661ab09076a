"""Plans on unequal clusters as text, as JSON, and as recipe files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.config import to_dict
from jaxllm.parallel.sharding_table_view import columns
from jaxllm.plan.plan_export import write_run
from jaxllm.plan.unequal.unequal_cluster import UnequalCluster
from jaxllm.plan.unequal.unequal_search import UnequalPlan, UnequalSearchResult
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import train_flops_per_token
from sharding.topology import GIB

PARTS = ("compute", "messages", "sums", "weights", "bubble")
SPLITS = 8
"""Non-dominated splits that are shown."""


def described_cluster(run: RunConfig, cluster: UnequalCluster) -> str:
    """Description of the run and of each group's devices, memory, speed and links."""
    data = run.data
    rows = [
        (
            group.name,
            group.cluster.name,
            f"{group.cluster.hardware.hbm_bytes / GIB:.1f}",
            f"{group.speed:g}",
            f"{group.cluster.hardware.network / 1e9:.3g}",
            ", ".join(cluster.describe(u) for u, unit in enumerate(cluster.units) if unit.group == g),
        )
        for g, group in enumerate(cluster.groups)
    ]
    head = ("group", "devices", "GiB", "speed", "GB/s between its nodes", "units")
    return (
        f"{run.name} on {cluster.name} ({cluster.devices} devices in {len(cluster.units)} units of {cluster.each}): "
        f"{data.batch_size} rows of {data.seq_len:,}, {data.batch_size * data.seq_len:,} tokens a step\n"
        + columns(head, rows, "<<>>><")
    )


def unequal_ranking(plans: Sequence[UnequalPlan], cluster: UnequalCluster) -> str:
    """Table of plans, fastest first: choices, step time and its parts, the same without the search, memory."""
    head = ("", "mesh", "remat", "micro", "plan", "s/step", "as listed", "MFU %", *PARTS, "GiB")
    rows = [
        (
            str(number),
            str(plan.mesh),
            plan.run.model.remat,
            str(plan.run.accumulate),
            ", ".join([f"ZeRO-{plan.run.parallel.zero}", *(["1f1b"] if plan.depths else [])]),
            f"{plan.seconds:.3f}",
            "does not fit" if plan.even is None else f"{plan.even:.3f}",
            f"{100 * _utilisation(plan, cluster):.1f}",
            *(f"{100 * plan.parts.get(name, 0.0) / plan.seconds:.0f}%" for name in PARTS),
            f"{max(plan.memory) / GIB:.1f}",
        )
        for number, plan in enumerate(plans, 1)
    ]
    return columns(head, rows, "><<><>>>>>>>>>")


def described_plan(number: int, plan: UnequalPlan, cluster: UnequalCluster) -> str:
    """A plan's device order, and its stages, rows, state and memory by group; what limits it, and how it runs."""
    order = plan.run.device_order
    lines = [f"{number}: {plan.mesh}, {plan.seconds:.3f} s a step, limited by {plan.limit}"]
    if plan.depths:
        lines.append(f"  device order: {' '.join(map(str, order)) if order else 'as listed'}")
        replicas = len(plan.order) // len(plan.depths)
        for stage, depth in enumerate(plan.depths):
            units = plan.order[stage * replicas : (stage + 1) * replicas]
            lines.append(f"  stage {stage}: {depth} layers on {', '.join(map(cluster.describe, units))}")
    for g, group in enumerate(cluster.groups):
        own = [u for u, unit in enumerate(cluster.units) if unit.group == g]
        said = [f"{_range([plan.rows[u] for u in own])} rows of a step on a unit"]
        if not plan.depths:
            said.append(f"{_range([100 * plan.state[u] for u in own])}% of the optimizer state")
        said.append(f"{max(plan.memory[u] for u in own) / GIB:.1f} GiB of {group.limit / GIB:.1f}")
        lines.append(f"  {group.name}: {', '.join(said)}")
    if counts := plan.run.parallel.micro_batches:
        said = f"  micro-batches of data=0 to {len(counts) - 1}: {' '.join(map(str, counts))}"
        even = "equal rows do not fit" if plan.even is None else f"{plan.even:.3f} s a step with equal rows"
        lines.append(f"{said}; {even}")
    if shares := plan.run.parallel.state_shares:
        lines.append(f"  shares of the optimizer state of data=0 to {len(shares) - 1}: {' '.join(map(str, shares))}")
    lines.append(f"  run: {' '.join(options(plan))}")
    return "\n".join(lines)


def described_splits(plan: UnequalPlan) -> str:
    """Splits of a plan's layers in its device order of which none has both a smaller latency and a shorter stage."""
    rows = [
        (
            f"{split.total:.4f}",
            f"{split.slowest:.4f}",
            f"{split.seconds(plan.run.accumulate):.3f}",
            " ".join(map(str, split.depths)),
        )
        for split in plan.splits[:SPLITS]
    ]
    head = ("latency", "slowest stage", "s/step before sums", "layers")
    more = len(plan.splits) - len(rows)
    return (
        "non-dominated splits, seconds of a micro-batch\n"
        + columns(head, rows, ">>><")
        + f"\nand {more} more" * (more > 0)
    )


def nothing_fits_unequal(found: UnequalSearchResult, cluster: UnequalCluster) -> str:
    """Message for a search without a plan."""
    if not found.tried:
        return (
            f"no layout of this model and batch is legal on {cluster.name}: stages and data are over its "
            f"{len(cluster.units)} units, and all other axes over the {cluster.each} devices of one; give a batch "
            "(data.batch_size) that divides over them, or a model with layers for as many stages."
        )
    return (
        f"no layout fits {cluster.name}: the nearest of {found.tried} needs {found.least / GIB:.2f} GiB more on a "
        "device. All devices run one program, so the smallest memory counts, but for shares of the optimizer state: "
        "leave out the group with the smallest, or "
        "give fewer or shorter rows (data.batch_size, data.seq_len)."
    )


def options(plan: UnequalPlan) -> list[str]:
    """Options of ``jaxllm train`` that give a run the plan."""
    run, parallel = plan.run, plan.run.parallel
    said = ["--mesh", f'"{plan.mesh}"', "--accumulate", str(run.accumulate), "--model.remat", run.model.remat]
    said += ["--parallel.zero", str(parallel.zero)]
    said += ["--parallel.sequence"] if parallel.sequence else []
    said += ["--parallel.depths", *map(str, parallel.depths)] if parallel.depths else []
    said += ["--parallel.micro-batches", *map(str, parallel.micro_batches)] if parallel.micro_batches else []
    said += ["--parallel.state-shares", *map(str, parallel.state_shares)] if parallel.state_shares else []
    return said + (["--device-order", *map(str, run.device_order)] if run.device_order else [])


def write_unequal_recipe(path: Path, plan: UnequalPlan, cluster: UnequalCluster) -> str:
    """Writes FILE.py with a function that returns the plan's run; returns ``FILE.py:FUNCTION``."""
    name = re.sub(r"\W+", "_", f"{plan.run.name}_{Path(cluster.name).stem}").strip("_").lower()
    says = [
        f"{plan.run.name} on {cluster.name}, laid out by `jaxllm plan`.",
        "",
        f"Predicted: {plan.seconds:.3f} s a step, {max(plan.memory) / GIB:.1f} GiB of a device.",
    ]
    return write_run(path, plan.run, name if name.isidentifier() else f"run_{name}", says, f"{plan.mesh}.")


def unequal_json(plan: UnequalPlan, cluster: UnequalCluster) -> dict[str, Any]:
    """JSON-able data of a plan."""
    return {
        "cluster": cluster.name,
        "mesh": str(plan.mesh),
        "remat": plan.run.model.remat,
        "accumulate": plan.run.accumulate,
        "parallel": to_dict(plan.run.parallel),
        "device_order": list(plan.run.device_order),
        "units": [cluster.describe(u) for u in range(len(cluster.units))],
        "depths": list(plan.depths),
        "rows": list(plan.rows),
        "state": list(plan.state),
        "splits": [split._asdict() for split in plan.splits],
        "predicted": {
            "seconds": plan.seconds,
            "parts": plan.parts,
            "limit": plan.limit,
            "mfu": _utilisation(plan, cluster),
            "memory": list(plan.memory),
            "as_listed": plan.even,
        },
        "options": options(plan),
        "cluster_groups": [
            {"name": group.name, "devices": group.cluster.name, "speed": group.speed, "limit": group.limit}
            | {"hardware": dataclasses.asdict(group.cluster.hardware)}
            for group in cluster.groups
        ],
    }


def _utilisation(plan: UnequalPlan, cluster: UnequalCluster) -> float:
    """Model FLOPs utilisation of all devices' peaks together."""
    data = plan.run.data
    flops = train_flops_per_token(plan.run.model, data.seq_len) * data.batch_size * data.seq_len
    peak = sum(group.cluster.hardware.flops * group.cluster.devices for group in cluster.groups)
    return flops / plan.seconds / peak


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
