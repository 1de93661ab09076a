"""Timeline of optimizer updates with the state in files: each layer as its gradients arrive, or all after the backward.

Fuyou (arXiv:2403.06504) reads, updates and writes a layer's state while the layers before it are still in the backward
pass; it stays synchronous: the numbers are those of updates after the backward pass. Both orders are played by the same
rule, in which the accelerator, the two directions of its link, the host's processor, and reads and writes of the disk
(pools of their own in ``jaxllm.train.disk.disk_tier``) each do one thing at a time, in the order in which it is issued.
Parameters are on the device at the start of the step and have to be there again at its end; streaming them for the
passes is not in this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxllm.plan.formulas import step_time
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.offload_time import HOST_WORDS, layer_elements
from jaxllm.plan.hardware import Cluster, HardwareError

Resource = Literal["accelerator", "link out", "link in", "host", "disk read", "disk write"]


class Task(NamedTuple):
    """Task of a resource.

    Attributes:
        name: unique.
        resource: what does it, in the order of tasks.
        seconds: how long it takes.
        after: names of earlier tasks that are done before it begins.
    """

    name: str
    resource: Resource
    seconds: float
    after: tuple[str, ...] = ()


def play(tasks: Sequence[Task]) -> dict[str, tuple[float, float]]:
    """Start and end of each task, which begins when its resource and what it waits for are done."""
    found: dict[str, tuple[float, float]] = {}
    free: dict[Resource, float] = {}
    for task in tasks:
        start = max([free.get(task.resource, 0.0), *(found[name][1] for name in task.after)])
        found[task.name] = (start, start + task.seconds)
        free[task.resource] = start + task.seconds
    return found


class LayerTimes(NamedTuple):
    """Seconds of a layer in a step.

    Attributes:
        backward: its backward pass.
        gradients: its gradients to the host.
        read, write: its optimizer state from and to the disk.
        host_update: update on the host's processor.
        parameters: its updated parameters to the device.
        state: its optimizer state to the device or back.
        device_update: update on the device.
    """

    backward: float
    gradients: float
    read: float
    write: float
    host_update: float
    parameters: float
    state: float
    device_update: float


class UpdateSpan(NamedTuple):
    """Length of a step, and how long its accelerator works.

    Attributes:
        seconds: until every layer is updated, and its state written.
        busy: seconds of the accelerator's tasks.
    """

    seconds: float
    busy: float

    @property
    def idle(self) -> float:
        """Seconds in which the accelerator waits."""
        return self.seconds - self.busy


def update_tasks(
    layers: Sequence[LayerTimes], forward: float, window: int, *, arriving: bool, on: Literal["host", "device"] = "host"
) -> list[Task]:
    """Tasks of a step whose layers are updated in the order of the backward pass.

    The state of ``window`` layers is in the host's memory: that of a layer is read when that of the ``window``-th layer
    before it is written. Reads begin with the step, in both orders.

    Args:
        layers: in the order of the forward pass.
        forward: seconds of the forward pass.
        window: layers whose state is in memory.
        arriving: update each layer as its gradients arrive; else all after the backward pass.
        on: what updates, the host's processor or the device, to which the state goes and comes back.
    """
    passes, updates, count = [Task("forward", "accelerator", forward)], [], len(layers)
    for number, layer in enumerate(reversed(layers)):
        backward = Task(f"backward {number}", "accelerator", layer.backward)
        passes.append(backward)
        room = (f"write {number - window}",) if number >= window else ()
        read = Task(f"read {number}", "disk read", layer.read, room)
        come = backward.name if arriving else f"backward {count - 1}"
        if on == "host":
            out = Task(f"gradients {number}", "link out", layer.gradients, (backward.name,))
            passes.append(out)
            update = Task(f"update {number}", "host", layer.host_update, (read.name, out.name, come))
            own = [read, update, Task(f"parameters {number}", "link in", layer.parameters, (update.name,))]
        else:
            there = Task(f"state {number}", "link in", layer.state, (read.name,))
            update = Task(f"update {number}", "accelerator", layer.device_update, (there.name, come))
            out = Task(f"new state {number}", "link out", layer.state, (update.name,))
            own = [read, there, update, out]
        done = out if on == "device" else update
        own.append(Task(f"write {number}", "disk write", layer.write, (done.name,)))
        (passes if arriving else updates).extend(own)
    return [*passes, *updates]


def update_span(tasks: Sequence[Task]) -> UpdateSpan:
    """Length of a step and the work of its accelerator."""
    return UpdateSpan(
        max(end for _, end in play(tasks).values()),
        sum(task.seconds for task in tasks if task.resource == "accelerator"),
    )


def layer_times(work: DeviceWork, cluster: Cluster, read: float, write: float) -> tuple[list[LayerTimes], float]:
    """Times of a run's layers by the planner, and of its forward pass, in seconds.

    The state is that of AdamW with its parameters, 12 bytes an element in float32, and gradients are float32. The
    passes are those of all micro-batches; a layer has its share of them. With ``remat="full"`` the backward pass is
    three quarters of the arithmetic.

    Args:
        work: the run as a device sees it, without stages.
        cluster: its devices.
        read, write: bandwidth of a device's share of the disk, bytes/s.

    Raises:
        HardwareError: the memory bandwidth of the hosts is not known.
    """
    hardware, count = cluster.hardware, work.run.model.layers
    if hardware.host_memory is None:
        raise HardwareError(
            f"update timeline: the memory bandwidth of the hosts of {hardware.name} is not published; give a hardware "
            f"file with [{hardware.name}] host_memory = BYTES_PER_SECOND."
        )
    found = step_time.predict_work(work, cluster)
    passes, numbers = found.compute + found.memory, layer_elements(work) / count
    wide = jnp.dtype(work.run.model.param_dtype).itemsize
    forward = passes / (4 if work.run.model.remat == "full" else 3)
    layer = LayerTimes(
        backward=(passes - forward) / count,
        gradients=wide * numbers / hardware.host,
        read=3 * wide * numbers / read,
        write=3 * wide * numbers / write,
        host_update=HOST_WORDS * wide * numbers / hardware.host_memory,
        parameters=wide * numbers / hardware.host,
        state=3 * wide * numbers / hardware.host,
        device_update=9 * wide * numbers / hardware.bandwidth,
    )
    return [layer] * count, forward
