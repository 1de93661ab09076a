"""Streamed weights: a model's parameters, most of whose layers are on the host or in files while it is served.

The tiers are FlexGen's (arXiv:2303.06865): device, host and disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxllm.infer.streaming.blocks.cache_placement import CachePlacement
from jaxllm.infer.streaming.experts.expert_files import ExpertFiles, FileExperts
from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES, AbsentExperts, ExpertCosts
from jaxllm.infer.streaming.experts.expert_slots import LOOK_AHEAD, Eviction, LookAhead
from jaxllm.infer.streaming.experts.host_experts import HostExperts
from jaxllm.infer.streaming.layer_store import (
    HostLayers,
    LayerFiles,
    LayerStore,
    Unit,
    WithoutExperts,
    units_of,
)
from jaxllm.infer.streaming.layer_window import LayerWindow, read_unit
from jaxllm.models import Functional

Item = TypeVar("Item")


@dataclass(frozen=True)
class WeightPlacement:
    """Placement of the layers of a served model. A unit is a layer, or one repeat of a group of layers that differ.

    Attributes:
        window: streamed units that are on the device at a time, the one that computes among them.
        device_units: units that stay on the device, spread evenly over the model, so that the others are read while
            they compute.
        host_units: units of the others that stay in the host's memory, spread evenly too; None: all of them.
        disk: directory for files of the others.
        loaders: threads that read units.
        expert_slots: experts of each mixture layer that are on the device, all others on the host; the units are the
            rest of the layers then. 0: experts go with their layers.
        eviction: which expert leaves, see ``ExpertSlots``.
        ahead: experts that are loaded before the next layer wants them: those that its router would choose now
            ("router"), those that tokens took so far after experts like those of this layer ("statistics"), or none.
        absent: wanted experts that are in no slot: their weights are copied to slots ("load"); the host's processor
            computes them ("host"); or whichever costs less, for each alone ("by_cost") or for all experts of the layer
            together ("schedule"), see ``expert_schedule``.
        expert_costs: what those cost; None: it is measured in the first steps.
        expert_host_bytes: bytes of experts that stay in the host's memory, those that are read most often; the others
            are read from files in ``disk``. None: all are in the host's memory.
        cache: placement of the KV cache, and batches that share a pass through the layers; None: one batch, whose KV
            cache is on the device.
        kv_bytes: most bytes of the KV cache on each device, where ``cache`` is None and the engine's pages are not
            given; None: what there is room for.
    """

    window: int = 2
    device_units: int = 0
    host_units: int | None = None
    disk: Path | None = None
    loaders: int = 2
    expert_slots: int = 0
    eviction: Eviction = "lru"
    ahead: LookAhead = "router"
    absent: AbsentExperts = "load"
    expert_costs: ExpertCosts | None = None
    expert_host_bytes: int | None = None
    cache: CachePlacement | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.ahead not in LOOK_AHEAD:
            raise ValueError(f"experts ahead = {self.ahead!r}; legal: {', '.join(map(repr, LOOK_AHEAD))}.")
        if self.absent not in SCHEDULES:
            raise ValueError(f"absent experts = {self.absent!r}; legal: {', '.join(map(repr, SCHEDULES))}.")
        if self.expert_host_bytes is not None and (not self.expert_slots or self.disk is None):
            raise ValueError(
                f"placement of weights: expert_host_bytes = {self.expert_host_bytes} leaves experts to files; give "
                "expert_slots, and a directory as disk."
            )
        if self.absent != "load" and not self.expert_slots:
            raise ValueError(f"absent experts = {self.absent!r} is for experts in slots; give a number of slots too.")
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
        stores: where each unit is, or where those on the device come from.
        placement: how many of them are where.
        experts: with ``expert_slots``: the experts of each mixture, by unit and block.
    """

    ends: Any
    units: Sequence[Unit]
    stores: Mapping[Unit, LayerStore]
    placement: WeightPlacement
    experts: Mapping[tuple[Unit, str], HostExperts | FileExperts] = field(default_factory=dict)

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
            ValueError: expert slots for a model without mixtures, or more than it has experts.
        """
        without: WithoutExperts | None = None
        if placement.expert_slots:
            check_slots(model, placement)
            files = None
            if placement.expert_host_bytes is not None:
                assert placement.disk is not None
                files = ExpertFiles(placement.disk, key, placement.expert_host_bytes)
            layers = without = WithoutExperts(layers, units_of(model.config.segments), files)
            key = [*key, "without experts"]
        units = units_of(model.config.segments)
        on_device, others = spread(units, placement.device_units)
        on_host, on_disk = (others, []) if placement.host_units is None else spread(others, placement.host_units)

        def tell(before: int) -> Callable[[int, int], None]:
            return lambda done, _: None if progress is None else progress(before + done, len(units))

        stores: dict[Unit, LayerStore] = dict.fromkeys(on_device, layers)
        if on_host:
            stores |= dict.fromkeys(on_host, HostLayers(layers, on_host, tell(len(on_device))))
        if on_disk:
            assert placement.disk is not None
            done = tell(len(on_device) + len(on_host))
            stores |= dict.fromkeys(on_disk, LayerFiles.of(layers, on_disk, placement.disk, list(key), done))
        if without is None:
            return cls(ends, units, stores, placement)
        device = next((d for x in jax.tree.leaves(ends) for d in x.devices()), jax.devices()[0])
        without.hold({unit: read_unit(without, unit, device) for unit in on_device})
        return cls(ends, units, stores, placement, without.experts())

    @property
    def resident(self) -> list[Unit]:
        """Units that stay on the device."""
        return spread(self.units, self.placement.device_units)[0]

    def window(self, device: jax.Device) -> LayerWindow:
        """The window of these weights on a device, whose threads begin to read at once."""
        place = self.placement
        for store in {id(store): store for store in self.stores.values()}.values():
            if isinstance(store, HostLayers):
                store.pin(device)
        window = LayerWindow(
            self.units, self.stores, device, place.window,
            resident=self.resident, loaders=place.loaders,
        )  # fmt: skip
        for store in self.stores.values():
            if isinstance(store, WithoutExperts):
                store.release()
        return window

    def __str__(self) -> str:
        """Numbers of layers by place."""
        where = Counter(self.stores[unit].tier for unit in self.units)
        place, resident = self.placement, len(self.resident)
        parts = [f"{resident} of {len(self.units)} on the device"] if resident else []
        parts += [f"{where['host']} on the host"] if where["host"] else []
        if where["disk"]:
            parts.append(f"{where['disk']} in files of {place.disk}")
        others = "on the host" if place.expert_host_bytes is None else f"in files of {place.disk}"
        slots = f"; {place.expert_slots} experts of each mixture, the others {others}" if place.expert_slots else ""
        turns = "" if place.cache is None else f"; {place.cache}"
        return f"layers: {', '.join(parts)}; {place.window} at a time are on the device to compute{slots}{turns}"


def spread(units: Sequence[Item], count: int) -> tuple[list[Item], list[Item]]:
    """(``count`` of some units, spread evenly over them, the last among them; the others), each in order."""
    count = min(count, len(units))
    chosen = [(i + 1) * count // len(units) > i * count // len(units) for i in range(len(units))]
    return [u for u, yes in zip(units, chosen, strict=True) if yes], [
        u for u, yes in zip(units, chosen, strict=True) if not yes
    ]


def most_that_fit(sizes: Sequence[int], room: int) -> int:
    """Most of some sizes, spread evenly over them, that fit together."""
    if len(set(sizes)) == 1:
        return min(len(sizes), room // sizes[0]) if sizes[0] else len(sizes)
    return next(count for count in range(len(sizes), -1, -1) if sum(spread(sizes, count)[0]) <= room)


def check_slots(model: Functional, placement: WeightPlacement) -> None:
    """Checks that a model's mixtures can have slots.

    Raises:
        ValueError: it has none, has fewer experts than slots, or drops rows by capacity.
    """
    layers = [(block.mlp, moe) for block in model.config.blocks if (moe := block.mlp.mixture) is not None]
    if not layers:
        raise ValueError(f"expert slots = {placement.expert_slots}, and the model has no mixture of experts: give 0.")
    for layer, moe in layers:
        if moe is not layer:
            raise ValueError(f"expert slots do not go with the experts of {type(layer).__name__}; give 0.")
        if moe.experts < placement.expert_slots:
            raise ValueError(
                f"expert slots = {placement.expert_slots}; give 1 to {moe.experts}, the experts or slices of a layer."
            )
        if moe.capacity is not None:
            raise ValueError("expert slots do not go with a capacity factor: rows are dropped by all experts' load.")
