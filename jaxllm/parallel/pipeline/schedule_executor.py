"""Pipeline executor: one program for every schedule, a loop over ticks in which each stage runs its operation.

The program is manual over ``stage``, ``data`` and ``fsdp`` (``jax.shard_map``): the operation of a stage is a branch of
``jax.lax.switch``, activations and their gradients are sent by ``ppermute``, and weights are all-gathered and gradients
summed over ``data`` and ``fsdp`` by explicit collectives. All other axes stay explicit, so that a layer is split over
them as without a pipeline; devices along them are in the same stage and take the same branch.

The embedding is part of the first virtual stage's operations. The head and the loss are part of the last one's F, which
passes the gradient of its output to its B. Their weights are stored split over ``stage`` and all-gathered on every
stage for the time of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array

import sharding
from jaxllm.models.param_subset import select
from jaxllm.parallel.pipeline.pipeline_step import MANUAL, Head, Pipeline, PipelineStep
from jaxllm.parallel.pipeline.schedule import ScheduleError
from jaxllm.parallel.pipeline.stage_collectives import (
    after_entry,
    after_exit,
    before_entry,
    before_exit,
    is_spec,
    only,
)
from pallas_kernels._compat import target_device


def sums_and_grads(pipeline: Pipeline, params: Any, parts: Any, total: Array, head: Head) -> tuple[Any, Any, Any]:
    """Sums of the head and of the aux-loss collector over all micro-batches, and gradients sharded as the parameters.

    The gradients are those of ``sums.loss / total`` plus the auxiliary losses.

    Args:
        params: parameters of the model, sharded by its rules.
        parts: batch split into micro-batches: Int[M B S] each.
        total: number of targets of the batch.
        head: output head and loss.
    """
    step = _mapped(pipeline, lambda step: step.run(), head, (params, parts, total), gradients=True)
    return step(params, parts, total)


def sums(pipeline: Pipeline, params: Any, parts: Any, head: Head) -> Any:
    """Sums of the head over all micro-batches (evaluation), for a schedule with forward operations alone."""
    total = jnp.ones((), pipeline.model.config.dtype)
    return _mapped(pipeline, lambda step: step.run_forward(), head, (params, parts, total), gradients=False)(
        params, parts, total
    )


def _check(pipeline: Pipeline, mesh: AbstractMesh) -> None:
    """Checks that no layer has a collective-permute on CPU, where it would wait for devices in other branches.

    Raises:
        ScheduleError: a layer would.
    """
    rings = {*pipeline.model.rules.mesh_axes("attn_kv_seq"), *pipeline.model.rules.rings}
    if target_device().platform == "cpu" and any(mesh.shape.get(axis, 1) > 1 for axis in rings):
        raise ScheduleError(
            "pipeline: on CPU, layers cannot use ring attention or collective matmuls (XLA:CPU would mix up the "
            "transfers of different stages): choose --parallel.context all_gather and --parallel.overlap compiler."
        )


def _mapped(
    pipeline: Pipeline, run: Callable[[PipelineStep], Any], head: Head, arguments: Any, *, gradients: bool
) -> Any:
    params = arguments[0]
    mesh = jax.sharding.get_abstract_mesh()
    _check(pipeline, mesh)
    # A training step of replicas is manual over them already; an evaluation is of the rows of all.
    manual = tuple(a for a in MANUAL if mesh.shape.get(a, 1) > 1 and a not in mesh.manual_axes)
    rules = pipeline.model.rules
    whole = jax.tree.map(lambda leaf, axes: rules.spec(axes, mesh, leaf.shape), params, pipeline.model.logical_axes())
    stored = jax.tree.map(lambda spec: only(spec, manual), whole, is_leaf=is_spec)
    trained_whole, trained_stored = (select(pipeline.trainable, specs) for specs in (whole, stored))
    rows = only(rules.spec((None, "batch", "seq"), mesh), manual)

    def local(params: Any, parts: Any, total: Array) -> Any:
        params = jax.tree.map(lambda x, spec: after_entry(x, spec, manual), params, whole)
        with sharding.use_rules(rules):
            made = run(PipelineStep(pipeline, mesh, manual, stored, head, params, parts, total))
        if not gradients:
            return made
        return *made[:-1], jax.tree.map(lambda x, spec: before_exit(x, spec, manual), made[-1], trained_whole)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(stored, rows, jax.P()),
        out_specs=(jax.P(), jax.P(), trained_stored) if gradients else jax.P(),
        axis_names=set(manual),
        check_vma=False,
    )

    def across(params: Any, parts: Any, total: Array) -> Any:
        params = jax.tree.map(lambda x, spec: before_entry(x, spec, manual), params, whole)
        made = mapped(params, parts, total)
        if not gradients:
            return made
        return *made[:-1], jax.tree.map(lambda x, spec: after_exit(x, spec, manual), made[-1], trained_whole)

    return across
