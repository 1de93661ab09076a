"""Saved inputs of streamed layers between forward and backward pass: in the host's memory, or in files.

Those of the first layers, which wait longest, may be in files and the others in memory, as SSDTrain offloads a share
(arXiv:2408.10013). In files each is written once, while the next layers are computed, and read ahead of its use in the
reverse order; those that are still in the window, written already or in flight, are forwarded and never read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_tier import DiskTier
from jaxllm.train.disk.hidden_share import DiskClock, InputTimes, PassRates
from jaxllm.train.disk.state_file import DiskTierError, FileLayout
from jaxllm.train.disk.state_files import ArrayShards


class SavedInputs(ABC):
    """Inputs of layers by layer and micro-batch; written in one order, and taken in the reverse of it.

    Attributes:
        sizes: bytes of the file of each, in the order of writing; empty: they are in the host's memory.
    """

    sizes: Sequence[int] = ()

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of the host's memory that they take now; of files' buffers, those of the whole window."""

    @abstractmethod
    def put(self, layer: int, micro: int, x: jax.Array) -> None:
        """Saves the input of a layer, [B S D], which is in the memory of the host or the device."""

    @abstractmethod
    def begin(self) -> None:
        """Begins a backward pass: all inputs are saved."""

    @abstractmethod
    def take(self, layer: int, micro: int) -> jax.Array:
        """Input of a layer on the device. The caller calls ``drop`` after it has dispatched what reads it."""

    @abstractmethod
    def drop(self, layer: int, micro: int, wait: Any, final: bool) -> None:
        """Gives an input back.

        Args:
            layer, micro: of the input.
            wait: function that returns when nothing reads it any more.
            final: it is not taken again.
        """


class HostInputs(SavedInputs):
    """Inputs of layers in the host's memory."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[int, int], jax.Array] = {}
        self._bytes = 0

    @property
    def host_bytes(self) -> int:
        """See ``SavedInputs``."""
        return self._bytes

    def put(self, layer: int, micro: int, x: jax.Array) -> None:
        """See ``SavedInputs``."""
        self._inputs[layer, micro] = to_host(x)
        self._bytes += local_bytes(x)

    def begin(self) -> None:
        """See ``SavedInputs``."""

    def take(self, layer: int, micro: int) -> jax.Array:
        """See ``SavedInputs``."""
        return to_device(self._inputs[layer, micro])

    def drop(self, layer: int, micro: int, wait: Any, final: bool) -> None:
        """See ``SavedInputs``."""
        if final:
            self._bytes -= local_bytes(self._inputs.pop((layer, micro)))


class DiskInputs(SavedInputs):
    """Inputs of layers in files of the disk tier, or those of the first layers, with the others in the host's memory.

    Args:
        config: where the files are, and how many layers have some; ``window`` inputs of these are in the host's memory.
        layers: number of layers that are streamed.
        micro_batches: of a step.
        hidden: an input, abstract, with its sharding on the run's mesh.

    Attributes:
        layouts: layouts of the files, in the order of writing.
    """

    def __init__(self, config: DiskConfig, layers: int, micro_batches: int, hidden: jax.ShapeDtypeStruct):
        self._shards = ArrayShards.of(tuple(hidden.shape), np.dtype(hidden.dtype), hidden.sharding, 0)
        self._micro_batches, self._config, self._streamed = micro_batches, config, layers
        self._layers, self._others = layers_in_files(config, layers), HostInputs()
        self._make_layouts()

    def _make_layouts(self) -> None:
        parts = len(self._shards.parts)
        self.layouts = [
            FileLayout(
                f"input of layer {n}, micro-batch {m}", ["hidden states"] * parts, [self._shards.part_bytes] * parts
            )
            for n in range(self._layers)
            for m in reversed(range(self._micro_batches))
        ]
        self.sizes = [layout.size for layout in self.layouts]
        self._tier: DiskTier | None = None

    @property
    def host_bytes(self) -> int:
        """See ``SavedInputs``. Beside each buffer there is the array that it is filled from."""
        return self._others.host_bytes + 2 * sum(self.sizes[: self._config.window])

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

    def put(self, layer: int, micro: int, x: jax.Array) -> None:
        """See ``SavedInputs``."""
        if layer >= self._layers:
            return self._others.put(layer, micro, x)
        unit, there = self._unit(layer, micro), to_host(x)  # so that the device does not wait for the disk

        def fill(buffer: np.ndarray) -> None:
            self._shards.fill(self.layouts[unit], buffer, jax.block_until_ready(there))

        self.tier.put(unit, fill)

    def begin(self) -> None:
        """See ``SavedInputs``."""
        self.tier.begin(list(reversed(range(len(self.layouts)))))

    def take(self, layer: int, micro: int) -> jax.Array:
        """See ``SavedInputs``."""
        if layer >= self._layers:
            return self._others.take(layer, micro)
        unit = self._unit(layer, micro)
        return self._shards.placed(self.layouts[unit], self.tier.take(unit))

    def drop(self, layer: int, micro: int, wait: Any, final: bool) -> None:
        """See ``SavedInputs``."""
        if layer >= self._layers:
            return self._others.drop(layer, micro, wait, final)
        self.tier.release(self._unit(layer, micro), wait)

    def _unit(self, layer: int, micro: int) -> int:
        # The micro-batches of a layer are written backwards, because the backward pass adds their gradients forwards.
        return (layer + 1) * self._micro_batches - 1 - micro


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
    if config.activation_layers == "auto":  # few layers may be chosen, or none
        return layers * micro_batches
    files = layers_in_files(config, layers) * micro_batches
    return layers * micro_batches - files + min(config.window, files)


def local_bytes(x: jax.Array) -> int:
    """Bytes of an array on this process's devices."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.sharding.addressable_devices)


def to_host(x: jax.Array) -> jax.Array:
    """The array in the host's memory; the copy is asynchronous."""
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def to_device(x: jax.Array) -> jax.Array:
    """The array in the device's memory; the copy is asynchronous."""
    return jax.device_put(x, x.sharding.with_memory_kind("device"))
