"""Serving simulator: the engine's own scheduler on paper devices; traces, plans, routing, pools, power and cost."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.simulate.deployment import Deployment, DeploymentError
    from jaxllm.simulate.request_trace import RequestTrace, TraceRequest, make_trace
    from jaxllm.simulate.simulator import ServiceObjective, Simulation, simulate

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.simulate.deployment": ("Deployment", "DeploymentError"),
        "jaxllm.simulate.request_trace": ("RequestTrace", "TraceRequest", "make_trace"),
        "jaxllm.simulate.simulator": ("ServiceObjective", "Simulation", "simulate"),
    },
)

__all__ = [
    "Deployment",
    "DeploymentError",
    "RequestTrace",
    "ServiceObjective",
    "Simulation",
    "TraceRequest",
    "make_trace",
    "simulate",
]
