"""Calibration from a profile: fits the cost model's attained fractions to a run's measured step.

    jaxllm train llama3_8b --observe.profile 10:13 ...         on the devices
    jaxllm plan llama3_70b --on v6e:16x16 --calibrate runs/llama3_8b

Matmul, attention and memory share one factor, since a compiled program fuses operations across them; links have
another; the weight overlap is known only where some communication was exposed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxllm.config import from_dict
from jaxllm.files import DataError
from jaxllm.models import functional
from jaxllm.observe.profile_summary import ProfileSummary, read_trace
from jaxllm.observe.run_record import read_record
from jaxllm.plan.formulas import step_time
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.step_time import StepTime
from jaxllm.plan.hardware import UNCOMPILED, Cluster, Hardware
from jaxllm.train import RunConfig
from jaxllm.train.run import fitting_mesh
from sharding.topology import GENERATIONS


def calibration_of(path: Path, hardware: Hardware) -> Calibration:
    """Calibration from the newest profile of the run in a directory.

    Args:
        path: directory of the run.
        hardware: hardware that is planned for; the run must have used it.

    Raises:
        DataError: there is no run or no profile, its steps are not marked, or it ran on other devices.
    """
    record, seen = read_record(path), read_trace(path / "profiles")
    kind = str(record.facts.get("device_kind", "unknown devices"))
    wanted = GENERATIONS[hardware.like].device_kind if hardware.like else UNCOMPILED.get(hardware.name, hardware.name)
    if kind != wanted:
        raise DataError(f"{path} ran on {kind}, not on {wanted} ({hardware.name}): calibrate with a run on that kind.")
    if not seen.steps:
        raise DataError(f"{path}/profiles: no step is marked in the newest profile; take it with --observe.profile.")
    run, devices = from_dict(RunConfig, record.config), int(record.facts["devices"])
    mesh = fitting_mesh(run, functional(run.model, run.parallel.rules()), devices)
    cluster = Cluster.sized(hardware, devices)
    if cluster is None:
        raise DataError(f"{path} ran on {devices} devices, and {hardware.name} has no topology of that size.")
    return fit_calibration(seen, step_time.predict(run, cluster, mesh), DEFAULT)


def fit_calibration(seen: ProfileSummary, predicted: StepTime, used: Calibration) -> Calibration:
    """Calibration with which the prediction made with ``used`` would match the profile."""
    computed, sent = seen.computing / seen.steps, seen.communicating / seen.steps
    factor = (predicted.compute + predicted.memory) / computed
    out = replace(used, **{name: min(1.0, getattr(used, name) * factor) for name in ("matmul", "attention", "memory")})
    expected = sum(sum(part.values()) for part in (predicted.near, predicted.far, predicted.hidden))
    if sent and expected:
        out = replace(out, link=min(1.0, used.link * expected / sent))
    if seen.exposed > 0.01 * seen.communicating:
        out = replace(out, weight_overlap=min(1.0, (seen.communicating - seen.exposed) / seen.computing))
    return out
