"""Sharded layers: units whose parts go to the devices of a mesh, a window of layers on all of them (TPI-LLM).

Heads and widths are divided over ``tensor``: each device has its part of the window's layers alone, read ahead while
the layers before compute (TPI-LLM, arXiv:2410.00531, section 3). A file is read once, by the host of all devices, and
each part is copied to its device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jaxllm.infer.runner.serving_mesh import placements, serving_model, spans_processes
from jaxllm.infer.streaming.layer_store import LayerStore, Unit
from jaxllm.infer.streaming.streamed_weights import StreamedWeights
from jaxllm.models import Functional


class ShardedLayers:
    """Store of units that are divided over a mesh.

    Args:
        store: where they come from.
        model: as it is served, with the sharding rules.
        mesh: the devices.

    Attributes:
        tier: that of the store.
    """

    def __init__(self, store: LayerStore, model: Functional, mesh: jax.sharding.Mesh):
        self.store, self.tier, self._model, self._mesh = store, store.tier, model, mesh

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``; the mesh says which devices.

        Raises:
            ShardingError: a dimension does not divide over the mesh; says which.
        """
        segment = str(unit.segment)
        own = jax.tree.map(np.asarray, self.store.read(unit, jax.devices("cpu")[0]))
        places = placements(self._model, {"segments": {segment: (own,)}}, self._mesh)["segments"][segment][0]
        return jax.device_put(own, places)


def check_streamed_mesh(mesh: jax.sharding.Mesh) -> None:
    """Checks that streamed weights can be divided over a mesh.

    Raises:
        ValueError: it has axes besides ``tensor``, or devices of several processes.
    """
    other = next((name for name, size in mesh.shape.items() if size > 1 and name != "tensor"), None)
    if other is not None or spans_processes(mesh):
        raise ValueError(
            "streamed weights are divided over tensor, on devices of one process, and not over "
            f"{f'{other}={mesh.shape[other]}' if other else 'processes'}; give tensor alone."
        )


def device_bytes(model: Functional, segment: int, unit: Any, mesh: jax.sharding.Mesh) -> int:
    """Bytes of a unit on each device of a mesh: weights that do not divide are whole on all of them.

    Args:
        model: the model.
        segment: of the unit.
        unit: its weights.
    """
    places = placements(serving_model(model), {"segments": {str(segment): (unit,)}}, mesh)
    sizes = zip(jax.tree.leaves(unit), jax.tree.leaves(places["segments"][str(segment)][0]), strict=True)
    return sum(math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize for x, place in sizes)


def over_mesh(weights: StreamedWeights, model: Functional, mesh: jax.sharding.Mesh) -> StreamedWeights:
    """Streamed weights whose units go to a mesh.

    Raises:
        ValueError: see ``check_streamed_mesh``; or experts have slots.
    """
    check_streamed_mesh(mesh)
    if weights.experts:
        raise ValueError("experts in slots are on one device, not on a mesh; leave experts=SLOTS or the mesh out.")
    served = serving_model(model)
    stores = {id(store): ShardedLayers(store, served, mesh) for store in weights.stores.values()}
    return dataclasses.replace(weights, stores={unit: stores[id(store)] for unit, store in weights.stores.items()})
