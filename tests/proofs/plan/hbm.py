"""Memory by formula beside programs compiled now: thirty runs on TPU slices and GPU nodes."""

from __future__ import annotations

from jaxllm.plan import memory
from jaxllm.plan.hardware import Cluster
from sharding import MeshSpec
from tests.proofs.harness import proof
from tests.proofs.plan.points import POINTS, compile_point


def predicted(name: str) -> memory.Memory:
    """Of a point."""
    point = POINTS[name]
    cluster = Cluster.parse(point.on)
    mesh = MeshSpec.parse(point.run.mesh).resolve(cluster.devices)
    return memory.predict(point.run, mesh, cluster.topology.platform)


@proof("plan", cases=tuple(POINTS), sample=1, bound={"arguments": 1e-3, "total": 0.10}, costly=True)
def hbm(name: str) -> dict[str, float]:
    """Predicted over compiled, less one. tests/plan holds all stored points, and their median, to the same bounds."""
    report, found = compile_point(name), predicted(name)
    return {
        "arguments": abs(found.arguments / report.argument_bytes - 1),
        "total": abs(found.total / report.total_bytes - 1),
    }
