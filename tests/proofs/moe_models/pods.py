"""DeepSeek-V3 and Qwen3-235B-A22B at full size: steps that type-check, and compile for slices that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxllm.compiler import aot
from jaxllm.config import from_dict, to_dict
from jaxllm.data import Batch
from jaxllm.models import functional, param_count
from jaxllm.optim import optimizer, schedule
from jaxllm.train import RunConfig, abstract_state, loss_sums, train_step
from jaxllm.train.compile_step import compile_for, compiler_options, step_on
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.step.step_builder import step_links
from jaxllm.train.step.step_links import routing_report
from recipes.deepseek import deepseek_v3
from recipes.qwen import qwen3_235b_a22b
from sharding.isolate import run_isolated
from sharding.topology import Topology
from tests.proofs.harness import proof

RECIPES: dict[str, tuple[Callable[[], RunConfig], str, int]] = {
    "deepseek_v3": (deepseek_v3, "v5p:8x8x8", 671_026_419_200),
    "qwen3_235b_a22b": (qwen3_235b_a22b, "v5p:4x8x8", 235_093_634_560),
}
"""The recipe, a slice that holds its training, and how many parameters the published model has."""
STATE_BYTES = 4 * 3  # float32 parameter and two moments


def forward_of(run: RunConfig) -> Callable[[Any, Batch], Any]:
    """Loss of a batch in evaluation: the forward pass, whose logits never exist all at once."""
    model = functional(run.model, run.parallel.rules())
    return lambda params, batch: loss_sums(model, params, batch)


def of_abstract(run: RunConfig, mesh: Mesh | AbstractMesh) -> tuple[Any, Any, Batch]:
    """The training step, and a state and a batch without values, on a mesh."""
    model = functional(run.model, run.parallel.rules())
    transform = optimizer(run.optim, run.steps, model.logical_axes())
    state, rate = abstract_state(model, transform, mesh), schedule(run.optim.schedule, run.steps)
    step = train_step(
        build_value_and_grad(run, model, mesh), transform, rate, step_links(run), [routing_report(run.model)]
    )
    shape = (run.data.batch_size, run.data.seq_len)
    spec = model.rules.spec(("batch", "seq"), mesh, shape, what="batch")
    tokens: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))
    return step, state, Batch(tokens, tokens, tokens, tokens)


@proof("moe_models", cases=tuple(RECIPES), sample=1)
def types_on_an_abstract_mesh(recipe: str) -> None:
    """Forward and train step, traced for hundreds of devices of which there are none: every split of every array."""
    make, on, parameters = RECIPES[recipe]
    run = make()
    model = functional(run.model, run.parallel.rules())
    assert param_count(model.abstract()) == parameters
    mesh = fitting_mesh(run, model, Topology.parse(on).num_devices).abstract()
    step, state, batch = of_abstract(run, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        after, metrics = jax.eval_shape(step, state, batch)
        sums = jax.eval_shape(forward_of(run), state.params, batch)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype, a.sharding.spec) == (b.shape, b.dtype, b.sharding.spec),
                        after.params, state.params)  # fmt: skip
    assert all(jax.tree.leaves(same)), same
    assert sums.nll.shape == metrics["loss"].shape == ()


def forward_here(topology: Topology, config: dict[str, Any]) -> dict[str, Any]:
    """The forward pass compiled in this process, which must be set up for the topology's compiler."""
    run = from_dict(RunConfig, config)
    _, (state, batch), mesh = step_on(topology, run)
    forward = jax.jit(forward_of(run))
    options = compiler_options(topology, run)
    report = aot.compile(forward, state.params, batch, topology=topology, mesh=mesh, name=run.name, options=options)
    return report.to_json()


def forward_for(run: RunConfig, on: str) -> aot.CompileReport:
    """In a process of its own."""
    target = f"{__name__}:{forward_here.__name__}"
    return aot.CompileReport.from_json(run_isolated(target, on, {"config": to_dict(run)}))


PROGRAMS: dict[str, Callable[[RunConfig, str], aot.CompileReport]] = {"train": compile_for, "forward": forward_for}
CASES = tuple((recipe, program) for recipe in RECIPES for program in PROGRAMS)


@proof("moe_models", cases=CASES, sample=1, bound={"of_memory": 1.0, "GiB": 95.73})
def pods(case: tuple[str, str]) -> dict[str, float]:
    """The share of a chip's memory that the program takes, and how much that is."""
    recipe, program = case
    make, on, parameters = RECIPES[recipe]
    report = PROGRAMS[program](make(), on)
    print(report)
    assert report.hbm_bytes is not None
    assert "ragged-all-to-all" in {row.kind for row in report.collectives}  # tokens go to their experts
    state = STATE_BYTES if program == "train" else STATE_BYTES / 3
    # Parameters (and moments) are divided over all chips; the batch is small beside them.
    assert abs(report.argument_bytes * report.num_devices / (parameters * state) - 1) < 0.01
    return {"of_memory": report.total_bytes / report.hbm_bytes, "GiB": report.total_bytes / 2**30}
