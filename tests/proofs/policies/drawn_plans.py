"""Plans of what is kept, computed again or moved, and where optimizer state is, drawn on every kind of mesh."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st

from jaxllm.models.remat import VALUES, save_policy
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig
from jaxllm.train.combinations import refused
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_step import DiskStep, compiled_programs, lowered_programs
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.step.step_builder import build_disk_step, init_run_state
from sharding import MeshSpec, shardings_of
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
STATES = ("device", "device", "host", "disk")
STEPS = 2
OPTIONS = quick.OPTIONS | ({"xla_cpu_parallel_codegen_split_count": 1} if jax.__version_info__ < (0, 12) else {})
"""A CPU program is compiled as one part: in several, XLA rounds an instruction by what is compiled beside it."""


class DrawnPlan(NamedTuple):
    """Plan of a run: family, mesh, remat policies by layers, micro-batches, share offloaded by stages, and the place of
    its optimizer state.
    """

    family: str
    mesh: str
    remat: str
    accumulate: int
    offload: float
    seed: int
    state: str = "device"

    def run(self, folder: str = "files") -> RunConfig:
        """The run with this plan; files of its state are in a folder."""
        model = tiny.decoder(layers=LAYERS, kv_heads=4, remat=self.remat, **FAMILIES[self.family])
        return run_of(
            self.mesh,
            OuterConfig(),
            model=model,
            accumulate=self.accumulate,
            parallel=ParallelConfig(offload=self.offload),
            host=HostConfig(optimizer=self.state == "host"),
            disk=DiskConfig(folder, window=2) if self.state == "disk" else DiskConfig(),
        )

    @property
    def allowed(self) -> bool:
        """Whether the table of combinations has nothing against it."""
        return not refused(self.run(), dict(MeshSpec.parse(self.mesh).axes), "cpu")


def own_values(family: str) -> list[str]:
    """Values of a family's block that policies may keep."""
    block = tiny.decoder(**FAMILIES[family]).pattern[0]
    return [one.name for one in block.matmul_values(16) if one.name in VALUES]


def placed(family: str) -> st.SearchStrategy[str]:
    """Policies that keep some of a family's values on the device, and some on the host."""
    own = own_values(family)

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
    plan = DrawnPlan(family, mesh, remat, accumulate, offload, draw(st.integers(0, 3)))
    return draw(st.sampled_from([one for state in STATES if (one := plan._replace(state=state)).allowed]))


def loss_and_grads(plan: DrawnPlan) -> tuple[float, Any]:
    """Mean loss and gradients of a batch under a plan."""
    run = plan.run()
    model, _, mesh, abstract, _ = parts_of(run)
    with jax.set_mesh(mesh):
        take = jax.jit(build_value_and_grad(run, model, mesh), compiler_options=OPTIONS)
        params = jax.device_put(quick.params(run.model, plan.seed), shardings_of(abstract.params))
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        sums, grads = take(params, jax.device_put(batch_at(plan.seed), there))
        return float(sums.loss / sums.count), jax.device_get(grads)


def stepped(plan: DrawnPlan) -> tuple[Any, list[Any]]:
    """Parameters and optimizer state after two steps of AdamW under a plan, in the host's memory."""
    with tempfile.TemporaryDirectory() as folder:
        run = plan.run(folder)
        model, transform, mesh, abstract, step = parts_of(run)
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        batches = [jax.device_put(batch_at(plan.seed + number), there) for number in range(STEPS)]
        files = None
        with jax.set_mesh(mesh):
            params = jax.device_put(quick.params(run.model, plan.seed), shardings_of(abstract.params))
            if plan.state == "disk":
                files = StateFiles(run.disk, abstract.opt_state)
                abstract = dataclasses.replace(abstract, opt_state=files.leaves())
                programs = build_disk_step(run, model, build_value_and_grad(run, model, mesh), abstract, files)
                given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), batches[0])
                step = DiskStep(compiled_programs(lowered_programs(programs, abstract, given, files), OPTIONS), files)
            else:
                step = jax.jit(
                    step, donate_argnums=0, out_shardings=(shardings_of(abstract), None), compiler_options=OPTIONS
                )
            state = init_run_state(run, model, transform, mesh, abstract, params, files)
            for batch in batches:
                state, _ = step(state, batch)
            if files is None:
                return jax.device_get(state.params), [np.asarray(x) for x in jax.tree.leaves(state.opt_state)]
            leaves = jax.tree.leaves(files.leaves())
            restored = iter(files.kept_of(state.opt_state))
            found = [np.asarray(next(restored)) if n in files.kept else values(x) for n, x in enumerate(leaves)]
            return jax.device_get(state.params), found


def values(leaf: Any) -> np.ndarray:
    """Values of an array that is in files, as a checkpoint has them."""
    whole = np.zeros(leaf.shape, leaf.dtype)
    files = leaf.owner.tier.freeze()
    for row, (unit, shards) in enumerate(leaf.owner.rows_of(leaf.number)):
        for number, index in enumerate(shards.parts):
            part = files[unit].read_part(shards.first + number).view(shards.dtype).reshape(shards.part_shape)
            place = (slice(row, row + 1), *index[1:]) if leaf.owner.units[unit].segment else index
            whole[place] = part
    return whole


def differing(one: Any, other: Any) -> int:
    """Number of arrays of two trees that differ in a bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)


@functools.cache
def stepped_on_one_device(family: str, seed: int) -> tuple[Any, list[Any]]:
    """Parameters and optimizer state with everything kept, on the device."""
    return stepped(DrawnPlan(family, ALONE, "none", 1, 0.0, seed))


@functools.cache
def of_one_device(family: str, seed: int) -> tuple[float, Any]:
    """Loss and gradients with everything kept."""
    return loss_and_grads(DrawnPlan(family, ALONE, "none", 1, 0.0, seed))


@proof(
    "policies",
    count=100,
    sample=1,
    strategy=plans(),
    float64=True,
    bound={"loss": 1e-10, "grads": 1e-10},
)
def plans_are_one_device(plan: DrawnPlan) -> dict[str, float]:
    """Loss and gradients under a drawn plan, against those of one device that keeps everything. Where the optimizer
    state is on the host or on disk, also parameters and state after two steps; bits: ``moved_plans_are_bitwise``.
    """
    (loss, grads), (want, wanted) = loss_and_grads(plan), of_one_device(plan.family, plan.seed)
    if plan.state != "device":
        found = stepped(plan)
        error = tiny.leaf_error(list(found), list(stepped_on_one_device(plan.family, plan.seed)))
        assert error <= 1e-10, f"parameters and state after {STEPS} steps differ by {error:.3g}"
    return {"loss": abs(loss / want - 1), "grads": tiny.leaf_error(grads, wanted)}
