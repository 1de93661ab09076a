"""Recipes traced on meshes of absent devices: shapes, shardings, and the rules of explicit axes.

python -m tests.recipes.types [NAME]    the loss of every recipe, with CPU seconds; of NAME, the training step too

In an interpreter of its own, without the tests' checks of annotations, the times are what a user sees.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.recipes import recipes, topologies
from jaxllm.data import Batch
from jaxllm.models import functional, param_count
from jaxllm.optim import optimizer, schedule
from jaxllm.train import RunConfig, abstract_state, loss_sums, train_step
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import step_links
from jaxllm.train.step.step_chain import link_states
from jaxllm.train.step.step_links import routing_report
from sharding.topology import Topology


def checked(make: Callable[[], RunConfig], on: str, step: bool) -> dict:
    """Parameters, and CPU seconds of tracing the loss; asserts that the step gives back the state it took."""
    began = time.process_time()
    run = make()
    model = functional(run.model, run.parallel.rules())
    mesh = fitting_mesh(run, run_model(run), Topology.parse(on).num_devices).abstract()
    transform = optimizer(run.optim, run.steps, model.logical_axes())
    state = abstract_state(model, transform, mesh, extras=link_states(step_links(run)))
    shape = (run.data.batch_size, run.data.seq_len)
    spec = model.rules.spec(("batch", "seq"), mesh, shape, what="batch")
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))
    batch = Batch(tokens, tokens, tokens, tokens)  # type: ignore[arg-type]
    with jax.sharding.use_abstract_mesh(mesh):
        sums = jax.eval_shape(lambda params, batch: loss_sums(model, params, batch), state.params, batch)
        seconds = time.process_time() - began
        assert sums.nll.shape == (), sums
        if step:
            rate = schedule(run.optim.schedule, run.steps)
            grads = build_value_and_grad(run, model, mesh)
            whole = train_step(grads, transform, rate, step_links(run), [routing_report(run.model)])
            after, metrics = jax.eval_shape(whole, state, batch)
            assert metrics["loss"].shape == ()
            for before, now in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
                is_same = (before.shape, before.dtype, before.sharding.spec)
                assert is_same == (now.shape, now.dtype, now.sharding.spec), (make.__name__, before, now)
    for other in topologies(make):  # legal there too
        fitting_mesh(run, run_model(run), Topology.parse(other).num_devices)
    return {"parameters": param_count(model.abstract()), "seconds": seconds}


def main(whole: list[str]) -> None:
    """One JSON object: what was found, by recipe."""
    found = {}
    for name, make in recipes().items():
        on = (topologies(make) or ["cpu:1"])[0]
        found[name] = checked(make, on, name in whole)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
