"""Plans of what is kept, computed again or moved to the host, drawn on every kind of mesh: gradients of one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from hypothesis import strategies as st

from jaxllm.models.remat import VALUES, save_policy
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.run import build_value_and_grad
from sharding import shardings_of
from tests import quick, tiny
from tests.proofs.harness import proof
from tests.train.outer_runs import batch_at, parts_of, run_of

LAYERS, ALONE = 4, "data=1"
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"bias": "all"},
    "norms on both sides": {"norms": "sandwich", "qk_norm": "head"},
    "mixture": {"moe": (4, 2, 8, True)},
    "latent": {"latent": 8},
}
MESHES = (
    *(ALONE, "fsdp=4", "tensor=2", "fsdp=2,tensor=2", "data=2,fsdp=2,tensor=2", "context=2,fsdp=2", "expert=2,fsdp=2"),
    *("stage=2", "stage=2,fsdp=2", "stage=2,tensor=2", "stage=4", "stage=2,expert=2"),
)
POLICIES = ("none", "elementwise", "attention", "full")
OF_STAGES = ("none", "elementwise", "full")
MOVED = ("offload", "offload:0.25", "offload:0.5")


class DrawnPlan(NamedTuple):
    """Plan of a run: family, mesh, remat policies by layers, micro-batches, and share offloaded by stages."""

    family: str
    mesh: str
    remat: str
    accumulate: int
    offload: float
    seed: int

    def run(self) -> RunConfig:
        """The run with this plan."""
        model = tiny.decoder(layers=LAYERS, kv_heads=4, remat=self.remat, **FAMILIES[self.family])
        parallel = ParallelConfig(offload=self.offload)
        return run_of(self.mesh, OuterConfig(), model=model, accumulate=self.accumulate, parallel=parallel)


def placed(family: str) -> st.SearchStrategy[str]:
    """Policies that keep some of a family's values on the device, and some on the host."""
    block = tiny.decoder(**FAMILIES[family]).pattern[0]
    own = [one.name for one in block.matmul_values(16) if one.name in VALUES]

    def policy(places: Sequence[str]) -> str:
        named = list(zip([*own, "input"], places, strict=True))
        here = [name for name, place in named if place == "device" and name != "input"]
        return save_policy(here, [name for name, place in named if place == "host"])

    place = st.sampled_from(("device", "again", "again", "host"))
    return st.lists(place, min_size=len(own) + 1, max_size=len(own) + 1).map(policy)


@st.composite
def plans(draw: st.DrawFn) -> DrawnPlan:
    """A plan that the table of combinations allows."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    meshes = [mesh for mesh in MESHES if ("expert" not in mesh or family == "mixture")]
    mesh = draw(st.sampled_from([mesh for mesh in meshes if family != "latent" or "context" not in mesh]))
    staged = "stage" in mesh
    one = st.sampled_from(POLICIES + MOVED) | placed(family)
    count = draw(st.integers(1, 3))
    if staged:  # the layers of all stages run one program
        remat = draw(st.sampled_from(OF_STAGES))
    elif count == 1:
        remat = draw(one | st.just("sqrt"))
    else:
        cuts = sorted(draw(st.lists(st.integers(1, LAYERS - 1), min_size=count - 1, max_size=count - 1, unique=True)))
        counts = [b - a for a, b in zip((0, *cuts), (*cuts, LAYERS), strict=True)]
        remat = ",".join(f"{draw(one)}={n}" for n in counts)
    accumulate = draw(st.sampled_from((2, 4) if staged else (1, 2)))
    offload = draw(st.sampled_from((0.0, 0.5, 1.0))) if staged and remat == "none" else 0.0
    return DrawnPlan(family, mesh, remat, accumulate, offload, draw(st.integers(0, 3)))


def loss_and_grads(plan: DrawnPlan) -> tuple[float, Any]:
    """Mean loss and gradients of a batch under a plan."""
    run = plan.run()
    model, _, mesh, abstract, _ = parts_of(run)
    with jax.set_mesh(mesh):
        take = quick.jit(build_value_and_grad(run, model, mesh))
        params = jax.device_put(quick.params(run.model, plan.seed), shardings_of(abstract.params))
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        sums, grads = take(params, jax.device_put(batch_at(plan.seed), there))
        return float(sums.loss / sums.count), jax.device_get(grads)


@functools.cache
def of_one_device(family: str, seed: int) -> tuple[float, Any]:
    """Loss and gradients with everything kept."""
    return loss_and_grads(DrawnPlan(family, ALONE, "none", 1, 0.0, seed))


@proof("policies", count=100, sample=1, strategy=plans(), float64=True, bound={"loss": 1e-10, "grads": 1e-10})
def plans_are_one_device(plan: DrawnPlan) -> dict[str, float]:
    """Loss and gradients under a drawn plan, against those of one device that keeps everything."""
    (loss, grads), (want, wanted) = loss_and_grads(plan), of_one_device(plan.family, plan.seed)
    return {"loss": abs(loss / want - 1), "grads": tiny.leaf_error(grads, wanted)}
