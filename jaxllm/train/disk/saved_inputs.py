"""Saved inputs of streamed layers between forward and backward pass: in the host's memory, or in files.

With the input of a layer goes what else it saves, the named values of ``model.remat`` (``layer_values``).

Those of the first layers, which wait longest, may be in files and the others in memory, as SSDTrain offloads a share
(arXiv:2408.10013). In files each is written once, while the next layers are computed, and read ahead of its use in the
reverse order; those that are still in the window, written already or in flight, are forwarded and never read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_tier import DiskTier
from jaxllm.train.disk.hidden_share import DiskClock, InputTimes, PassRates
from jaxllm.train.disk.state_file import DiskTierError, FileLayout
from jaxllm.train.disk.state_files import ArrayShards

COPIES = 2
"""Layers whose values are being copied to the host."""


class SavedInputs(ABC):
    """Inputs of layers by layer and micro-batch, each with further saved values of the layer; written in one order, and
    taken in the reverse of it.

    Attributes:
        sizes: bytes of the file of each, in the order of writing; empty: they are in the host's memory.
    """

    sizes: Sequence[int] = ()

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of the host's memory that they take now; of files' buffers, those of the whole window."""

    @abstractmethod
    def put(self, layer: int, micro: int, arrays: Sequence[jax.Array]) -> None:
        """Saves the input of a layer, [B S D], and its values, which are in the memory of the host or the device."""

    @abstractmethod
    def begin(self) -> None:
        """Begins a backward pass: all inputs are saved."""

    @abstractmethod
    def take(self, layer: int, micro: int) -> list[jax.Array]:
        """Input of a layer and its values on the device. The caller calls ``drop`` after it has dispatched what reads
        them."""

    @abstractmethod
    def drop(self, layer: int, micro: int, wait: Any, final: bool) -> None:
        """Gives an input back.

        Args:
            layer, micro: of the input.
            wait: function that returns when nothing reads it any more.
            final: it is not taken again.
        """


class Leaving:
    """Copies of values to the host that are in progress: at most two, so that few layers' values are on the device
    however slow the link is. Inputs alone are small, and nothing waits for them."""

    def __init__(self) -> None:
        self._copies: deque[list[jax.Array]] = deque()

    def to_host(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays of a layer in the host's memory, its input first; the copy is asynchronous."""
        there = [to_host(x) for x in arrays]
        if len(arrays) > 1:
            self._copies.append(there)
        if len(self._copies) > COPIES:
            jax.block_until_ready(self._copies.popleft())
        return there


class HostInputs(SavedInputs):
    """Inputs of layers in the host's memory."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[int, int], list[jax.Array]] = {}
        self._bytes, self._leaving = 0, Leaving()

    @property
    def host_bytes(self) -> int:
        """See ``SavedInputs``."""
        return self._bytes

    def put(self, layer: int, micro: int, arrays: Sequence[jax.Array]) -> None:
        """See ``SavedInputs``."""
        self._inputs[layer, micro] = self._leaving.to_host(arrays)
        self._bytes += sum(map(local_bytes, arrays))

    def begin(self) -> None:
        """See ``SavedInputs``."""
        self._leaving = Leaving()

    def take(self, layer: int, micro: int) -> list[jax.Array]:
        """See ``SavedInputs``."""
        return [to_device(x) for x in self._inputs[layer, micro]]

    def drop(self, layer: int, micro: int, wait: Any, final: bool) -> None:
        """See ``SavedInputs``."""
        if final:
            self._bytes -= sum(map(local_bytes, self._inputs.pop((layer, micro))))


class DiskInputs(SavedInputs):
    """Inputs of layers in files of the disk tier, or those of the first layers, with the others in the host's memory.

    Args:
        config: where the files are, and how many layers have some; ``window`` inputs of these are in the host's memory.
        layers: of each layer that is streamed, names and arrays of what it saves, its input first; abstract, with
            their shardings on the run's mesh.
        micro_batches: of a step.

    Attributes:
        layouts: layouts of the files, in the order of writing.

    Raises:
        DiskTierError: more layers are to have files than there are, or a value is a partial sum of each device.
    """

    def __init__(
        self, config: DiskConfig, layers: Sequence[Sequence[tuple[str, jax.ShapeDtypeStruct]]], micro_batches: int
    ):
        self._saved = [_file_parts(arrays) for arrays in layers]
        self._micro_batches, self._config, self._streamed = micro_batches, config, len(layers)
        self._layers, self._others = layers_in_files(config, len(layers)), HostInputs()
        self._leaving = Leaving()
        self._make_layouts()

    def _make_layouts(self) -> None:
        self.layouts = [
            FileLayout(f"input of layer {n}, micro-batch {m}", saved.labels, saved.sizes)
            for n, saved in enumerate(self._saved[: self._layers])
            for m in reversed(range(self._micro_batches))
        ]
        self.sizes = [layout.size for layout in self.layouts]
        self._tier: DiskTier | None = None

    @property
    def host_bytes(self) -> int:
        """See ``SavedInputs``. Beside each buffer there is the array that it is filled from."""
        return self._others.host_bytes + 2 * sum(sorted(self.sizes, reverse=True)[: self._config.window])

    @property
    def adaptive(self) -> bool:
        """Whether the number of layers in files is to be chosen by what a step with all of them measures."""
        return self._config.activation_layers == "auto"

    def choose(self, passes: Sequence[PassRates], clock: DiskClock) -> str:
        """Puts the most layers into files of which the passes hide the copies; no input is saved. For the log.

        Args:
            passes: the forward pass of a step with all layers in files, then its backward passes.
            clock: its reads and writes.
        """
        times = InputTimes.of(
            passes, clock, self._streamed, self._micro_batches, self._config.window, max(self.sizes, default=0)
        )
        if (chosen := times.most_hidden()) != self._layers:
            self._layers = chosen
            self._make_layouts()
        return f"inputs of {chosen} of {self._streamed} layers are in files: {times}"

    @property
    def tier(self) -> DiskTier:
        """The files, made when they are first needed."""
        if self._tier is None:
            self._tier = DiskTier(Path(self._config.directory), self.layouts, self._config.window)
        return self._tier

    def put(self, layer: int, micro: int, arrays: Sequence[jax.Array]) -> None:
        """See ``SavedInputs``."""
        if layer >= self._layers:
            return self._others.put(layer, micro, arrays)
        unit = self._unit(layer, micro)
        there = self._leaving.to_host(arrays)  # so that the device does not wait for the disk

        def fill(buffer: np.ndarray) -> None:
            for shards, x in zip(self._saved[layer].shards, there, strict=True):
                shards.fill(self.layouts[unit], buffer, jax.block_until_ready(x))

        self.tier.put(unit, fill)

    def begin(self) -> None:
        """See ``SavedInputs``."""
        self._leaving = Leaving()
        self._others.begin()
        self.tier.begin(list(reversed(range(len(self.layouts)))))

    def take(self, layer: int, micro: int) -> list[jax.Array]:
        """See ``SavedInputs``."""
        if layer >= self._layers:
            return self._others.take(layer, micro)
        unit = self._unit(layer, micro)
        buffer = self.tier.take(unit)
        return [shards.placed(self.layouts[unit], buffer) for shards in self._saved[layer].shards]

    def drop(self, layer: int, micro: int, wait: Any, final: bool) -> None:
        """See ``SavedInputs``."""
        if layer >= self._layers:
            return self._others.drop(layer, micro, wait, final)
        self.tier.release(self._unit(layer, micro), wait)

    def _unit(self, layer: int, micro: int) -> int:
        # The micro-batches of a layer are written backwards, because the backward pass adds their gradients forwards.
        return (layer + 1) * self._micro_batches - 1 - micro


class FileParts(NamedTuple):
    """Parts of the file of what a layer saves.

    Attributes:
        shards: of each array.
        labels, sizes: of each part, name and bytes.
    """

    shards: list[ArrayShards]
    labels: list[str]
    sizes: list[int]


def _file_parts(arrays: Sequence[tuple[str, jax.ShapeDtypeStruct]]) -> FileParts:
    found = FileParts([], [], [])
    for name, x in arrays:
        if getattr(x.sharding.spec, "unreduced", None):
            raise DiskTierError(
                f"disk.activations: {name} is a partial sum of each device, which files do not hold; set model.remat "
                "to a policy that does not save it."
            )
        shards = ArrayShards.of(tuple(x.shape), np.dtype(x.dtype), x.sharding, len(found.sizes))
        found.shards.append(shards)
        found.labels.extend([name] * len(shards.parts))
        found.sizes.extend([shards.part_bytes] * len(shards.parts))
    return found


def layers_in_files(config: DiskConfig, layers: int) -> int:
    """Number of a run's layers that have their inputs in files; the most that may have, where that is chosen later.

    Args:
        config: of the run.
        layers: number of layers that are streamed.

    Raises:
        DiskTierError: more are to have files than there are.
    """
    count = config.activation_layers
    if count == "auto":
        return layers
    if count > layers:
        raise DiskTierError(
            f"disk.activation_layers = {count}, but {layers} layers are streamed; give at most as many, or 0 (all)."
        )
    return (count or layers) if config.activations else 0


def host_inputs(config: DiskConfig, layers: int, micro_batches: int) -> int:
    """Most inputs of layers that are in the host's memory at a time.

    Args:
        config: of the run.
        layers: number of layers that are streamed.
        micro_batches: of a step.
    """
    return saved_host_bytes(config, [1] * layers, micro_batches)


def saved_host_bytes(config: DiskConfig, sizes: Sequence[int], micro_batches: int) -> int:
    """Most bytes of what layers save that are in the host's memory at a time.

    Args:
        config: of the run.
        sizes: bytes that each layer saves of a micro-batch.
        micro_batches: of a step.
    """
    if config.activation_layers == "auto":  # few layers may be chosen, or none
        return sum(sizes) * micro_batches
    files = layers_in_files(config, len(sizes))
    each = sorted((size for size in sizes[:files] for _ in range(micro_batches)), reverse=True)
    return sum(sizes[files:]) * micro_batches + sum(each[: config.window])


def local_bytes(x: jax.Array) -> int:
    """Bytes of an array on this process's devices."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.sharding.addressable_devices)


def to_host(x: jax.Array) -> jax.Array:
    """The array in the host's memory; the copy is asynchronous."""
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def to_device(x: jax.Array) -> jax.Array:
    """The array in the device's memory; the copy is asynchronous."""
    return jax.device_put(x, x.sharding.with_memory_kind("device"))
