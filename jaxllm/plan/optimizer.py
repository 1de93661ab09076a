"""What an optimizer keeps on a device."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax

from jaxllm.models import DecoderConfig
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer
from jaxllm.plan.work import Work, architecture, cached_model, rules_of
from jaxllm.train.state import abstract_state
from sharding import MeshSpec, Rules

STEPS = 8
"""Bytes of AdamW's two counters, beside its two moments of each parameter."""


def state_bytes(work: Work, parameters: int) -> int:
    """Of a device's optimizer state.

    Args:
        parameters: bytes of the device's parameters; AdamW's state is twice that. Of other rules the state itself is
            asked, nothing allocated.
    """
    optim = work.run.optim
    if optim.kind == "adamw":
        return 2 * parameters + STEPS
    same = replace(optim, schedule=ScheduleConfig())  # the key of what is computed once
    return _abstract_bytes(architecture(work.run.model), same, rules_of(work.run.parallel), work.mesh)


@functools.lru_cache(maxsize=1024)
def _abstract_bytes(config: DecoderConfig, optim: OptimConfig, rules: Rules, mesh: MeshSpec) -> int:
    model = cached_model(config, rules)
    state = abstract_state(model, optimizer(optim, 1, model.logical_axes()), mesh.abstract())
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state.opt_state)
    )
