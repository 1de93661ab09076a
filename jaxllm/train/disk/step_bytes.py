"""Bytes that a streamed step takes on a device, from its compiled programs."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxllm.train.disk.disk_step import DiskStepPrograms
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.step.train_state import TrainState


def disk_step_bytes(compiled: DiskStepPrograms, abstract: TrainState, files: StateFiles) -> int:
    """Peak bytes of a device over the programs of a step.

    Gradients: parameters, batch, temporaries and gradients. Update: parameters and gradients, one unit's temporaries,
    the state before and after of the layers in the window and of what is outside of layers. End: parameters and
    temporaries. Where the device's memory is the host's, the state before is the window's buffers.

    Args:
        compiled: programs of the step.
        abstract: the train state.
        files: of the optimizer state.
    """
    resident = shard_bytes((abstract.params, abstract.extras))
    gradients: Any = compiled.gradients.memory_analysis()
    grads: int = gradients.output_size_in_bytes
    temporaries = [one.memory_analysis().temp_size_in_bytes for one in compiled.updates.values()]
    units = {segment: shard_bytes(files.abstract_rows(segment)) for segment in compiled.updates}
    layers = max((size for segment, size in units.items() if segment), default=0)
    window = min(files.window, sum(1 for unit in files.units if unit.segment))
    update = resident + grads + max(temporaries, default=0) + 2 * (window * layers + units.get("", 0))
    finish: Any = compiled.finish.memory_analysis()
    return max(program_bytes(gradients), update, program_bytes(finish))


def program_bytes(memory: Any) -> int:
    """Bytes of a device that a program takes, by its ``memory_analysis``."""
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return sum(sizes) + memory.generated_code_size_in_bytes - memory.alias_size_in_bytes


def shard_bytes(tree: Any) -> int:
    """Bytes of abstract arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
