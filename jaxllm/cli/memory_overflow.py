"""Memory-overflow report: memory of a train step that does not fit into device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm.train import RunConfig
    from sharding.isolate import OutOfDeviceMemory
    from sharding.topology import Topology


def memory_overflow(config: RunConfig, topology: Topology, error: OutOfDeviceMemory) -> str:
    """Table of a step's memory by part, for a step that the compiler refused because of its size."""
    from jaxllm.parallel.sharding_table import device_bytes
    from jaxllm.train.run_sharding import sharding_table

    table = sharding_table(config, topology.num_devices)
    parts = {
        "parameters": device_bytes(table.parameters),
        "optimizer's state": device_bytes(table.optimizer),
    }
    parts["all else: gradients, activations, the batch"] = error.need - sum(parts.values())
    rows = [*parts.items(), ("needed", error.need), ("there is", error.limit), ("too much", error.need - error.limit)]
    lines = [f"{config.name} does not fit {topology}, GiB of one device"]
    lines += [f"  {label:<44}{size / 2**30:10.3f}" for label, size in rows]
    hint = "Split it over more devices, make the micro-batch smaller (--accumulate), or recompute more (--model.remat)."
    return "\n".join([*lines, hint])
