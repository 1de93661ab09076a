"""Block runner: a streamed runner whose batches take turns in each layer, with their KV cache in any tier.

The batches of a block are the replicas of the engine: each has sequences, pages and page tables of its own. A step
goes through the units of layers; in each of them the batches that have something to compute do so one after the other,
while the KV cache of the next one is read (FlexGen's zig-zag block schedule, arXiv:2303.06865, section 4.2).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.model_runner import ACCELERATOR_MEMORY_SHARE
from jaxllm.infer.runner.page_programs import Pools, empty_pools
from jaxllm.infer.runner.program_cache import EngineProgram, config_key
from jaxllm.infer.runner.serving_mesh import put
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.infer.scheduling.proposer import AnyProposer, BatchProposer
from jaxllm.infer.streaming.blocks.block_step import BlockStep
from jaxllm.infer.streaming.blocks.pool_store import FilePools, HostPools, Part, PoolStore
from jaxllm.infer.streaming.blocks.pool_window import PoolWindow
from jaxllm.infer.streaming.blocks.unit_pools import most_written, rows_in_units, unit_groups, written_pages
from jaxllm.infer.streaming.host_memory import free_host_bytes
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement, most_that_fit, spread
from jaxllm.models import Functional


class BlockRunner(StreamedRunner):
    """Runner of a model whose KV cache is placed by a ``CachePlacement``; see ``StreamedRunner``.

    Raises:
        ConfigError: settings that it does not go with; names them.

    Attributes:
        pools: shapes of the pools of each unit, of one batch.
        parts: the window of the parts of the KV cache.
    """

    def __init__(
        self, model: Functional, params: Any, config: EngineConfig, *, weights: StreamedWeights, **options: Any
    ):
        cache = weights.placement.cache
        assert cache is not None
        if (mesh := options.get("mesh")) is not None and mesh.size > 1:
            raise ConfigError(
                "a KV cache by tier, and batches by turns (kv_device, batches), are for one device; leave the mesh out."
            )
        self.cache = cache
        self._tiers = dict[tuple[int, ...], dict[str, list[Part]]]()
        super().__init__(model, params, config, weights=weights, **options)
        # Each batch has its own; programs get those of one.
        self._lasts = [self.last, *(put(np.zeros_like(self.last), self._per_replica) for _ in self._others)]
        if self._full:
            copied = lambda: tuple(put(np.asarray(x), self._per_replica) for x in self.state)  # noqa: E731
            self._states = [self.state, *(copied() for _ in self._others)]

    @property
    def _batches(self) -> int:
        return self.cache.batches

    @property
    def _computed_at_once(self) -> int:
        return 1

    @property
    def _others(self) -> range:
        return range(1, self.cache.batches)

    # Parts of the KV cache

    def _pages_that_fit(self) -> int:
        """Pages of a batch: by ``CachePlacement.tokens``, or with a KV cache by tier all that sequences can have."""
        if self.cache.tokens is not None:
            return -(-self.cache.tokens // self.spec.page_size) + 1
        if not self.cache.leaves_device:
            return super()._pages_that_fit()
        return self.config.max_sequences * self.spec.columns + 1

    @property
    def _bytes_beside_pages(self) -> int:
        """See ``ModelRunner``; each batch has slots, and a residual stream that waits."""
        state = _bytes_of(self._abstract_state() if self._full else ())
        model = self.model.config
        stream = self.config.max_batched_tokens * model.embed_dim * np.dtype(model.dtype).itemsize
        return super()._bytes_beside_pages + len(self._others) * state + self._batches * stream

    def _size_of(self, segment: int) -> int:
        """Layers of a unit of a segment."""
        return len(self.model.config.segments[segment][0])

    def _templates(self) -> dict[int, Pools]:
        """Templates of all segments."""
        return {segment: self._template(segment) for segment in {unit.segment for unit in self.units}}

    def _template(self, segment: int) -> Pools:
        """Shapes of the pools of a part in a unit of a segment, on the device."""
        first = next(unit for unit in self.units if unit.segment == segment).first
        groups = unit_groups(self.spec.groups, first, self._size_of(segment))
        spec, place = self.spec, self._everywhere
        with self._on_page_mesh():
            shapes = jax.eval_shape(
                lambda: empty_pools(self._page_rules, groups, spec.pages, spec.page_size, self.config.max_sequences)
            )
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)

    def _parts_by_tier(self) -> dict[str, list[Part]]:
        """Parts that stay on the device, in host memory, and in files, in the order in which they compute."""
        if self.spec.pages not in self._tiers:
            sizes = {segment: _bytes_of(pools) for segment, pools in self._templates().items()}
            parts = [Part(n, batch) for n in range(len(self.units)) for batch in range(self._batches)]
            each = {part: sizes[self.units[part.unit].segment] for part in parts}
            here, others = _within(parts, each, self.cache.device_bytes)
            on_host, in_files = _within(others, each, self.cache.host_bytes)
            self._tiers = {self.spec.pages: {"device": here, "host": on_host, "disk": in_files}}
        return self._tiers[self.spec.pages]

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of the KV cache of all batches by tier."""
        sizes = {segment: _bytes_of(pools) for segment, pools in self._templates().items()}
        return {
            tier: sum(sizes[self.units[part.unit].segment] for part in parts)
            for tier, parts in self._parts_by_tier().items()
        }

    def _check_room(self, largest: int) -> None:
        """Checks that there is memory for the parts, before they are made: memory of zeros is taken when it is used.

        Args:
            largest: bytes of the largest part.

        Raises:
            ConfigError: there is not; says how much is missing, and what to do.
        """
        taken, stats = self.bytes_by_tier(), self._page_device.memory_stats()
        free = {"host": free_host_bytes()}
        if stats is not None and "bytes_limit" in stats:
            free["device"] = int(ACCELERATOR_MEMORY_SHARE * stats["bytes_limit"]) - stats.get("bytes_in_use", 0)
            taken["device"] += self.cache.window * largest
        for tier, room in free.items():
            if taken[tier] > room:
                raise ConfigError(
                    f"the KV cache of {self._batches} batches takes {taken[tier] / 2**30:.2f} GiB of the {tier}'s "
                    f"memory, and {max(0, room) / 2**30:.2f} are free: give a smaller max_len or fewer sequences, "
                    "kv_tokens below what all of them can have, or other kv_device and kv_host (with disk=DIR)."
                )

    def _make_pools(self) -> None:
        templates = self._templates()
        of = lambda part: templates[self.units[part.unit].segment]  # noqa: E731
        empty = lambda part: jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), of(part))  # noqa: E731
        tiers = self._parts_by_tier()
        self._check_room(max(map(_bytes_of, templates.values())))
        stores: dict[Part, PoolStore] = {part: HostPools(of(part)) for part in tiers["host"]}
        for part in tiers["disk"]:
            assert self.cache.disk is not None
            what = f"the KV cache of batch {part.batch} in layer {self.units[part.unit].first}"
            stores[part] = FilePools(of(part), self.cache.disk, what)
        held = {part: empty(part) for part in tiers["device"]}
        self.pools: Any = tuple(slots for unit in self.units for slots in templates[unit.segment])
        self.parts = PoolWindow(held, stores, self._everywhere, self.cache.window)

    # Programs

    def _programs_of(self, shape: StepShape) -> list[EngineProgram]:
        """See ``ModelRunner``: the beginning of a step of one batch, the units of each segment, and the end.

        A unit has two programs where parts of it stay on the device and others do not.
        """
        groups = self.spec.groups
        whole = [(unit.first, self._size_of(unit.segment)) for unit in self.units]
        step = BlockStep(self._step(shape), rows_in_units(groups, whole))
        inputs, key, ends, place = (
            self._abstract_inputs(shape),
            config_key(shape),
            self._abstract_weights,
            self._everywhere,
        )
        one = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)  # noqa: E731
        begin = {"params": ends, "last": inputs["last"], "packed": inputs["packed"]}
        with self._on_mesh():
            batch, hidden = one(jax.eval_shape(step.begin, *begin.values()))
        programs = [EngineProgram(f"{shape.name}-begin", step.begin, begin, (), key)]
        held = set(self._parts_by_tier()["device"])
        for segment, weights in self._layers.items():
            own = [n for n, unit in enumerate(self.units) if unit.segment == segment]
            stays = {Part(n, batch) in held for n in own for batch in range(self._batches)}
            arguments = {
                "params": ends, "weights": weights, "pools": self._template(segment), "packed": inputs["packed"],
                "batch": batch, "hidden": hidden, "first": jax.ShapeDtypeStruct((), np.int32, sharding=place),
            }  # fmt: skip
            for here in sorted(stays):
                written = {} if here else {"written": self._abstract_pages(shape)}
                program = _UnitProgram(step, segment)
                name = _unit_name(shape, segment, here)
                programs.append(EngineProgram(name, program, {**arguments, **written}, ("pools",), key))
        last = {"params": ends, "hidden": hidden, "last": inputs["last"], "packed": inputs["packed"]}
        last |= {n: inputs[n] for n in ("state", "masks") if n in inputs}
        return [*programs, EngineProgram(f"{shape.name}-end", step.end, last, ("last", "state"), key)]

    def _abstract_pages(self, shape: StepShape) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            jax.ShapeDtypeStruct(
                (most_written(shape, self.spec.page_size, pages),), np.int32, sharding=self._everywhere
            )
            for pages in self.spec.pages
        )

    def _run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None) -> Any:
        views = [shape.inputs.views(row) for row in packed]
        active = [batch for batch, view in enumerate(views) if int(view["starts"][-1])]
        sent = {batch: put(packed[batch : batch + 1], self._per_replica) for batch in active}
        pages = {batch: written_pages(shape, packed[batch], self.spec.page_size) for batch in active}
        padded = {batch: self._padded_pages(shape, pages[batch]) for batch in active}
        self.parts.begin([Part(unit, batch) for unit in range(len(self.units)) for batch in active])
        fields, streams = dict[int, Any](), dict[int, Any]()
        for batch in active:
            begun = self.programs[f"{shape.name}-begin"](self._weights, self._lasts[batch], sent[batch])
            fields[batch], streams[batch] = begun[0], self._put_aside(begun[1])
            del begun
        for place, unit in enumerate(self.units):
            weights = self.window.take(unit)
            for batch in active:
                part = Part(place, batch)
                here = part in self.parts.held
                program = self.programs[_unit_name(shape, unit.segment, here)]
                given = self.parts.take(part), sent[batch], fields[batch], self._brought(streams[batch])
                written = () if here else (padded[batch],)
                pools, hidden, *contents = program(self._weights, weights, *given, self._numbers[unit.first], *written)
                self.parts.give_back(part, pools, *contents, *(() if here else (pages[batch],)))
                streams[batch] = self._put_aside(hidden)
            self.window.give_back(unit, [streams[batch] for batch in active])
        rows: list[Any] = [None] * self._batches
        for batch in active:
            hidden = self._brought(streams[batch])
            given = self._weights, hidden, self._lasts[batch], sent[batch]
            if shape.full:
                mask = self.all_tokens(shape) if masks is None else put(masks[batch : batch + 1], self._per_replica)
                outputs = self.programs[f"{shape.name}-end"](*given, self._states[batch], mask)
                self._lasts[batch], rows[batch], self._states[batch] = outputs
            else:
                self._lasts[batch], rows[batch] = self.programs[f"{shape.name}-end"](*given)
            rows[batch].copy_to_host_async()
        return BlockOutputs(rows, shape.outputs.size)

    def _padded_pages(self, shape: StepShape, pages: list[Int[np.ndarray, " M"]]) -> tuple[Any, ...]:
        sizes = (x.shape[0] for x in self._abstract_pages(shape))
        return tuple(
            put(np.pad(own, (0, size - len(own))), self._everywhere) for own, size in zip(pages, sizes, strict=True)
        )

    def _put_aside(self, hidden: Any) -> Any:
        """The residual stream of a batch where it waits for its turn."""
        return jax.device_put(hidden, jax.devices("cpu")[0]) if self.cache.streams == "host" else hidden

    def _brought(self, hidden: Any) -> Any:
        return jax.device_put(hidden, self._everywhere) if self.cache.streams == "host" else hidden

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """See ``StreamedRunner``."""
        try:
            return super().run(shape, packed, masks)
        except BaseException:
            self.parts.restart()
            raise

    # What the engine asks of the device's state

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Writes a request's logits-processor state into its slot of a batch."""
        self._states[replica] = self.programs["seat"](self._states[replica], put(packed[None], self._per_replica))

    def counters(self) -> dict[str, int]:
        """Counters of reads, waits and pages that were written back, by name."""
        seen, found = self.parts.counts, super().counters()
        found |= {"kv_stalls": seen.stalls, "kv_stalled_milliseconds": round(1e3 * seen.stalled_seconds)}
        for tier in sorted(seen.reads):
            found |= {f"kv_reads_{tier}": seen.reads[tier], f"kv_read_bytes_{tier}": seen.read_bytes[tier]}
            found[f"kv_written_pages_{tier}"] = seen.written_pages[tier]
        return found

    def close(self) -> None:
        """Ends the threads that read layers and KV cache."""
        super().close()
        self.parts.close()


class BlockOutputs:
    """Outputs of the batches of a step, int32[B, elements] when they are there: zeros of a batch that did nothing."""

    def __init__(self, rows: list[Any], elements: int):
        self._rows, self._elements = rows, elements

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Waits for them."""
        empty = np.zeros((1, self._elements), np.int32)
        return np.concatenate([empty if row is None else np.asarray(row) for row in self._rows]).astype(
            dtype or np.int32
        )

    def is_ready(self) -> bool:
        """Whether they are there."""
        return all(row is None or row.is_ready() for row in self._rows)


def check_blocks(config: EngineConfig, placement: WeightPlacement, proposer: AnyProposer | None = None) -> None:
    """Checks what goes with batches by turns and a KV cache by tier.

    Args:
        config, placement: of the engine, and of its weights and KV cache.
        proposer: that of the engine, where ``config`` names none.

    Raises:
        ConfigError: names what does not.
    """
    kind, drafter = (config.speculate or "ngram").partition(":")[0], type(proposer).__name__
    wrong = {
        "batch_invariant, which needs preemption = 'swap',": config.batch_invariant,
        f"preemption = {config.preemption!r} (give 'recompute')": config.preemption == "swap",
        f"kv_host_gib = {config.kv_host_gib}": config.kv_host_gib > 0,
        f"retention = {config.retention!r}": config.retention is not None,
        f"kv_dtype = {config.kv_dtype!r}, which encodes whole pages (give int4, int8 or fp8),": config.residual_window
        > 0,
        f"kv_dtype = {config.kv_dtype!r}, whose values are in host memory,": config.values_on_host,
        f"speculate = {config.speculate!r} (give 'ngram')": kind != "ngram",
        f"proposer = {drafter}, whose drafts are of one batch (give 'ngram'),": isinstance(proposer, BatchProposer),
        "draft_trees, a tree of draft tokens (give 'ngram')": config.draft_trees,
        f"chunk_cache = {config.chunk_cache!r}": bool(config.chunk_cache),
        f"experts = {placement.expert_slots} (experts in slots)": placement.expert_slots > 0,
    }
    for name in (name for name, is_so in wrong.items() if is_so):
        raise ConfigError(
            f"engine: {name} does not go with batches by turns or a KV cache by tier (batches, kv_device): leave one "
            "of them out."
        )


class _UnitProgram:
    """``BlockStep.unit`` of a segment, whose donated arguments have positions."""

    def __init__(self, step: BlockStep, segment: int):
        self.step, self.segment = step, segment

    def __call__(
        self,
        params: Any,
        weights: Any,
        pools: Any,
        packed: Any,
        batch: Any,
        hidden: Any,
        first: Any,
        written: Any = None,
    ) -> Any:
        """See ``BlockStep.unit``."""
        return self.step.unit(self.segment, params, weights, pools, packed, batch, hidden, first, written)


def _unit_name(shape: StepShape, segment: int, held: bool) -> str:
    return f"{shape.name}-unit-{segment}" + ("-held" if held else "")


def _within(parts: list[Part], sizes: dict[Part, int], most: int | None) -> tuple[list[Part], list[Part]]:
    """Parts that have room, spread evenly, and the others; None: all have."""
    if most is None:
        return parts, []
    return spread(parts, most_that_fit([sizes[part] for part in parts], most))


def _bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
