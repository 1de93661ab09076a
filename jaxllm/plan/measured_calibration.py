"""A calibration from a run's own profile: what its devices and links reached of their data sheets.

    jaxllm train llama3_8b --observe.profile 10:13 ...         on the devices
    jaxllm plan llama3_70b --on v6e:16x16 --calibrate runs/llama3_8b

Products, attention and memory get one factor, since operations of a compiled program are fused across them; links get
theirs; the share of arithmetic behind which weights can be sent is known only where some of it was not hidden.
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
from jaxllm.plan.hardware import Cluster, Hardware
from jaxllm.train import RunConfig
from jaxllm.train.run import fitting_mesh
from sharding.topology import GENERATIONS


def calibration_of(path: Path, hardware: Hardware) -> Calibration:
    """What the run in a directory reached, by its newest profile.

    Args:
        path: of the run.
        hardware: that is planned for; the run must have used it.

    Raises:
        DataError: there is no run or no profile, its steps are not marked, or it ran on other devices.
    """
    record, seen = read_record(path), read_trace(path / "profiles")
    kind = str(record.facts.get("device_kind", "unknown devices"))
    wanted = GENERATIONS[hardware.like].device_kind if hardware.like else hardware.name
    if kind != wanted:
        raise DataError(f"{path} ran on {kind}, and {hardware.name} is {wanted}: a profile calibrates its own devices.")
    if not seen.steps:
        raise DataError(f"{path}/profiles: no step is marked in the newest profile; take it with --observe.profile.")
    run, devices = from_dict(RunConfig, record.config), int(record.facts["devices"])
    mesh = fitting_mesh(run, functional(run.model, run.parallel.rules()), devices)
    cluster = Cluster.sized(hardware, devices)
    if cluster is None:
        raise DataError(f"{path} ran on {devices} devices, and there is no {hardware.name} of so many.")
    return fitted(seen, step_time.predict(run, cluster, mesh), DEFAULT)


def fitted(seen: ProfileSummary, predicted: StepTime, used: Calibration) -> Calibration:
    """The calibration with which the prediction made with ``used`` would have been what a profile says."""
    computed, sent = seen.computing / seen.steps, seen.communicating / seen.steps
    factor = (predicted.compute + predicted.memory) / computed
    out = replace(
        used, **{name: min(1.0, getattr(used, name) * factor) for name in ("products", "attention", "memory")}
    )
    expected = sum(sum(part.values()) for part in (predicted.near, predicted.far, predicted.hidden))
    if sent and expected:
        out = replace(out, links=min(1.0, used.links * expected / sent))
    if seen.exposed > 0.01 * seen.communicating:
        out = replace(out, hidden=min(1.0, (seen.communicating - seen.exposed) / seen.computing))
    return out
