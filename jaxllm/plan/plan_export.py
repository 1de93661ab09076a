"""Layout export: a layout as a recipe file, and as JSON."""

from __future__ import annotations

import dataclasses
import pprint
import re
from pathlib import Path
from typing import Any

from jaxllm.config import to_dict
from jaxllm.files import atomic
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import ParallelLayout
from jaxllm.train import RunConfig

TIERS = ("total", "host", "disk")
"""Bytes of a device, of its share of the host's memory, and in files."""


def function_name(layout: ParallelLayout, cluster: Cluster) -> str:
    """Name of the recipe function in the file."""
    name = re.sub(r"\W+", "_", f"{layout.run.name}_{cluster.name}").strip("_").lower()
    return name if name.isidentifier() else f"run_{name}"


def write_recipe(path: Path, layout: ParallelLayout, cluster: Cluster) -> str:
    """Writes FILE.py with a function that returns the run; returns ``FILE.py:FUNCTION``."""
    seconds, gib = layout.time.seconds, layout.memory.total / 2**30
    says = [
        f"{layout.run.name} on {cluster.name}, laid out by `jaxllm plan`.",
        "",
        f"Predicted: {seconds:.3f} s a step, {gib:.1f} GiB of a device.",
    ]
    return write_run(path, layout.run, function_name(layout, cluster), says, f"{layout.mesh}.")


def write_run(path: Path, run: RunConfig, name: str, says: list[str], returns: str) -> str:
    """Writes a recipe module with docstring lines ``says`` and a function ``name`` that returns the run."""
    config = pprint.pformat(to_dict(run), indent=1, width=110, sort_dicts=False)
    lines = [
        f'"""{says[0]}',
        "",
        f"    jaxllm train {path}:{name}",
        *says[1:],
        '"""',
        "",
        "from jaxllm.config import from_dict",
        "from jaxllm.train import RunConfig",
        "",
        "",
        f"def {name}() -> RunConfig:",
        f'    """{returns}"""',
        "    return from_dict(RunConfig, CONFIG)",
        "",
        "",
        f"CONFIG = {config}",
        "",
    ]
    with atomic(path) as file:
        file.write("\n".join(lines).encode())
    return f"{path}:{name}"


def to_json(layout: ParallelLayout, cluster: Cluster) -> dict[str, Any]:
    """JSON-able data of a predicted layout."""
    time = dataclasses.asdict(layout.time)
    return {
        "topology": cluster.name,
        "mesh": str(layout.mesh),
        "remat": layout.run.model.remat,
        "accumulate": layout.run.accumulate,
        "parallel": to_dict(layout.run.parallel),
        "predicted": {
            "seconds": layout.time.seconds,
            "mfu": layout.time.mfu(cluster.hardware.flops),
            "time": time,
            "memory": {
                **layout.memory.parts(),
                "total": layout.memory.total,
                "host": layout.memory.host,
                "disk": layout.memory.disk,
            },
            "limit": layout.limit,
        },
    }
