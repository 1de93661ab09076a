"""Simulated idle time of the accelerator with the optimizer state on disk: updates as gradients arrive, and after.

    python -m benchmarks.memory.update_overlap llama3_8b --on h100:1x1 --disk 6e9

Times are the planner's (``jaxllm.plan.formulas.update_timeline``); nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses

from jaxllm.cli.recipe_arguments import find_recipe
from jaxllm.models import functional
from jaxllm.parallel.sharding_table_view import columns
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.update_timeline import layer_times, update_span, update_tasks
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.run import fitting_mesh

ROWS = (1, 4, 16, 64)
"""Micro-batches of one row for each device."""


def table(run: RunConfig, cluster: Cluster, bandwidth: float, window: int) -> str:
    """Seconds of a step and of them idle, by rows of a device and by what updates.

    Args:
        run: its mesh and rows are replaced: FSDP over all devices, one row each in a micro-batch.
        cluster: devices.
        bandwidth: of a device's share of the disk, each way, bytes/s.
        window: layers whose state is in memory.
    """
    rows = []
    for count in ROWS:
        data = dataclasses.replace(run.data, batch_size=count * cluster.devices)
        model = dataclasses.replace(run.model, remat="full")
        planned = dataclasses.replace(run, model=model, data=data, accumulate=count, mesh=f"fsdp={cluster.devices}")
        mesh = fitting_mesh(planned, functional(planned.model, planned.parallel.rules()), cluster.devices)
        layers, forward = layer_times(DeviceWork.of(planned, mesh), cluster, bandwidth, bandwidth)
        spans = [
            update_span(update_tasks(layers, forward, window, arriving=arriving, on=on))
            for on in ("host", "device")
            for arriving in (False, True)
        ]
        rows.append((str(count), *(f"{one.idle:.2f} of {one.seconds:.2f}" for one in spans)))
    head = ("rows", "host, after", "host, as they arrive", "device, after", "device, as they arrive")
    return columns(head, rows, ">>>>>")


def main() -> None:
    """Parses arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--on", required=True, help="topology, such as h100:1x8")
    parser.add_argument("--disk", type=float, required=True, help="bytes/s each way, of a device's share of the disk")
    parser.add_argument("--window", type=int, default=4, help="layers whose state is in memory, 1 or more")
    options = parser.parse_args()
    run, cluster = find_recipe(options.recipe)(), Cluster.parse(options.on)
    if options.window < 1 or options.disk <= 0:
        parser.error("give --window of 1 or more, and --disk above 0")
    print(f"{run.name} on {cluster.name}, state on a disk of {options.disk / 1e9:g} GB/s; idle seconds of a step")
    print(table(run, cluster, options.disk, options.window))


if __name__ == "__main__":
    main()
