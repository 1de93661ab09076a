"""Layer stores: where the weights of layers are while they are not on the device.

A unit is one repeat of a segment's group of layers, what ``Functional.group`` computes; for most models it is a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jaxllm.files import digest, exclusive, read_json, write_json
from jaxllm.infer.streaming.experts.expert_files import ExpertFiles, FileExperts
from jaxllm.infer.streaming.experts.host_experts import HostExperts
from jaxllm.infer.streaming.host_memory import free_host_bytes
from jaxllm.infer.streaming.pinned_memory import can_pin, on_device, pinned
from jaxllm.infer.streaming.weight_file import (
    WeightsUnavailableError,
    arrays_of,
    described,
    file_state,
    read_bytes,
    write_arrays,
)

INDEX = "layers.json"


class Unit(NamedTuple):
    """One repeat of a segment.

    Attributes:
        segment: index of the segment, ``DecoderConfig.segments``.
        repeat: index of the repeat in it.
        first: number of its first layer in the model.
    """

    segment: int
    repeat: int
    first: int


@runtime_checkable
class LayerStore(Protocol):
    """Store of units' weights. Several threads read at a time."""

    tier: str

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """Weights of a unit on a device, as a tree without the dimension of layers.

        Raises:
            WeightsUnavailableError: they cannot be read.
        """
        ...


class HostLayers:
    """Units in the host's memory.

    On a CPU the device's arrays are the host's, without a copy where they are aligned. For an accelerator ``pin`` puts
    them in memory that it copies from by itself.

    Args:
        store: where they are copied from.
        units: the units.
        progress: called with the number of units that are there, and of all.

    Attributes:
        tier: "host".
    """

    tier = "host"

    def __init__(self, store: LayerStore, units: Sequence[Unit], progress: Callable[[int, int], None] | None = None):
        host, self._units = jax.devices("cpu")[0], dict[Unit, Any]()
        self._pinned: jax.Device | None = None
        for done, unit in enumerate(units):
            if progress is not None:
                progress(done, len(units))
            self._units[unit] = jax.tree.map(np.asarray, store.read(unit, host))

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``."""
        if device == self._pinned:
            return on_device(self._units[unit], device)
        return jax.device_put(self._units[unit], device)

    def pin(self, device: jax.Device) -> None:
        """Puts the units into pinned memory of a device that has some, one after the other."""
        if not can_pin(device):
            return
        for unit in self._units:
            self._units[unit] = pinned(self._units[unit], device)
        self._pinned = device


class LoadedLayers:
    """Units of a parameter tree that is in memory, on the host or on devices; stacked, or apart.

    Attributes:
        tier: "loaded".
    """

    tier = "loaded"

    def __init__(self, params: Any):
        self._segments = params["segments"]

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``."""
        segment = self._segments[str(unit.segment)]
        own = segment[unit.repeat] if isinstance(segment, tuple) else jax.tree.map(lambda x: x[unit.repeat], segment)
        # Always a copy: the window deletes what it has used.
        return jax.tree.map(lambda x: jax.device_put(np.array(x), device), own)


class WithoutExperts:
    """A store's units without the matrices of experts, which have slots of their own.

    A unit is split at its first reading, so that the host's memory has no more of the units at a time than where they
    are copied to.

    Args:
        store: the store.
        units: units whose experts are wanted.
        files: files for the experts; None: they stay in the host's memory.

    Attributes:
        tier: that of the store.
    """

    def __init__(self, store: LayerStore, units: Sequence[Unit] = (), files: ExpertFiles | None = None):
        self.store, self.tier, self._files = store, store.tier, files
        self._wanted = dict.fromkeys(units)
        self._found = dict[tuple[Unit, str], Any]()
        self._held: dict[Unit, Any] = {}

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``."""
        return jax.device_put(self._held[unit] if unit in self._held else self._split(unit), device)

    def hold(self, rest: Mapping[Unit, Any]) -> None:
        """Keeps units without their experts, on the device, for their next readings, until ``release``."""
        self._held |= rest

    def experts(self) -> dict[tuple[Unit, str], HostExperts | FileExperts]:
        """The experts of the units, by unit and block. Reads the units that have not been read yet; call it once."""
        for unit in list(self._wanted):
            self._split(unit)
        found, self._found = self._found, {}
        if self._files is not None:
            return found
        return {key: HostExperts(own) for key, own in in_common_shapes(found).items()}

    def release(self) -> None:
        """Forgets units that it holds, which are in their places now; they are read again if anyone asks."""
        self._held.clear()

    def _split(self, unit: Unit) -> Any:
        """Weights of a unit without its experts, which are kept, or written, if they are wanted."""
        rest, found = split_experts(self.store.read(unit, jax.devices("cpu")[0]))
        if unit not in self._wanted:
            return rest
        for block, own in found.items():
            if self._files is None:
                self._found[unit, block] = jax.tree.map(np.asarray, own)
            else:
                self._found[unit, block] = self._files.add(unit.first + int(block), HostExperts(own))
        del self._wanted[unit]
        return rest


def split_experts(unit: Any) -> tuple[Any, dict[str, Any]]:
    """(weights of a unit without the experts' matrices, those matrices by block)."""
    base, found = {}, {}
    for b, block in unit.items():
        if "experts" in block["mlp"]:
            found[b] = block["mlp"]["experts"]
            block = block | {"mlp": {name: x for name, x in block["mlp"].items() if name != "experts"}}
        base[b] = block
    return base, found


def in_common_shapes(experts: dict[tuple[Unit, str], Any]) -> dict[tuple[Unit, str], Any]:
    """Experts whose arrays are padded with zeros to the largest of their segment and block, so that programs take all.

    Codes whose size depends on the weights differ between layers (``HostPackedFormat``); others are what they were.
    """
    together: dict[tuple[int, str], list[tuple[Unit, str]]] = {}
    for unit, block in experts:
        together.setdefault((unit.segment, block), []).append((unit, block))
    out = dict(experts)
    for keys in together.values():
        most = jax.tree.map(
            lambda *ones: tuple(np.max([x.shape for x in ones], axis=0)), *(experts[key] for key in keys)
        )
        for key in keys:
            out[key] = jax.tree.map(
                lambda x, to: x if x.shape == to else np.pad(x, [(0, m - n) for n, m in zip(x.shape, to, strict=True)]),
                experts[key],
                most,
            )
    return out


@dataclass(frozen=True)
class _LayerFile:
    """File of a unit as the index has it: its size and time of change tell whether somebody has changed it."""

    size: int
    changed: int
    checksum: int


class LayerFiles:
    """Units in files of a directory, in the form in which the device has them, which one read fills a buffer with.

    The directory is written once from another store, and found again while what it was made of is the same; of several
    processes that start on it each file is written by one. Every step reads all of them in order; so if they do not fit
    the host's free memory together, each would have left the page cache before it is read again, and they are read past
    it.

    Attributes:
        tier: "disk".
        directory: where the files are.
        direct: they are read past the page cache.
    """

    tier = "disk"

    def __init__(self, directory: Path, templates: dict[int, Any], files: dict[Unit, _LayerFile]):
        self.directory, self._templates, self._files = directory, templates, files
        self.direct = sum(file.size for file in files.values()) > free_host_bytes()
        self._checked: set[Unit] = set()

    @classmethod
    def of(
        cls,
        store: LayerStore,
        units: Sequence[Unit],
        directory: Path,
        key: list[Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> LayerFiles:
        """Files of some units, written from another store unless the directory has them already.

        Args:
            store: what is written; one unit of each segment is always read, to know its structure.
            units: the units.
            directory: a directory of its own is made in it for each ``key``.
            key: what the weights are made of; a JSON value.
            progress: called with the number of units that are there, and of all.

        Raises:
            WeightsUnavailableError: the directory cannot be written, such as on a full disk.
        """
        host = jax.devices("cpu")[0]
        # Each is kept until its turn comes, so that it is read once.
        read = {unit: store.read(unit, host) for unit in {unit.segment: unit for unit in reversed(units)}.values()}
        templates = {
            unit.segment: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
            for unit, tree in read.items()
        }
        own = directory / f"layers-{digest([key, {str(s): described(t) for s, t in templates.items()}])[:16]}"
        index = own / INDEX
        files: dict[Unit, _LayerFile] = {}
        try:
            own.mkdir(parents=True, exist_ok=True)
            for done, unit in enumerate(units):
                if progress is not None:
                    progress(done, len(units))
                path, tree = own / _name(unit), read.pop(unit, None)
                with exclusive(own):
                    known = read_json(index) if index.is_file() else {}
                    if not path.is_file() or path.name not in known or file_state(path) != known[path.name][:2]:
                        (checksum,) = write_arrays(path, [store.read(unit, host) if tree is None else tree])
                        known[path.name] = [*file_state(path), checksum]
                        write_json(index, known)
                files[unit] = _LayerFile(*known[path.name])
        except OSError as error:
            raise WeightsUnavailableError(
                f"{own}: the layers cannot be written there: {error}. Give a directory with room for the weights."
            ) from error
        return cls(own, templates, files)

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``."""
        path, file = self.directory / _name(unit), self._files[unit]
        checksum = None if unit in self._checked else file.checksum  # once: it would take as long as reading
        what = f"layer {unit.first}"
        buffer = read_bytes(path, (file.size, file.changed), what, checksum, direct=self.direct)
        self._checked.add(unit)
        return jax.device_put(arrays_of(buffer, self._templates[unit.segment]), device)


def units_of(segments: Any) -> list[Unit]:
    """Units of a model, in the order in which they compute.

    Args:
        segments: ``DecoderConfig.segments``.
    """

    def each() -> Iterator[Unit]:
        first = 0
        for s, (group, repeats) in enumerate(segments):
            for repeat in range(repeats):
                yield Unit(s, repeat, first)
                first += len(group)

    return list(each())


def _name(unit: Unit) -> str:
    return f"layer-{unit.first:04d}.bin"
