"""Persistent share: how much of the optimizer state in host memory stays on the device, beside which remat.

ProTrain (arXiv:2406.08334, section 4) searches the number of persistent chunks together with what each block does with
its activations: device memory is worth either recomputation that is saved, or copies of optimizer state that are.
Here the share takes sixteenths. For each, the remat solver fills the rest of the memory by sizes of policies that the
compiler has measured, and the step of least predicted time is compiled; where it is over the budget, the next one.
Where those are too, plans are made again with the bytes that they took beyond their prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from jaxllm.models import DecoderConfig
from jaxllm.models.remat import RematError, offloaded_share, policies_by_layer
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.remat_solver import (
    CLOSE,
    HostTier,
    Measure,
    RematSolution,
    StepBytes,
    places_bytes,
    solve,
    value_sizes,
)
from jaxllm.train import RunConfig
from jaxllm.train.disk.step_bytes import shard_bytes
from jaxllm.train.host_offload import persistent_arrays
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import build_optimizer, run_state
from sharding import MeshSpec

SHARES = [sixteenths / 16 for sixteenths in range(16)]
COMPILED = 3
"""Most shares whose step is compiled."""


class PersistentPlan(NamedTuple):
    """Persistent share of a run's optimizer state, with the remat beside it.

    Attributes:
        share: value for ``host.persistent``.
        remat: value for ``model.remat``.
        stays, streamed: bytes of a device's optimizer state of layers, on the device and in host memory.
        bytes: of the step on a device, predicted; measured, of the plan that is chosen.
        seconds: predicted for the passes of a step, exposed copies of activations, and copies of optimizer state.
    """

    share: float
    remat: str
    stays: int
    streamed: int
    bytes: int
    seconds: float


def persistent_plans(
    config: RunConfig,
    budget: int,
    solved: RematSolution,
    host: HostTier,
    mesh: MeshSpec,
    widths: Mapping[str, float] | None = None,
    placed: Sequence[str] = (),
    error: int = 0,
) -> list[PersistentPlan]:
    """Plans of all shares that fit by the measured sizes of policies, that without persistent state first.

    Args:
        config: the run, with its optimizer state in host memory and none of it persistent.
        budget: bytes of a device.
        solved: its remat.
        host: where activations may be moved to, beside that state.
        mesh: of the run.
        widths, placed: see ``solve``.
        error: bytes that a compiled program with persistent state took beyond the sum of its parts; may be negative.
    """
    model = run_model(config)
    state = run_state(config, model, build_optimizer(config, model), mesh.abstract()).opt_state
    sizes = [shard_bytes(one) for one in jax.tree.leaves(state) if one.sharding.memory_kind == "pinned_host"]
    micro, measure = DeviceWork.of(config, mesh).micro_batches, modelled(config.model, solved, widths)
    more = error + max(0, solved.bytes - measure(solved.remat).device)  # of a mixed program beyond the sum of its parts
    plans: list[PersistentPlan] = []
    for share in SHARES:
        stays = sum(sizes[n] for n in persistent_arrays(sizes, share))
        if any(plan.stays == stays for plan in plans):
            continue
        found = solved
        if stays:
            there = dataclasses.replace(host, bytes=host.bytes + stays)
            try:
                found = solve(config, budget - stays - more, measure, there, widths, placed)
            except RematError:
                break
        passes = micro * (found.flops * host.seconds_per_flop + found.chosen.exposed)
        streamed = sum(sizes) - stays
        seconds = passes + streamed * host.seconds_per_byte
        plans.append(
            PersistentPlan(share, found.remat, stays, streamed, found.bytes + (stays + more if stays else 0), seconds)
        )
    return plans


def fastest_that_fits(
    plans: list[PersistentPlan],
    budget: int,
    host: HostTier,
    measure: Callable[[PersistentPlan], StepBytes],
    again: Callable[[int], list[PersistentPlan]] | None = None,
) -> PersistentPlan:
    """The plan of least predicted time whose compiled step fits, with its measured bytes.

    Args:
        plans: from ``persistent_plans``; the first is known to fit.
        budget: bytes of a device.
        host: where activations may be moved to, beside the state.
        measure: compiles the step of a plan.
        again: the plans with an ``error`` in their predicted bytes: asked where all that were compiled are over the
            budget, and where one that fits leaves much of it.
    """
    over: dict[tuple[float, str], int] = {}  # bytes that those over the budget took beyond their prediction

    def fitting(plan: PersistentPlan) -> PersistentPlan | None:
        found = measure(plan)
        if found.device > budget:
            over[plan.share, plan.remat] = found.device - plan.bytes
        fits = found.device <= budget and found.host <= host.bytes + plan.stays
        return plan._replace(bytes=found.device) if fits else None

    def by_time(plans: list[PersistentPlan]) -> list[PersistentPlan]:
        return sorted(plans, key=lambda plan: plan.seconds)[:COMPILED]

    def fuller(best: PersistentPlan, error: int) -> PersistentPlan:
        """A faster plan that uses more of the budget, by what this one took beyond its parts; else this one."""
        if again is not None and best.bytes < CLOSE * budget:
            for plan in by_time(again(error)):
                new = plan.seconds < best.seconds and (plan.share, plan.remat) not in over
                if new and (found := fitting(plan)) is not None:
                    return found
        return best

    for plan in by_time(plans):
        if plan is plans[0]:
            break
        if (best := fitting(plan)) is not None:
            return fuller(best, best.bytes - plan.bytes)
    for error in sorted(over.values()):  # with what they took more in mind, the least first
        if again is None:
            break
        first, *others = again(error)
        others = [plan for plan in others if (plan.share, plan.remat) not in over]
        one = min(others, key=lambda plan: plan.seconds, default=first)
        if one.seconds < first.seconds and (best := fitting(one)) is not None:
            return fuller(best, error + best.bytes - one.bytes)
    return plans[0]


def modelled(model: DecoderConfig, solved: RematSolution, widths: Mapping[str, float] | None = None) -> Measure:
    """Bytes of a step with any remat as a sum over layers, from the policies that were measured for all of them.

    Args:
        model: the model.
        solved: its remat, with the named policies.
        widths: bytes of each value, see ``solve``.
    """
    named, base = solved.named, solved.named["full"]
    sizes = {name: ((one.bytes - base.bytes) / model.layers, one.host / model.layers) for name, one in named.items()}
    values = value_sizes(model, {name: here for name, (here, _) in sizes.items()}, widths)

    def part(name: str) -> tuple[float, float]:
        """Bytes of a layer with a policy on the device, beside what "full" saves, and on the host."""
        if name in sizes:
            return sizes[name]
        if (share := offloaded_share(name)) is not None:
            none, whole = sizes["offload:0"], sizes["offload"]
            return none[0] + share * (whole[0] - none[0]), none[1] + share * (whole[1] - none[1])
        return places_bytes(name, values)

    def measure(remat: str) -> StepBytes:
        parts = [part(name) for name in policies_by_layer(remat, model.segments)]
        return StepBytes(round(base.bytes + sum(here for here, _ in parts)), round(sum(there for _, there in parts)))

    return measure
