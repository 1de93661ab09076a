"""Bytes of a run's training step on one device, estimated from its jaxpr: nothing is compiled, no device is needed."""

from __future__ import annotations

import jax

from jaxllm.plan.graphs.peak_estimate import StepEstimate, estimate
from jaxllm.train.compile_step import abstract_batch, step_settings
from jaxllm.train.config import RunConfig
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import build_optimizer, build_step, run_state
from sharding import MeshSpec


def estimate_step(config: RunConfig, mesh: MeshSpec) -> StepEstimate:
    """Estimated bytes of a run's step on one device of a mesh; the train state is donated.

    Raises:
        ShardingError, ConfigError: the run does not fit the mesh.
    """
    run = step_settings(config)
    model, abstract = run_model(run), mesh.abstract()
    optimizer = build_optimizer(run, model)
    with jax.sharding.use_abstract_mesh(abstract):
        state = run_state(run, model, optimizer, abstract)
        step = build_step(run, model, build_value_and_grad(run, model, abstract), optimizer)
        batch = abstract_batch(run, model, abstract)
        jaxpr = jax.make_jaxpr(step)(state, batch)
    held, given = (len(jax.tree.leaves(one)) for one in (state, batch))
    return estimate(jaxpr, [True] * held + [False] * given)
