"""Automatic layout of a run: the first of the layout search on the devices that are here (``--mesh auto``)."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxllm.config import ConfigError
from jaxllm.plan import layout_search, plan_view
from jaxllm.plan.hardware import TABLE, Cluster, Hardware
from jaxllm.plan.layout_search import ParallelLayout
from jaxllm.train import RunConfig
from sharding.topology import GENERATIONS

AUTO = "auto"
"""``RunConfig.mesh`` of a run whose layout is to be searched."""


def cluster_here(table: Mapping[str, Hardware] = TABLE) -> Cluster | None:
    """Cluster of this backend's devices: the most cubic slice, or nodes of up to eight GPUs; None if none is known."""
    device, count = jax.devices()[0], jax.device_count()
    known = (name for name, one in GENERATIONS.items() if one.device_kind == device.device_kind and name in table)
    name = None if device.platform == "cpu" else next(known, None)
    return None if name is None else Cluster.sized(table[name], count)


def automatic_layout(run: RunConfig, on: str = "") -> ParallelLayout:
    """The fastest layout by formula of a run on the devices that are here; the same in each process.

    Args:
        run: its mesh, remat, accumulate and parallel settings are ignored.
        on: topology of the devices; empty: what JAX says of them.

    Raises:
        ConfigError: nothing is known of the devices, there are not as many, or no layout fits.
    """
    cluster, count = Cluster.parse(on) if on else cluster_here(), jax.device_count()
    if cluster is None:
        raise ConfigError(
            f'mesh = "auto" plans for {", ".join(TABLE)}, not for {count} times {jax.devices()[0].device_kind}: name a '
            "mesh, or say which devices to plan for, such as --on v6e:2x4."
        )
    if cluster.devices != count:
        raise ConfigError(
            f'mesh = "auto" on {cluster.name}, which is {cluster.devices} devices, but there are {count}: name a '
            f"topology of {count} devices."
        )
    found = layout_search.search(run, cluster)
    if not found.layouts:
        raise ConfigError(plan_view.nothing_fits(found, cluster, layout_search.suggest_fitting(run, cluster)))
    return found.layouts[0]


def describe(layout: ParallelLayout) -> str:
    """One line for people: what was chosen, as settings of `jaxllm train`."""
    run, parallel = layout.run, layout.run.parallel
    settings = [f'--mesh "{layout.mesh}"', f"--model.remat {run.model.remat}", f"--accumulate {run.accumulate}"]
    settings += [f"--parallel.zero {parallel.zero}"] + ["--parallel.sequence"] * parallel.sequence
    settings += [f'--parallel.experts "{parallel.experts}"'] if parallel.experts else []
    if dict(layout.mesh.axes).get("stage", 1) > 1:
        settings += [f"--parallel.schedule {parallel.schedule}"]
        settings += [f"--parallel.depths {' '.join(map(str, parallel.depths))}"] if parallel.depths else []
        settings += [f"--parallel.offload {parallel.offload:g}"] if parallel.offload else []
    return f"mesh auto: {' '.join(settings)}: {layout.time.seconds:.3g} s a step, predicted"
