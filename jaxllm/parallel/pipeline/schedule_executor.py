"""One program for every schedule: a loop over ticks in which each stage does what the table says.

The program is manual over ``stage``, ``data`` and ``fsdp`` (``jax.shard_map``): which operation a stage does is a
branch of ``jax.lax.switch``, messages are ``ppermute``d, weights are gathered and gradients summed over ``data`` and
``fsdp`` by hand. All other axes stay explicit, so that a layer is split over them as it is without a pipeline; devices
along them are in the same stage, and take the same branch.

The embedding belongs to the first virtual stage's operations and the head with the loss to the last one's F, which
hands the gradient of its own output to its B. Their weights are stored split over ``stage`` and whole on every stage
during a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array

import sharding
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
    """The head's and the listener's sums over all micro-batches, and gradients, as and where the parameters are.

    The gradients are those of ``sums.loss / total`` and of the listener's losses.

    Args:
        params: of the model, stored by its rules.
        parts: a batch, cut: Int[M B S] each.
    """
    step = _mapped(pipeline, lambda step: step.run(), head, (params, parts, total), gradients=True)
    return step(params, parts, total)


def sums(pipeline: Pipeline, params: Any, parts: Any, head: Head) -> Any:
    """Sums over all micro-batches; of a schedule with forward operations alone."""
    total = jnp.ones((), pipeline.model.config.dtype)
    return _mapped(pipeline, lambda step: step.run_forward(), head, (params, parts, total), gradients=False)(
        params, parts, total
    )


def _check(pipeline: Pipeline, mesh: AbstractMesh) -> None:
    """XLA:CPU lets a permutation wait for all devices of the program, also those in another branch.

    Raises:
        ScheduleError: a layer would permute, on CPU.
    """
    rings = {*pipeline.model.rules.mesh_axes("attn_kv_seq"), *pipeline.model.rules.rings}
    if target_device().platform == "cpu" and any(mesh.shape.get(axis, 1) > 1 for axis in rings):
        raise ScheduleError(
            "pipeline: on CPU, stages cannot send keys or products around a ring of their own (XLA:CPU would mix "
            "up what they send): choose --parallel.context all_gather and --parallel.overlap compiler."
        )


def _mapped(
    pipeline: Pipeline, run: Callable[[PipelineStep], Any], head: Head, arguments: Any, *, gradients: bool
) -> Any:
    params = arguments[0]
    mesh = jax.sharding.get_abstract_mesh()
    _check(pipeline, mesh)
    manual = tuple(a for a in MANUAL if mesh.shape.get(a, 1) > 1)
    rules = pipeline.model.rules
    whole = jax.tree.map(lambda leaf, axes: rules.spec(axes, mesh, leaf.shape), params, pipeline.model.logical_axes())
    stored = jax.tree.map(lambda spec: only(spec, manual), whole, is_leaf=is_spec)
    rows = only(rules.spec((None, "batch", "seq"), mesh), manual)

    def local(params: Any, parts: Any, total: Array) -> Any:
        params = jax.tree.map(lambda x, spec: after_entry(x, spec, manual), params, whole)
        with sharding.use_rules(rules):
            made = run(PipelineStep(pipeline, mesh, manual, stored, head, params, parts, total))
        if not gradients:
            return made
        return *made[:-1], jax.tree.map(lambda x, spec: before_exit(x, spec, manual), made[-1], whole)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(stored, rows, jax.P()),
        out_specs=(jax.P(), jax.P(), stored) if gradients else jax.P(),
        axis_names=set(manual),
        check_vma=False,
    )

    def across(params: Any, parts: Any, total: Array) -> Any:
        params = jax.tree.map(lambda x, spec: before_entry(x, spec, manual), params, whole)
        made = mapped(params, parts, total)
        if not gradients:
            return made
        return *made[:-1], jax.tree.map(lambda x, spec: after_exit(x, spec, manual), made[-1], whole)

    return across
