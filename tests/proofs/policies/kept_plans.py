"""Plans that compute nothing again for what they move: bit by bit the plan that has everything on the device."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st

from jaxllm.models.remat import save_policy
from tests import environment
from tests.proofs.harness import proof
from tests.proofs.policies.drawn_plans import (
    FAMILIES,
    MESHES,
    DrawnPlan,
    differing,
    loss_and_grads,
    own_values,
    stepped,
)

KINDS = ("state", "state", "values")


@st.composite
def moving_plans(draw: st.DrawFn) -> tuple[DrawnPlan, DrawnPlan]:
    """A plan that moves something, and the same one with everything on the device.

    It keeps every value, and has its optimizer state on the host or on disk, or offloads activations of stages. Or it
    has all named values of its blocks, and some of them on the host, with its state anywhere; elementwise operations
    between them are computed again in both plans.
    """
    family = draw(st.sampled_from(sorted(FAMILIES)))
    meshes = [mesh for mesh in MESHES if ("expert" not in mesh or family == "mixture")]
    mesh = draw(st.sampled_from([mesh for mesh in meshes if family != "latent" or "context" not in mesh]))
    staged = "stage" in mesh
    kind = "stages" if staged else draw(st.sampled_from(KINDS))
    accumulate, seed = draw(st.sampled_from((2, 4) if staged else (1, 2))), draw(st.integers(0, 3))
    home = DrawnPlan(family, mesh, "none", accumulate, 0.0, seed)
    if kind == "stages":
        return home._replace(offload=draw(st.sampled_from((0.5, 1.0)))), home
    if kind == "state":
        return home._replace(state=draw(st.sampled_from(("host", "disk")))), home
    own = own_values(family)
    away = draw(st.lists(st.sampled_from(own), min_size=1, max_size=len(own), unique=True))
    there = save_policy([name for name in own if name not in away], [*away, *draw(st.sampled_from(([], ["input"])))])
    state = draw(st.sampled_from(("device", "host", "disk")))
    return home._replace(remat=there, state=state), home._replace(remat=save_policy(own))


@functools.cache
def at_home(plan: DrawnPlan) -> tuple[Any, Any]:
    """Loss and gradients, and parameters and state after two steps, of a plan that moves nothing."""
    return loss_and_grads(plan), stepped(plan)


@proof("policies", count=40, sample=1, strategy=moving_plans().filter(lambda plans: plans[0].allowed), float64=True)
def moved_plans_are_bitwise(plans: tuple[DrawnPlan, DrawnPlan]) -> None:
    """Loss, gradients, and parameters and optimizer state after two steps."""
    moving, home = plans
    with environment.optimized(False):
        grads, states = at_home(home)
        for what, found, want in (("gradients", loss_and_grads(moving), grads), ("state", stepped(moving), states)):
            count = differing(found, want)
            assert not count, f"{count} arrays of {what} differ in a bit"
