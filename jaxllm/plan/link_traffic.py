"""Link traffic: bytes that a device sends in a step by class of link, and the share of the step that they expose.

By the formulas of ``jaxllm.plan.formulas``, for a run as it is and for other choices of what it could send. They count
every collective over slices or nodes as the compilers' libraries carry it out: inside them over fast links, and of each
of k devices there a k-th part between them. So a flat sum has the bytes of a two-level one here; what two levels change
is that the program itself says so, whatever library carries it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.config import ConfigError
from jaxllm.parallel.sharding_table_view import columns, size
from jaxllm.plan.capacity_table import without_files
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.formulas.step_time import collectives, predict
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.combinations import check_combinations
from sharding import MeshSpec, ShardingError


@dataclass(frozen=True)
class LinkTraffic:
    """Traffic of one choice.

    Attributes:
        choice: settings of the run.
        near: bytes that a device sends in a step over links inside a slice or node.
        far: bytes that it sends between slices or nodes.
        seconds: of a step, predicted.
        near_exposed, far_exposed: share of the step in which a device waits for each, from 0 to 1.
    """

    choice: str
    near: float
    far: float
    seconds: float
    near_exposed: float
    far_exposed: float


def link_traffic(
    run: RunConfig, mesh: MeshSpec, cluster: Cluster, choice: str = "", calibration: Calibration = DEFAULT
) -> LinkTraffic:
    """Traffic of a run on a cluster.

    Args:
        run, mesh: of the run, legal on the cluster.
        cluster: its devices.
        choice: name of the row.
        calibration: attained shares of the data sheet's rates.
    """
    run = without_files(run)
    network, time = Network(cluster, mesh), predict(run, cluster, mesh, calibration)
    sent = [(one.count, network.sent(one.kind, one.axes, one.bytes)) for one in collectives(run, mesh)]
    near, far = (sum(count * found[place] for count, found in sent) for place in (0, 1))
    exposed = (sum(found.values()) / time.seconds for found in (time.near, time.far))
    return LinkTraffic(choice, near, far, time.seconds, *exposed)


def choices(run: RunConfig, mesh: MeshSpec) -> dict[str, RunConfig]:
    """The run, and runs with other legal settings of what is sent, by these settings."""
    own = _described(run, mesh)
    found = {own: run}
    sums = ("flat", "two_level") if dict(mesh.axes).get("local", 1) > 1 else ("auto",)
    for zero in (3, 2, 1, "3level"):
        for reduce in sums:
            plan = dataclasses.replace(run.parallel, zero=zero, reduce=reduce)
            other = dataclasses.replace(run, parallel=plan)
            try:
                check_combinations(other, dict(mesh.axes))
            except (ConfigError, ShardingError):
                continue
            found.setdefault(_described(other, mesh), other)
    return found


def traffic_of_choices(
    run: RunConfig, mesh: MeshSpec, cluster: Cluster, calibration: Calibration = DEFAULT
) -> list[LinkTraffic]:
    """Traffic of a run, and of other choices of what it could send.

    Args:
        run, mesh, cluster, calibration: see ``link_traffic``.

    Raises:
        ConfigError: the documents of a batch decide on what is sent, or devices are not in the order of their links.
    """
    if run.device_order:
        raise ConfigError(
            "device_order: bytes by class of link are those of devices in the order of their links; leave out --on, or "
            "the device order."
        )
    if run.parallel.context == "by_need":
        raise ConfigError(
            'parallel.context = "by_need": the documents of a batch decide on what is sent, so there is no formula; '
            'leave out --on, or set parallel.context to "ring" for what rows of data.seq_len send.'
        )
    found = choices(run, mesh)
    return [link_traffic(other, mesh, cluster, name, calibration) for name, other in found.items()]


def text(rows: Sequence[LinkTraffic], cluster: Cluster) -> str:
    """Table of traffic as text, the run's own first."""
    near, far = ("ICI", "DCN") if cluster.topology.platform == "tpu" else ("NVLink", "network")
    head = (f"sent in a step on {cluster.name}, predicted", near, far, "s/step", f"{near} exposed", f"{far} exposed")
    cells = [
        (
            one.choice,
            size(one.near),
            size(one.far),
            f"{one.seconds:.4g}",
            f"{100 * one.near_exposed:.1f}%",
            f"{100 * one.far_exposed:.1f}%",
        )
        for one in rows
    ]
    return columns(head, cells, "<>>>>>")


def _described(run: RunConfig, mesh: MeshSpec) -> str:
    said = [f"ZeRO-{run.parallel.zero}"]
    if dict(mesh.axes).get("local", 1) > 1:
        said.append("flat sums" if run.parallel.reduce == "flat" else "two-level sums")
    if run.outer.kind != "none":
        said.append(f"{run.outer.kind} every {run.outer.every}")
    return ", ".join([*said, *filter(None, (run.outer.compress, run.grads.compress))])
