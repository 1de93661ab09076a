"""Chunk plan of a run's parameters (PatrickStar): the size that wastes least, and bytes that move in a step.

    python -m benchmarks.memory.chunk_plan llama3_8b --on h100:1x1 --rows 1

The device has some share of the chunks beside activations and working memory, which are the planner's. Nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses

from jaxllm.cli.recipe_arguments import find_recipe
from jaxllm.models import functional
from jaxllm.parallel.sharding_table_view import columns
from jaxllm.plan.formulas.chunk_plan import ChunkError, least_waste, parameter_sizes, pass_moments, replay
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import predict_work
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.run import fitting_mesh

SHARES = (0.3, 0.5, 0.7, 0.9)
"""Bytes of a device less other memory at its peak, as a share of the chunks'."""
STEPS = 3
"""The last one's traffic is that of every later one."""


def table(run: RunConfig, cluster: Cluster, rows: int, largest: float) -> str:
    """Chunk size and its waste, then GiB that move in a step by both rules, for several sizes of devices.

    Args:
        run: its mesh and rows are replaced: FSDP over all devices.
        cluster: devices.
        rows: rows of a device's batch.
        largest: largest chunk, as a multiple of the largest tensor.
    """
    data = dataclasses.replace(run.data, batch_size=rows * cluster.devices)
    model = dataclasses.replace(run.model, remat="full")
    planned = dataclasses.replace(run, model=model, data=data, accumulate=1, mesh=f"fsdp={cluster.devices}")
    mesh = fitting_mesh(planned, functional(planned.model, planned.parallel.rules()), cluster.devices)
    work = DeviceWork.of(planned, mesh)
    sizes, layers = parameter_sizes(work)
    layout = least_waste(sizes, max(sizes), int(largest * max(sizes)))
    moments = pass_moments(layout, layers, predict_work(work, cluster.topology))
    peak = max(moment.others for moment in moments)
    lines = []
    for share in SHARES:
        capacity = peak + round(share * layout.count * layout.size)
        moved = [replay(moments, layout.size, capacity, STEPS, leaves)[-1] for leaves in ("oldest use", "latest use")]
        sent = [f"{(one.loads + one.evictions) * layout.size / 2**30:.2f}" for one in moved]
        lines.append((f"{capacity / 2**30:.2f}", f"{share:.0%}", *sent))
    head = ("device, GiB", "of the chunks", "moved by last use", "by next use")
    return (
        f"{len(sizes)} tensors of {layout.used / 2**30:.2f} GiB in {layout.count} chunks of "
        f"{layout.size / 2**20:.1f} MiB; "
        f"{layout.waste / layout.used:.2%} wasted\n{columns(head, lines, '>>>>')}"
    )


def main() -> None:
    """Parses arguments and prints the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--on", required=True, help="topology, such as h100:1x1")
    parser.add_argument("--rows", type=int, default=1, help="rows of a device's batch")
    parser.add_argument("--largest", type=float, default=2.0, help="largest chunk, of the largest tensor; 1 or more")
    options = parser.parse_args()
    if options.largest < 1:
        parser.error("give --largest of 1 or more: a tensor lies in one chunk")
    try:
        print(table(find_recipe(options.recipe)(), Cluster.parse(options.on), options.rows, options.largest))
    except ChunkError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
