"""What a cluster does in a second, for the timelines of compiled programs."""

from __future__ import annotations

from jaxllm.compiler.device_peaks import clock_of
from jaxllm.compiler.program_walker import Exchange
from jaxllm.compiler.timeline import Rates
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.hardware import Cluster
from sharding import MeshSpec


def rates_of(cluster: Cluster, mesh: MeshSpec) -> Rates:
    """Of a cluster with a mesh over it: collectives as ``Network`` times them, TPU kernels by the compiler's cycles.

    A collective whose axes are not known goes over all of them.
    """
    network, everything = Network(cluster, mesh), [name for name, _ in mesh.axes]

    def send(exchange: Exchange) -> float:
        kind = "all-reduce" if exchange.summed else "collective-permute" if exchange.kind == "send" else exchange.kind
        return network.time(kind, exchange.axes or everything, exchange.bytes).seconds

    hardware = cluster.hardware
    return Rates(hardware.flops, hardware.bandwidth, send, clock=clock_of(cluster.topology.device_kind))
