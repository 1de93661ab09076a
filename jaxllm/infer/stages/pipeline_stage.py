"""Pipeline stage: the devices of one stage, and what is on them: its layers' weights and KV cache pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

import sharding
from jaxllm.infer.runner.page_programs import Pools
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.infer.runner.serving_mesh import placements, put
from jaxllm.infer.stages.stage_cut import StageLayers
from jaxllm.models import Functional


@dataclass
class PipelineStage:
    """Stage of a staged runner.

    Attributes:
        number: which one, from 0 on.
        devices: its devices.
        mesh: its devices as a mesh without the ``stage`` axis; None for one device.
        layers: its layers.
        weights: "layers", and in the first stage "embedding".
        groups: layer groups of the model with the layers of this stage alone, perhaps with none.
        pools: page pool of each group.
        busy: ticket of the pipeline clock for the step that it was told to compute last.
    """

    number: int
    devices: tuple[Any, ...]
    mesh: Mesh | None
    layers: StageLayers
    weights: Any = None
    groups: tuple[LayerGroup, ...] = ()
    pools: Pools = ()
    busy: Any = None

    @classmethod
    def of(cls, mesh: Mesh, number: int, layers: StageLayers) -> PipelineStage:
        """Stage ``number`` of a mesh."""
        own = stage_mesh(mesh, number)
        return cls(number, tuple(own.devices.flat), own if own.size > 1 else None, layers)

    def groups_of(self, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
        """Layer groups with the layers of this stage alone."""
        return tuple(
            dataclasses.replace(group, layers=tuple(n for n in group.layers if n in self.layers.layers))
            for group in groups
        )

    def sharding(self, rules: sharding.Rules, *logical: str | None) -> jax.sharding.Sharding:
        """Sharding of an array with these logical axes on the stage's devices."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        with sharding.use_mesh(self.mesh), sharding.use_rules(rules):
            return jax.NamedSharding(self.mesh, sharding.spec(*logical))

    def layer_weights(self, model: Functional, params: Any) -> tuple[Any, ...]:
        """Weights of each stretch of the stage's layers, copied to its devices from a model's parameters."""
        found = []
        for stretch in self.layers.stretches:
            own = {"segments": {(name := str(stretch.segment)): stretch.weights(params)}}
            found.append(self.copied(model, own)["segments"][name])
        return tuple(found)

    def copied(self, model: Functional, params: Any) -> Any:
        """Copy of some of a model's parameters on the stage's devices; a training step donates the original."""
        if self.mesh is None:
            places = jax.tree.map(lambda x: jax.sharding.SingleDeviceSharding(self.devices[0]), params)
        else:
            places = placements(model, params, self.mesh)
        return jax.tree.map(lambda x, there: put(x, there, may_alias=False), params, places)


def stage_mesh(mesh: Mesh, number: int) -> Mesh:
    """Devices of one stage of a mesh, without the ``stage`` axis."""
    axis = mesh.axis_names.index("stage")
    others = [one for one in zip(mesh.axis_names, mesh.axis_types, strict=True) if one[0] != "stage"]
    others = others or [("tensor", jax.sharding.AxisType.Explicit)]
    devices = mesh.devices.take([number], axis)
    sizes = [mesh.shape.get(name, 1) for name, _ in others]
    return Mesh(devices.reshape(sizes), tuple(name for name, _ in others), axis_types=tuple(kind for _, kind in others))
