"""Streamed weights: a model's parameters, most of whose layers are on the host or in files while it is served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxllm.infer.streaming.layer_store import HostLayers, LayerFiles, LayerStore, Unit, units_of
from jaxllm.infer.streaming.layer_window import LayerWindow
from jaxllm.models import Functional


@dataclass(frozen=True)
class WeightPlacement:
    """Where the layers of a served model are. A unit is a layer, or one repeat of a group of layers that differ.

    Attributes:
        window: streamed units that are on the device at a time, the one that computes among them.
        device_units: first units, which stay on the device.
        host_units: units after those that stay in the host's memory; None: all of them.
        disk: directory for files of the others.
        loaders: threads that read units.
    """

    window: int = 2
    device_units: int = 0
    host_units: int | None = None
    disk: Path | None = None
    loaders: int = 2

    def __post_init__(self) -> None:
        if self.window < 1 or self.loaders < 1 or self.device_units < 0 or (self.host_units or 0) < 0:
            raise ValueError(
                f"placement of weights: window = {self.window}, loaders = {self.loaders}, device_units = "
                f"{self.device_units}, host_units = {self.host_units}; give a window and loaders of 1 or more, and "
                "numbers of units of 0 or more."
            )
        if self.host_units is not None and self.disk is None:
            raise ValueError(
                f"placement of weights: host_units = {self.host_units} leaves layers to files, and disk is None; give "
                "a directory for them."
            )


@dataclass(frozen=True)
class StreamedWeights:
    """Parameters of a model as the engine takes them in the place of a tree.

    Attributes:
        ends: parameters outside of blocks, on the device.
        units: units of the model, in order.
        stores: where each unit is.
        placement: how many of them are where.
    """

    ends: Any
    units: Sequence[Unit]
    stores: Mapping[Unit, LayerStore]
    placement: WeightPlacement

    @classmethod
    def of(
        cls,
        model: Functional,
        ends: Any,
        layers: LayerStore,
        placement: WeightPlacement,
        key: Sequence[Any] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> StreamedWeights:
        """Weights whose layers are put where a placement says.

        Args:
            model: the model.
            ends: its parameters outside of blocks.
            layers: where its layers are read from.
            placement: where they go.
            key: what the weights are made of, a JSON value: files are found again by it.
            progress: called with the number of units that are in their places, and of all.

        Raises:
            WeightsUnavailableError: files cannot be written.
        """
        units = units_of(model.config.segments)
        first, last = placement.device_units, len(units)
        if placement.host_units is not None:
            last = min(last, first + placement.host_units)
        tell = lambda before: None if progress is None else lambda done, _: progress(before + done, len(units))  # noqa: E731
        stores: dict[Unit, LayerStore] = dict.fromkeys(units[:first], layers)
        if some := units[first:last]:
            stores |= dict.fromkeys(some, HostLayers(layers, some, tell(first)))
        if some := units[last:]:
            assert placement.disk is not None
            stores |= dict.fromkeys(some, LayerFiles.of(layers, some, placement.disk, list(key), tell(last)))
        return cls(ends, units, stores, placement)

    def window(self, device: jax.Device) -> LayerWindow:
        """The window of these weights on a device, whose threads begin to read at once."""
        place = self.placement
        return LayerWindow(
            self.units, self.stores, device, place.window,
            resident=min(place.device_units, len(self.units)), loaders=place.loaders,
        )  # fmt: skip

    def __str__(self) -> str:
        """Numbers of layers by place."""
        where = Counter(self.stores[unit].tier for unit in self.units)
        place = self.placement
        resident = min(place.device_units, len(self.units))
        parts = [f"{resident} of {len(self.units)} on the device"] if resident else []
        parts += [f"{where['host']} on the host"] if where["host"] else []
        if where["disk"]:
            parts.append(f"{where['disk']} in files of {place.disk}")
        return f"layers: {', '.join(parts)}; {place.window} at a time are on the device to compute"
