"""Phase runner: a model runner of one engine of a pool, on devices of its own, with the programs of one phase.

Besides the steps of its phase it has the programs that give pages to another pool, or take them. A program of either
kind is for 1, 2, 4, 8 or 16 pages, so that any number of pages travels without padding.

Legend: B replicas (1), L layers, P pages of the pool, M pages of a transfer, K kv heads of this pool.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import sharding
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.model_runner import ModelRunner
from jaxllm.infer.runner.page_programs import read_pages, write_pages
from jaxllm.infer.runner.paged_cache import TRANSFER_AXES, LayerGroup
from jaxllm.infer.runner.program_cache import EngineProgram
from jaxllm.infer.runner.serving_mesh import put
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models import Functional
from pallas_kernels.paged_attention import Slots

Phase = Literal["prefill", "decode"]
One = TypeVar("One")
PAGE_COUNTS = (16, 8, 4, 2, 1)
"""Pages that one program gives or takes."""


class PhaseRunner(ModelRunner):
    """Runner of one engine of a pool; see ``ModelRunner``.

    Args:
        model, params: model and all of its weights, on any devices; they are copied to the engine's.
        config: sizes of the engine.
        phase: the phase of its pool.
        devices: devices of this engine.
        taker_shards: of a prefill engine: over how many devices a decode engine splits its kv heads.
        device_count: devices of all engines in this process.
        options: of ``ModelRunner``.

    Attributes:
        phase, devices: as given.
        connected, resting: always True, see ``DecodeEngine``.
    """

    connected = resting = True

    def __init__(
        self,
        model: Functional,
        params: Any,
        config: EngineConfig,
        phase: Phase,
        devices: Sequence[Any],
        taker_shards: int,
        device_count: int,
        **options: Any,
    ):
        self.phase, self.devices, self._taker_shards, self._every = phase, tuple(devices), taker_shards, device_count
        mesh = None
        if len(devices) > 1:
            mesh = sharding.MeshSpec.parse(f"tensor={len(devices)}").build(devices)
        else:
            there = jax.sharding.SingleDeviceSharding(devices[0])
            params = jax.tree.map(lambda x: put(x, there), params)
        super().__init__(model, params, config, mesh=mesh, **options)

    def enter(self) -> bool:
        """See ``DecodeEngine``; an engine of this process always takes another sequence."""
        return True

    def rest(self) -> None:
        """See ``DecodeEngine``."""

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        """See ``Runner``; all steps are of this pool's phase, a chunk of one token too."""
        return super().choose(requests, tokens, decode=self.phase == "decode", full=full)

    # Pages to and from other engines

    def give(self, group: int, pages: list[int]) -> Iterator[tuple[list[int], tuple[Slots, ...]]]:
        """Reads pages for a decode engine, behind the steps that were started.

        Yields:
            some of the pages, and their contents in parts, one for each device of the decode engine: ``Slots`` of
            [L, M, K of that device, ...], with every device of this engine.
        """
        for some in counted(pages):
            with self._on_mesh():
                yield some, self.programs[f"give-{group}-{len(some)}"](self.pools[group], self._numbers(some))

    def take(self, group: int, pages: list[int], held: Slots) -> None:
        """Writes pages that have arrived, ``[L, M, K, ...]`` on this engine's devices, before the steps to come."""
        with self._on_mesh():
            pool = self.programs[f"take-{group}-{len(pages)}"](self.pools[group], self._numbers(pages), held)
        self.pools = (*self.pools[:group], pool, *self.pools[group + 1 :])

    def receive(self, group: int, pages: list[int], parts: Sequence[Slots]) -> DeviceArrival:
        """Starts to copy pages of a prefill engine of this process to this engine's devices, see ``DecodeEngine``."""
        return DeviceArrival(self, group, pages, self.assembled(near_copies(parts)))

    def assembled(self, parts: Sequence[Slots]) -> Slots:
        """Parts of pages on one device each or on the host, copied to this engine's devices as one array over them.

        The copies are asynchronous, and each device gets its own part of the kv heads alone.
        """
        mesh = self.mesh
        if mesh is None:
            return jax.tree.map(lambda x: jax.device_put(x, self.devices[0]), parts[0])
        devices, place = list(mesh.devices.flat), self._sharding(*TRANSFER_AXES)

        def joined(*parts: Any) -> Array:
            sent = [jax.device_put(x, device) for x, device in zip(parts, devices, strict=True)]
            layers, pages, heads, *rest = parts[0].shape
            return jax.make_array_from_single_device_arrays((layers, pages, heads * len(parts), *rest), place, sent)

        return jax.tree.map(joined, *parts)

    def _numbers(self, pages: list[int]) -> Any:
        return put(np.asarray([pages], np.int32), self._per_replica)

    # Programs

    @functools.cached_property
    def _shapes(self) -> list[StepShape]:
        """See ``ModelRunner``: those of the pool's phase."""
        return [shape for shape in super()._shapes if shape.decode == (self.phase == "decode")]

    def _programs(self) -> tuple[list[EngineProgram], int]:
        """See ``ModelRunner``; pages travel from the first request on."""
        programs, first = super()._programs()
        moving = [
            self._giving(group, count) if self.phase == "prefill" else self._taking(group, count)
            for group in range(len(self.spec.groups))
            for count in PAGE_COUNTS
        ]
        return [*moving, *programs], first + len(moving)

    def _giving(self, group: int, count: int) -> EngineProgram:
        own, shards = self.spec.groups[group], self._taker_shards
        run = functools.partial(self._by_rules(cut_pages), group=own, held_by=self._shards, shards=shards)
        arguments = {"pool": self._abstract_pools()[group], "pages": self._abstract_ints(count)}
        return EngineProgram(f"give-{group}-{count}", run, arguments, key=[self._shards, shards])

    def _taking(self, group: int, count: int) -> EngineProgram:
        pool, place = self._abstract_pools()[group], self._sharding(*TRANSFER_AXES)
        held = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0], count, *x.shape[2:]), x.dtype, sharding=place), pool.in_pages()
        )
        arguments = {"pool": pool, "pages": self._abstract_ints(count), "held": held}
        return EngineProgram(f"take-{group}-{count}", self._by_rules(write_pages), arguments, donated=("pool",))

    @property
    def _device_count(self) -> int:
        """Devices that share the host's memory, where it is theirs."""
        return self._every


@dataclass(eq=False)
class DeviceArrival:
    """Pages on their way between devices of one process, see ``PageArrival``.

    Attributes:
        taker: runner of the decode engine.
        group: their layer group.
        pages: pages of the decode engine.
        held: their contents, on its devices.
    """

    taker: PhaseRunner
    group: int
    pages: list[int]
    held: Slots | None

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return sum(x.nbytes for x in jax.tree.leaves(self.held))

    @property
    def has_arrived(self) -> bool:
        """Whether the contents are on the decode engine's devices."""
        return all(x.is_ready() for x in jax.tree.leaves(self.held))

    def land(self) -> None:
        """Writes the contents into the pages, behind the steps that were started and before others."""
        if self.held is not None:
            self.taker.take(self.group, self.pages, self.held)
        self.held = None

    def drop(self) -> None:
        """Drops the contents."""
        self.held = None


def cut_pages(
    rules: sharding.Rules, pool: Slots, pages: Int[Array, "B M"], *, group: LayerGroup, held_by: int, shards: int
) -> tuple[Slots, ...]:
    """Gathers pages of one pool for another, cut into the parts that the other's devices hold.

    Where there are fewer kv heads than devices, a pool has copies of them, see ``replicate_kv_heads``: those that the
    other has not are left out, and those that it has besides are added.

    Args:
        rules: sharding rules of this pool's engine.
        pool: pages of this pool.
        pages: pages to give.
        group: the layers of both pools.
        held_by: shards of the kv heads of this pool.
        shards: shards of the kv heads of the other pool.
    """
    heads = group.kv_spec.kv_heads
    here, there = (group.format(n).kv_heads // heads for n in (held_by, shards))

    def copied(x: Array) -> Array:
        layers, count, _, *rest = x.shape
        once = x[:, :, ::here, None]
        return jnp.broadcast_to(once, (layers, count, heads, there, *rest)).reshape(layers, count, -1, *rest)

    held = read_pages(rules, pool, pages)
    if here != there:
        held = jax.tree.map(copied, held)
    part = heads * there // shards
    return tuple(
        jax.tree.map(lambda x, first=first: jax.lax.slice_in_dim(x, first, first + part, axis=2), held)
        for first in range(0, heads * there, part)
    )


def counted(items: list[One]) -> Iterator[list[One]]:
    """Splits a list into lists of ``PAGE_COUNTS`` items, the longest first."""
    at = 0
    while at < len(items):
        size = next(count for count in PAGE_COUNTS if count <= len(items) - at)
        yield list(itertools.islice(items, at, at + size))
        at += size


def near_copies(parts: Sequence[Slots]) -> list[Slots]:
    """Parts that ``PhaseRunner.give`` has made, each from one of the devices that have it, in turn."""

    def near(x: Array, part: int) -> Array:
        return x.addressable_data(part * len(x.addressable_shards) // len(parts))

    return [jax.tree.map(functools.partial(near, part=number), part) for number, part in enumerate(parts)]
