"""Rates of a cluster for timelines of compiled programs: FLOP/s, bandwidth and times of collectives."""

from __future__ import annotations

from jaxllm.compiler.device_peaks import clock_of
from jaxllm.compiler.program_walker import Exchange
from jaxllm.compiler.timeline import Rates
from jaxllm.plan.formulas.calibration import Calibration
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.hardware import Cluster
from sharding import MeshSpec


def rates_of(cluster: Cluster, mesh: MeshSpec, calibration: Calibration | None = None) -> Rates:
    """Rates of a cluster with a mesh over it: collectives by ``Network``, TPU kernels by the compiler's cycles.

    A collective whose axes are unknown counts as one over all of them.

    Args:
        calibration: attained shares of the data sheet's rates, as in the formulas; None for the data sheet's.
    """
    shares = calibration or Calibration(matmul=1.0, memory=1.0, link=1.0)
    network, everything = Network(cluster, mesh), [name for name, _ in mesh.axes]

    def send(exchange: Exchange) -> float:
        kind = "all-reduce" if exchange.summed else "collective-permute" if exchange.kind == "send" else exchange.kind
        return network.time(kind, exchange.axes or everything, exchange.bytes).seconds / shares.link

    hardware = cluster.hardware
    flops, bandwidth = hardware.flops * shares.matmul, hardware.bandwidth * shares.memory
    return Rates(flops, bandwidth, send, clock=clock_of(cluster.topology.device_kind))
