"""Interleave of optimizer offload: which stride of layers updated on the device is fastest (``host.device_every``).

    fastest_interleave(run, Cluster.parse("h100:1x8")).device_every

Deep Optimizer States (arXiv:2410.21316, section 4.2) chooses it by a model of the link, of the host's memory and of
their contention: the device and the host update layers at the same time, while the next state is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.models import functional
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.offload_time import LayerUpdateTime, layer_elements, update_seconds
from jaxllm.plan.hardware import Cluster, HardwareError
from jaxllm.train import RunConfig
from jaxllm.train.run import fitting_mesh


@dataclass(frozen=True)
class Interleave:
    """Fastest interleave of a run's optimizer update with its state in host memory.

    Attributes:
        device_every: one of so many layers is updated on the device (``HostConfig.device_every``).
        seconds: predicted time of the update.
        device_seconds: the same with all layers updated on the device.
        layer: times of one layer, from which these follow.
    """

    device_every: int
    seconds: float
    device_seconds: float
    layer: LayerUpdateTime


def stride(layer: LayerUpdateTime, layers: int) -> int:
    """Fastest stride, the smallest of equals.

    With one layer more of a group on the host, the host takes ``host`` seconds longer and the link ``gradients``. The
    time per layer falls while the link, which has the device's ``state`` too, takes longer than the host, and rises
    after. But layers beyond whole groups are updated on the device, so the fastest stride may lie far from the balance,
    and all are tried: a model has few hundred layers.
    """
    return min(range(1, layers + 1), key=lambda every: update_seconds(layer, layers, every))


def fastest_interleave(run: RunConfig, cluster: Cluster) -> Interleave:
    """Fastest interleave of a run on a cluster.

    Args:
        run: the run; its mesh decides how large a device's part of a layer is.
        cluster: the devices and their hosts.

    Raises:
        HardwareError: the memory bandwidth of the hosts is not known.
        ShardingError: the run does not fit the devices.
    """
    mesh = fitting_mesh(run, functional(run.model, run.parallel.rules()), cluster.devices)
    work, layers = DeviceWork.of(run, mesh), run.model.layers
    layer = LayerUpdateTime.of(layer_elements(work) / layers, cluster.hardware)
    if layer is None:
        name = cluster.hardware.name
        raise HardwareError(
            f"interleave: the memory bandwidth of the hosts of {name} is not published; give a hardware file with "
            f"[{name}] host_memory = BYTES_PER_SECOND."
        )
    every = stride(layer, layers)
    return Interleave(every, update_seconds(layer, layers, every), update_seconds(layer, layers, 1), layer)
