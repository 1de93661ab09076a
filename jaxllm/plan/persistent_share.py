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
"""Shares whose step is compiled for one error in the predicted bytes, the fastest first."""
MOST_COMPILED = 9
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
        again: the plans with an ``error`` in their predicted bytes: asked for what compiled ones took beyond their
            parts, the least first, while none fits or the one that does leaves much of the budget.
    """
    best, errors, tried = plans[0], [0], set[tuple[float, str]]()
    while errors and len(tried) < MOST_COMPILED and (best is plans[0] or best.bytes < CLOSE * budget):
        errors.sort()
        error = errors.pop(0)
        found = plans if not error or again is None else again(error)
        new = [one for one in found if one.seconds < best.seconds and (one.share, one.remat) not in tried]
        # Where errors are too small one plan shows it, whose own error is the next.
        many = min(1 if error and best is plans[0] else COMPILED, MOST_COMPILED - len(tried))
        for plan in sorted(new, key=lambda plan: plan.seconds)[:many]:
            tried.add((plan.share, plan.remat))
            took = measure(plan)
            beyond = error + took.device - plan.bytes
            if again is not None and beyond not in errors and beyond != error:
                errors.append(beyond)
            if took.device <= budget and took.host <= host.bytes + plan.stays:
                best = plan._replace(bytes=took.device)
                break
    return best


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
