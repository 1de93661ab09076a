"""Automatic layout of a run: the first of the layout search on the devices that are here (``--mesh auto``)."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxllm.config import ConfigError
from jaxllm.plan import layout_search, plan_view
from jaxllm.plan.by_layer.layer_search import improve_by_layer
from jaxllm.plan.hardware import TABLE, UNCOMPILED, Cluster, Hardware
from jaxllm.plan.layout_search import ParallelLayout
from jaxllm.train import RunConfig
from sharding.topology import GENERATIONS

AUTO = "auto"
"""``RunConfig.mesh`` of a run whose layout is to be searched."""


def cluster_here(table: Mapping[str, Hardware] = TABLE) -> Cluster | None:
    """Cluster of this backend's devices: the most cubic slice, or nodes of up to eight GPUs; None if none is known.

    Args:
        table: an entry whose name is the devices' kind as JAX has it, in any case of letters, is taken first; then the
            only entry that ``TABLE`` does not have; then that of the devices' data sheet.
    """
    kind, count = jax.devices()[0].device_kind, jax.device_count()
    named = [name for name in table if name.casefold() == kind.casefold()]
    new = [name for name in table if name not in TABLE]
    kinds = {name: one.device_kind for name, one in GENERATIONS.items()} | UNCOMPILED
    known = [name for name, one in kinds.items() if one == kind and name in table]
    names = [*named, *(new if len(new) == 1 else ()), *known]
    return Cluster.sized(table[names[0]], count) if names else None


def automatic_layout(run: RunConfig, on: str = "", table: Mapping[str, Hardware] = TABLE) -> ParallelLayout:
    """The fastest layout by formula of a run on the devices that are here, with choices by layer where they pay; the
    same in each process.

    Args:
        run: its mesh, remat, accumulate and parallel settings are ignored.
        on: topology of the devices; empty: what JAX says of them.
        table: rates of the devices (``cluster_here``).

    Raises:
        ConfigError: nothing is known of the devices, there are not as many, or no layout fits.
    """
    cluster, count = Cluster.parse(on, table) if on else cluster_here(table), jax.device_count()
    if cluster is None:
        raise ConfigError(
            f'mesh = "auto" plans for {", ".join(table)}, not for {count} times {jax.devices()[0].device_kind}: name a '
            "mesh, or say which devices to plan for, such as --on v6e:2x4."
        )
    if cluster.devices != count:
        raise ConfigError(
            f'mesh = "auto" on {cluster.name}, which is {cluster.devices} devices, but there are {count}: name a '
            f"topology of {count} devices."
        )
    found = layout_search.search(run, cluster)
    layout = improve_by_layer(run, cluster, found.layouts[0] if found.layouts else None)
    if layout is None:
        raise ConfigError(plan_view.nothing_fits(found, cluster, layout_search.suggest_fitting(run, cluster)))
    return layout


def describe(layout: ParallelLayout) -> str:
    """One line for people: what was chosen, as settings of `jaxllm train`."""
    run, parallel = layout.run, layout.run.parallel
    settings = [f'--mesh "{layout.mesh}"', f"--model.remat {run.model.remat}", f"--accumulate {run.accumulate}"]
    settings += [f"--parallel.zero {parallel.zero}"] + ["--parallel.sequence"] * parallel.sequence
    settings += [f'--parallel.experts "{parallel.experts}"'] if parallel.experts else []
    settings += [f"--parallel.layers {parallel.layers}"] if parallel.layouts() else []
    if dict(layout.mesh.axes).get("stage", 1) > 1:
        settings += [f"--parallel.schedule {parallel.schedule}"]
        settings += [f"--parallel.depths {' '.join(map(str, parallel.depths))}"] if parallel.depths else []
        settings += [f"--parallel.offload {parallel.offload:g}"] if parallel.offload else []
    return f"mesh auto: {' '.join(settings)}: {layout.time.seconds:.3g} s a step, predicted"
