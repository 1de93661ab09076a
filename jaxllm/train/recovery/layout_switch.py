"""Layout switches: a run whose mesh changes after given steps, and which goes on with the same state and data.

The state goes through a checkpoint, which is restored to the shardings of the next mesh. So the curve is that of either
mesh, to the rounding of its sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from jaxllm.config import ConfigError
from jaxllm.train.config import RunConfig
from jaxllm.train.loop import TrainResult, train
from jaxllm.train.outer.replicas import REPLICA
from jaxllm.train.run import run_mesh
from jaxllm.train.run_model import run_model


@dataclass(frozen=True)
class LayoutSwitch:
    """Change of a run's mesh.

    Attributes:
        step: steps that are done before it.
        mesh: the mesh from then on, as ``RunConfig.mesh``; "auto": planned for the devices.
    """

    step: int
    mesh: str = "auto"

    @classmethod
    def parse(cls, text: str) -> LayoutSwitch:
        """Reads ``STEP`` or ``STEP:MESH``.

        Raises:
            ValueError: it is neither.
        """
        step, colon, mesh = text.partition(":")
        if not step.isdecimal() or bool(colon) != bool(mesh):
            raise ValueError(f"{text!r} is no layout switch; give STEP or STEP:MESH, such as 1000:fsdp=4,tensor=2.")
        return cls(int(step), mesh or cls.mesh)


def switched_train(
    config: RunConfig, switches: Sequence[LayoutSwitch], lay_out: Callable[[RunConfig], RunConfig]
) -> TrainResult:
    """Trains a run, or resumes it with the mesh of the step that it has reached.

    Args:
        config: the run, with its first mesh.
        switches: in the order of their steps.
        lay_out: makes a run ready for its mesh: plans "auto" for these devices, fits a memory budget.

    Raises:
        ConfigError: a step is not one within the run, or the run does not go with a mesh; before the first step.
    """
    _check(config, switches)
    before = config.mesh
    for switch in switches:
        result = train(lay_out(replace(config, mesh=before)), until=switch.step)
        if result.complete or result.signal is not None:
            return result
        before = switch.mesh
    return train(lay_out(replace(config, mesh=before)))


def _check(config: RunConfig, switches: Sequence[LayoutSwitch]) -> None:
    steps = [0, *(switch.step for switch in switches), config.steps]
    if any(before >= after for before, after in itertools.pairwise(steps)):
        raise ConfigError(
            f"layout switches after the steps {', '.join(map(str, steps[1:-1]))} of {config.steps}: give steps in "
            f"ascending order, from 1 to {config.steps - 1}."
        )
    if config.elastic.enabled:
        raise ConfigError("layout switches do not go with --elastic, which chooses the mesh itself; leave one out.")
    model, meshes = run_model(config), [config.mesh, *(switch.mesh for switch in switches)]
    replicas = {
        mesh: run_mesh(replace(config, mesh=mesh), model, jax.devices()).shape.get(REPLICA, 1)
        for mesh in meshes
        if mesh != "auto"  # planned when it is its turn
    }
    for mesh, many in replicas.items():
        if many != (first := next(iter(replicas.values()))):
            raise ConfigError(
                f"the mesh {mesh} has {many} replicas, and the one before it {first}, each with an optimizer state of "
                f"its own; give it replica={first}."
            )
