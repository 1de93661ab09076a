"""Model runner: the device side of the engine. It owns the weights, the compiled programs and the paged KV cache.

For tensor parallel serving over a mesh, weights, page pools and steps are sharded by ``serving_mesh``.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from jaxllm.config import ConfigError
from jaxllm.files import digest
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.grammar import mask_width
from jaxllm.infer.length_limits import check_branches, choose_max_len
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.adapter_pool import AdapterPool, Page
from jaxllm.infer.runner.page_programs import Pools, empty_pools, read_pages, seat, write_pages
from jaxllm.infer.runner.paged_cache import (
    POOL_AXES,
    TRANSFER_AXES,
    LayerGroup,
    check_pages,
    layer_groups,
    pool_sizes,
)
from jaxllm.infer.runner.program_cache import EngineProgram, ProgramCache, config_key, describe, source_of
from jaxllm.infer.runner.retention.eviction import check_scores, heads_of
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.serving_mesh import (
    check_mesh,
    check_overlap,
    check_star,
    fresh,
    placements,
    put,
    relaid,
    serving_model,
    spans_processes,
    with_layouts,
)
from jaxllm.infer.runner.step.engine_step import EngineStep
from jaxllm.infer.runner.step.step_halves import OPTIONS
from jaxllm.infer.runner.step.step_shape import StepShape, by_usefulness, smallest_fitting
from jaxllm.models import Functional, has_unstacked_layers, unstack_layers
from jaxllm.models.packed_weight import batch_dependent_formats, has_packed, native_vectors
from jaxllm.parallel import distributed
from pallas_kernels._compat import target_device
from pallas_kernels.paged_attention import Slots
from pallas_kernels.paged_attention.pages import host_sharding
from pallas_kernels.paged_attention.retention import by_scores
from pallas_kernels.paged_attention.tree_mask import BITS

PAGES_PER_TRANSFER = 16
"""Pages that one program copies between device and host when a sequence is swapped."""
ACCELERATOR_MEMORY_SHARE = 0.9
"""Fraction of an accelerator's memory that weights, page pools and a step's temporaries may use together."""
CPU_MEMORY_SHARE = 1 / 16
"""Fraction of the host's memory that page pools take on CPU by themselves: they are filled with zeros at the start,
which takes a second for a few gigabytes, and the memory is not free for others."""
HOST_MEMORY_SHARE = 1 / 2
"""Most of the host's memory that values of a KV cache take there."""


class ModelRunner:
    """Runner of a model on the devices of this process, or its part of a mesh over several processes.

    Compiles the programs of ``config`` and allocates the page pools. Arguments as for ``Engine.of``; ``reserved_bytes``
    of each device are left to others, such as a draft model. On a mesh over several processes all programs are
    compiled before the first step, because all processes must choose the same ones.

    ``every_row``, ``branches``: see ``StepShape``. ``tree_tokens``: most tokens of a tree mask; None: by ``config``.

    ``layers``: "given": as ``params`` has them. "auto": one array per layer where all programs for that are on disk,
    which decodes faster on CPUs and GPUs and compiles longer; the stacks of ``params`` are freed then. On one device
    and without adapters, and not with packed weights on a CPU; as given otherwise.

    Attributes:
        spec: sizes, all settled.
        programs: compiled programs by name, those that are ready.
        program_cache: cache of the compiled programs, with counts of compilations.
        spans_processes: the mesh has devices of several processes, see ``multihost``.
        follows: always False, see ``Runner``.
        adapter_pool: layout of the pool of adapters; None without ``adapter_slots``.
    """

    follows = False
    phase: str = ""
    """Phase of the steps: "prefill" or "decode" in an engine of disaggregated pools, else "": both."""

    def __init__(
        self,
        model: Functional,
        params: Any,
        config: EngineConfig,
        *,
        vocab_size: int,
        longest: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
        manifest: Path | None = None,
        strict: bool = False,
        reserved_bytes: int = 0,
        background: bool = False,
        plain_first: bool = False,
        shipped: Path | None = None,
        trusted: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        layers: Literal["given", "auto"] = "given",
        every_row: bool = False,
        branches: int = 0,
        tree_tokens: int | None = None,
    ):
        self._reserved_bytes, self._plain_first, self._every_row = reserved_bytes, plain_first, every_row
        self._branches = branches
        self._tree_tokens = (config.verify_tokens if config.draft_trees else 0) if tree_tokens is None else tree_tokens
        if config.draft_trees:
            check_branches(model.config, config.verify_tokens)
        self.config, self.vocab_size = config, vocab_size
        ways = {"span": config.kv_span, "star_bytes": config.star_bytes}
        self.model, self._split_model = (serving_model(model, split=way, **ways) for way in (False, True))
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        latent = any(block.attention.kv_spec.latent for block in model.config.blocks)
        check_mesh(
            self.mesh,
            invariant=config.batch_invariant,
            latent=latent,
            retention=config.retention is not None,
            residual=bool(config.residual_window),
            values_on_host=config.values_on_host,
            platform=target_device().platform,
            span=config.kv_span,
        )
        if config.batch_invariant and (found := batch_dependent_formats(params)):
            raise ValueError(
                f"batch_invariant does not go with {found[0]}: an input is an outlier by any token of a step. Choose "
                "w8a8, or leave batch_invariant out."
            )
        check_star(self.mesh, config.star_bytes)
        if config.overlap != "none" and not config.offloads_attention:
            check_overlap(self.mesh, model.config.residual)
        if config.draft_features and self.mesh is not None:
            raise ConfigError(
                "engine: draft_features, which a draft head needs, are kept on one device; not on a mesh."
            )
        self.spans_processes = spans_processes(self.mesh)
        replicas = self._batches
        if self.mesh is None:
            # The type of an array on a one-device mesh would differ from the type of the programs' outputs.
            params = jax.tree.map(_on_one_device, params)
        else:
            params = jax.tree.map(put, params, placements(self.model, params, self.mesh))
            with self._on_mesh(), sharding.use_rules(self.model.rules):
                replicas = sharding.axis_size("batch")
        groups = layer_groups(model.config, config.kv_dtype, config.retention)
        check_scores(config, groups, self._shards)
        self._heads = heads_of(model.config, groups, 1 if self.mesh is None else self.mesh.size)
        max_len = choose_max_len(model.config, config.max_len, longest)
        page_size = config.page_size or -(-max_len // 64) * 64
        columns = -(-max_len // page_size)
        check_pages(groups, page_size)
        devices = list(self.mesh.devices.flat) if self.mesh is not None else [_device_of(params)]
        own = [*filter(None, [self.phase]), *([jax.process_index()] if self.spans_processes else [])]

        def cache_of(weights: Any) -> ProgramCache:
            key = [
                *own,
                *config_key(self.model.config),
                str(self.model.rules),
                [source_of(row) for group in groups for row in (group.format().kv_format, group.rule)],
                describe(weights),
                [vocab_size, page_size, config.kv_dtype, config.retention, config.batch_invariant],
                [config.adapter_slots, config.adapter_rank, config.adapter_pages],
                *filter(None, [native_vectors(weights)]),
            ]
            return ProgramCache(manifest, key, devices, strict, shipped=shipped, trusted=trusted)

        of_sizes = digest([*config_key(config), max_len, *self._page_key])[:8]
        complete = f"complete-{of_sizes}"
        # Of packed layers apart, XLA:CPU would dequantise many at once, into memory.
        platform = target_device().platform
        widened = has_packed(params) and platform == "cpu"
        may_choose = layers == "auto" and self.mesh is None and not config.adapter_slots and not widened
        if may_choose and not has_unstacked_layers(params):
            apart = with_layouts(self.model, _abstract(params, apart=True), platform)
            compiled = cache_of(apart).saved_value(complete) is not None
            params = unstack_layers(params, donate=True) if compiled else params
        self._abstract = with_layouts(self.model, params, "" if self.spans_processes else platform)
        self.params = jax.tree.map(relaid, params, self._abstract)
        self.adapter_pool = AdapterPool(self.model, params, config) if config.adapter_slots else None
        # The weights as the programs take them: with the pool of adapters, where there is one.
        self._factors, self._abstract_weights = (), self._abstract
        if self.adapter_pool is not None:
            self._factors = self.adapter_pool.arrays(self._weight_sharding)
            self._abstract_weights = self.adapter_pool.weights(self._abstract, self._factors)
        if self._heads:
            self._heads = jax.tree.map(lambda x: jax.device_put(x, _device_of(params)), self._heads)
            self._abstract_weights = self._abstract_weights | _abstract(self._heads)
        self.program_cache = cache_of(self._abstract_weights)
        least = (columns + 1,) * len(groups)
        self.spec = RunnerSpec(groups, least, page_size, columns, max_len, model.config.vocab_size, replicas)
        held = f"pages-{of_sizes}"
        if config.pages is not None or (pages := self.program_cache.saved_value(held)) is None:
            pages = self._pool_sizes(
                self._span * (config.pages or 0) or self._minimum_over_processes(self._pages_that_fit())
            )
            self.program_cache.saved_value(held, list(pages))
        self.spec = dataclasses.replace(self.spec, pages=tuple(pages))
        self._swaps = config.preemption == "swap" or config.has_tiers
        programs, first = self._programs()
        behind = background and not self.spans_processes

        cache = self.program_cache  # the loader, which a finalizer of the runner holds, must not hold the runner

        def tell(stage: str, done: int, total: int) -> None:
            if done == total and cache.saved_value(complete) is None:
                cache.saved_value(complete, total)
            if progress is not None:
                progress(stage, done, total)

        self.programs = self.program_cache.load(programs, first if behind else len(programs), tell)
        weakref.finalize(self, self.programs.stop)
        with self._on_mesh():
            self._factors = tuple(put(np.zeros(x.shape, x.dtype), x.sharding) for x in self._factors)
            self._combine()
            with self._on_page_mesh():
                self._make_pools()
            if config.draft_features:
                features = self._abstract_pools()[-1].data
                self.pools += (Slots(jax.device_put(jnp.zeros(features.shape, features.dtype), features.sharding)),)
            many = self._computed_at_once
            self.last = put(np.zeros((many, config.max_sequences), np.int32), self._per_replica)
            if self._full:
                state = logits_processors.empty_state(config.max_sequences, model.config.vocab_size)
                self.state = tuple(put(np.broadcast_to(x, (many, *x.shape)), self._per_replica) for x in state)
                sizes = {_mask_rows(shape) for shape in self._shapes if shape.full}
                width = mask_width(model.config.vocab_size)
                self._all_tokens = {n: put(np.full((many, n, width), -1, np.int32), self._per_replica) for n in sizes}
        self.programs.start()

    @property
    def features(self) -> Any:
        """Hidden states of all tokens of the batch, Float[Array, "R L D"], with ``draft_features``."""
        return self.pools[-1].data

    # Steps

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        """Shape of the smallest program that a step fits into, of those that are ready, see ``Runner``."""
        full = full or "plain" not in self.config.samplers
        least = self.shape(*self.config.program_rows(requests, tokens, decode=decode), full)
        if self.programs.complete:
            return least
        ready = [shape for shape in self._shapes if all(name in self.programs for name in self._program_names[shape])]
        return smallest_fitting(ready, least) or least

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Starts a step; the copy of its result to the host has begun when this returns."""
        program = self.programs[shape.name]
        with self._on_mesh():
            arguments = self._weights, self.pools, self.last, put(packed, self._per_replica)
            if shape.full:
                legal = self.all_tokens(shape) if masks is None else put(masks, self._per_replica)
                self.pools, self.last, out, self.state = program(*arguments, self.state, legal)
            else:
                self.pools, self.last, out = program(*arguments)
        out.copy_to_host_async()
        return out

    def all_tokens(self, shape: StepShape) -> jax.Array:
        """Token masks of a step that allow all tokens."""
        return self._all_tokens[_mask_rows(shape)]

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Writes a request's logits-processor state into its slot."""
        every = np.zeros((self.spec.replicas, packed.size), np.int32)
        for row in every:
            # A slot out of range: nothing is written in the other replicas.
            logits_processors.slot_buffer(self.spec.vocab).views(row)["slot"][...] = self.config.max_sequences
        every[replica] = packed
        with self._on_mesh():
            self.state = self.programs["seat"](self.state, put(every, self._per_replica))

    @property
    def _expected(self) -> Any:
        """Shapes and dtypes of the weights that ``swap`` takes."""
        return self._abstract

    def check(self, params: Any) -> None:
        """Checks that weights can replace those in use.

        Raises:
            ValueError: names the weight whose structure, shape or dtype differs.
        """
        want, got = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (self._expected, params))
        if [path for path, _ in want] != [path for path, _ in got]:
            raise ValueError("the weights have another structure than those this engine was built for; give that tree.")
        for (path, w), (_, g) in zip(want, got, strict=True):
            if (w.shape, w.dtype) != (g.shape, g.dtype):
                raise ValueError(
                    f"weights{jax.tree_util.keystr(path)} are {g.dtype}{list(g.shape)}; this engine was built for "
                    f"{w.dtype}{list(w.shape)}. Convert them to that dtype and shape."
                )

    def swap(self, params: Any) -> None:
        """Replaces the weights, for the same programs.

        Args:
            params: weights that ``check`` accepts; on the same devices or others.
        """
        self.check(params)
        if self.mesh is None:
            params = jax.tree.map(lambda x: x.addressable_data(0) if x.is_fully_replicated else x, params)
        self.params = jax.tree.map(fresh, params, self._abstract)
        self._combine()

    def write_adapter(self, page: int, content: Page) -> None:
        """Writes a page of an adapter into the pool of adapters."""
        with self._on_mesh():
            placed = tuple(put(x, there) for x, there in zip(content, self._page_shardings, strict=True))
            number = put(np.full(self._computed_at_once, page, np.int32), self._per_replica)
            self._factors = self.programs["adapter"](self._factors, number, placed)
        self._combine()

    def _combine(self) -> None:
        pool = self.adapter_pool
        weights = self.params if pool is None else pool.weights(self.params, self._factors)
        self._weights = weights | self._heads if self._heads else weights

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        """Not supported in an engine of one process; see ``MultihostRunner``.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a runner of one process has no process 0 to follow; build the engine on a mesh of several.")

    def close(self) -> None:
        """Does nothing: no other process follows."""

    # Swapping pages to the host

    def read(self, replica: int, group: int, pages: list[int]) -> Slots:
        """Copies pages of a replica's pool to the host."""
        parts = []
        for at in range(0, len(pages), PAGES_PER_TRANSFER):
            some = pages[at : at + PAGES_PER_TRANSFER]
            with self._on_page_mesh():
                found = self.programs[f"read-{group}"](self.pools[group], self._padded(replica, some, group))
            parts.append(jax.tree.map(lambda x, some=some: np.asarray(x)[:, : len(some)], found))
        return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts) if parts else Slots(np.empty(0))

    def write(self, replica: int, group: int, pages: list[int], content: Slots) -> None:
        """Copies pages from the host into a replica's pool."""
        for at in range(0, len(pages), PAGES_PER_TRANSFER):
            some = pages[at : at + PAGES_PER_TRANSFER]
            rest = ((0, 0), (0, PAGES_PER_TRANSFER - len(some)), *((0, 0),) * 3)
            held = jax.tree.map(lambda x, at=at, rest=rest: np.pad(x[:, at : at + PAGES_PER_TRANSFER], rest), content)
            with self._on_page_mesh():
                placed = jax.tree.map(lambda x: put(x, self._page_sharding(*TRANSFER_AXES)), held)
                pool = self.programs[f"write-{group}"](self.pools[group], self._padded(replica, some, group), placed)
            self.pools = (*self.pools[:group], pool, *self.pools[group + 1 :])

    def _padded(self, replica: int, pages: list[int], group: int) -> Any:
        # Page numbers out of range stand for no page.
        padded = np.full((self.spec.replicas, PAGES_PER_TRANSFER), self.spec.pages[group], np.int32)
        padded[replica, : len(pages)] = pages
        return put(padded, self._page_sharding("batch"))

    # Sizes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token, in all layers and on all shards, scales included."""
        return sum(group.token_bytes(self._shards, self.spec.page_size) for group in self.spec.groups)

    @property
    def _shards(self) -> int:
        """Number of shards of the kv heads."""
        with self._on_page_mesh(), sharding.use_rules(self._page_rules):
            return sharding.axis_size("attn_kv_heads")

    @property
    def _batches(self) -> int:
        """Batches of a device that compute by turns; each is a replica of the engine, with pages of its own."""
        return 1

    @property
    def _page_key(self) -> list[str]:
        """Settings beside the engine's that the number of pages depends on, for the one that is kept."""
        return []

    @property
    def _most_page_bytes(self) -> float:
        """Most bytes of pages on a device, however much room there is."""
        return math.inf

    @property
    def _computed_at_once(self) -> int:
        """Replicas that a program computes."""
        return self.spec.replicas

    @property
    def _device_count(self) -> int:
        """Number of devices that have pages."""
        return 1 if self.mesh is None else self.mesh.size

    def _pages_that_fit(self) -> int:
        """Pages that fit into memory beside the weights and the temporaries of the largest program."""
        memory = self._page_device.memory_stats()
        if memory is None or "bytes_limit" not in memory:
            devices = self._device_count
            room = min(CPU_MEMORY_SHARE * _host_memory() / devices / self._batches, self._most_page_bytes)
            # As many as can be in use, and one sequence's for the prefix cache.
            most = (self.config.max_sequences + 1) * self.spec.columns
        else:
            largest = by_usefulness(self._shapes)[0][0]
            compiled = self.program_cache.compile_all(self._programs_of(largest))
            temporaries = max(one.memory.temp_size_in_bytes for one in compiled.values())
            self.program_cache.counts.compiled = self.program_cache.counts.loaded = 0
            room = ACCELERATOR_MEMORY_SHARE * memory["bytes_limit"] - temporaries - self._bytes_beside_pages
            room = min((room - self._reserved_bytes) / self._batches, self._most_page_bytes)
            most = int(max(room, 0) // min(map(self._page_bytes, self.spec.groups)))
        least = self.spec.columns + 1

        def taken(pages: int) -> int:
            return sum(n * self._page_bytes(g) for n, g in zip(self._pool_sizes(pages), self.spec.groups, strict=True))

        def taken_on_host(pages: int) -> int:
            each = [group.host_page_bytes(self.spec.page_size) for group in self.spec.groups]
            return sum(n * one for n, one in zip(self._pool_sizes(pages), each, strict=True))

        if taken(least) > room:
            raise ValueError(
                f"the device has room for {max(room, 0) / 2**30:.2f} GiB of KV cache, and a sequence of "
                f"{self.spec.max_len} tokens needs {taken(least) / 2**30:.2f}: give a smaller max_len or "
                f"max_batched_tokens{', or fewer adapter_slots' if self.config.adapter_slots else ''}"
                f"{'' if self._most_page_bytes == math.inf else ', or a larger kv_limit (fit: length)'}."
            )
        pages = bisect.bisect_right(range(most + 1), room, key=taken, lo=least) - 1
        pages = max(pages, least)
        room = HOST_MEMORY_SHARE * _host_memory()
        return max(bisect.bisect_right(range(pages + 1), room, key=taken_on_host, lo=least) - 1, least)

    @property
    def _bytes_beside_pages(self) -> int:
        """Bytes of weights and slots on a device that has pages."""
        return _bytes_of(self._abstract_weights) + _bytes_of(self._abstract_state() if self._full else ())

    def _minimum_over_processes(self, room: int) -> int:
        """Smallest number of pages that any process has room for."""
        if not self.spans_processes:
            return room
        said = distributed.group().gather("room for pages", str(room))
        return int(distributed.group().broadcast("pages", str(min(map(int, said))) if said else ""))

    def _pool_sizes(self, most: int) -> tuple[int, ...]:
        """Pages of each pool; with a sliding window, no more than the windows of all sequences cover."""
        spec = self.spec
        if most < spec.columns + 1:
            raise ConfigError(
                f"engine: pages = {most}, but one sequence of {spec.max_len} tokens needs {spec.columns + 1} of "
                f"{spec.page_size}: give more pages or a smaller max_len."
            )
        counts = pool_sizes(self.config, spec.groups, spec.page_size, spec.columns, most)
        return tuple(-(-count // self._span) * self._span for count in counts)

    def _page_bytes(self, group: LayerGroup) -> int:
        shards = self._shards
        return group.page_bytes(self.spec.page_size, shards) // (shards * self._span)

    @property
    def _span(self) -> int:
        """Devices that the pages of a replica are spread over."""
        return self.mesh.shape["context"] if self.config.kv_span and self.mesh is not None else 1

    # Programs

    def shape(self, tokens: int, decode: bool, full: bool) -> StepShape:
        """Shape of a step with ``tokens`` rows."""
        return StepShape(
            tokens=tokens,
            requests=min(tokens, self.config.max_sequences),
            decode=decode,
            full=full,
            slots=self.config.max_sequences,
            columns=self.spec.columns,
            groups=len(self.spec.tables),
            decode_steps=self.config.decode_steps,
            top_logprobs=min(self.config.top_logprobs, self.model.config.vocab_size) if full else 0,
            logprob_dtype=str(jnp.promote_types(self.model.config.dtype, jnp.float32)),
            rows=1 if decode else 1 + self.config.verify_tokens,
            retained=tuple(i for i, g in enumerate(self.spec.tables) if self.spec.groups[g].rule is not None),
            adapters=None if (pool := self.adapter_pool) is None else (pool.slots, pool.columns),
            residual=any(group.residual for group in self.spec.groups),
            evicts=any(by_scores(group.rule) for group in self.spec.groups),
            every_row=self._every_row and not decode,
            features=self.config.draft_features,
            tree_words=0 if decode else -(-self._tree_tokens // BITS),
            branches=0 if decode else min(self._branches, self.model.config.vocab_size),
            shares=decode and self.config.two_phase,
            slices=any(group.kv_spec.slices > 1 for group in self.spec.groups),
            halves=tokens > 1 and self.config.in_halves(tokens, decode=decode),
        )

    def _programs(self) -> tuple[list[EngineProgram], int]:
        """All programs, and how many of them the engine can serve with; the others with the most useful first."""
        first, others = by_usefulness(self._shapes, self._plain_first)
        programs, later = [one for shape in first for one in self._programs_of(shape)], list[EngineProgram]()
        if self._full:
            row = logits_processors.slot_buffer(self.model.config.vocab_size)
            arguments = {"state": self._abstract_state(), "packed": self._abstract_ints(row.size)}
            seating = EngineProgram("seat", self._by_rules(seat), arguments, donated=("state",))
            (programs if any(shape.full for shape in first) else later).append(seating)
        if self.adapter_pool is not None:
            content = self.adapter_pool.page(self._factors)
            self._page_shardings = [x.sharding for x in content]
            arguments = {"arrays": self._factors, "page": self._abstract_ints(), "content": content}
            programs.append(EngineProgram("adapter", self.adapter_pool.write, arguments, donated=("arrays",)))
        programs += self._transfer_programs() if self._swaps else []
        return [*programs, *later, *(one for shape in others for one in self._programs_of(shape))], len(programs)

    def _transfer_programs(self) -> list[EngineProgram]:
        """Programs that copy pages of each group between device and host."""
        programs = []
        for group in range(len(self.spec.groups)):
            pool, place = self._abstract_pools()[group], self._page_sharding(*TRANSFER_AXES)
            size, where = (self.spec.replicas, PAGES_PER_TRANSFER), self._page_sharding("batch")
            pages = jax.ShapeDtypeStruct(size, jnp.int32, sharding=where)
            held = jax.tree.map(
                lambda x, place=place: jax.ShapeDtypeStruct(
                    (x.shape[0], PAGES_PER_TRANSFER, *x.shape[2:]), x.dtype, sharding=place
                ),
                pool.in_pages(),
            )
            programs.append(self._page_program(f"read-{group}", read_pages, {"pool": pool, "pages": pages}))
            arguments = {"pool": pool, "pages": pages, "held": held}
            programs.append(self._page_program(f"write-{group}", write_pages, arguments, donated=("pool",)))
        return programs

    def _page_program(
        self, name: str, function: Any, arguments: dict[str, Any], donated: tuple[str, ...] = ()
    ) -> EngineProgram:
        """Program on the devices that have pages."""
        return EngineProgram(name, functools.partial(function, self._page_rules), arguments, donated)

    @functools.cached_property
    def _shapes(self) -> list[StepShape]:
        """Shapes of all steps."""
        return [
            self.shape(tokens, decode, sampler == "full")
            for decode, sizes in ((False, self.config.prompt_buckets), (True, self.config.decode_buckets))
            for tokens in reversed(sizes)
            for sampler in self.config.samplers
        ]

    @property
    def _full(self) -> bool:
        return "full" in self.config.samplers

    @functools.cached_property
    def _program_names(self) -> dict[StepShape, list[str]]:
        """Names of the programs of each shape."""
        return {shape: [one.name for one in self._programs_of(shape)] for shape in self._shapes}

    def _programs_of(self, shape: StepShape) -> list[EngineProgram]:
        """Programs that a step of a shape runs."""
        arguments = {"params": self._abstract_weights, "pools": self._abstract_pools(), **self._abstract_inputs(shape)}
        donated, key, options = ("pools", "last", "state"), config_key(shape), {}
        if shape.halves:
            with self._on_mesh():
                options = OPTIONS.get(target_device().platform, {})
        return [EngineProgram(shape.name, self._step(shape).__call__, arguments, donated, key, options=options)]

    def _abstract_inputs(self, shape: StepShape) -> dict[str, Any]:
        """Arguments of a step beside weights and pools."""
        found: dict[str, Any] = {
            "last": self._abstract_ints(shape.slots),
            "packed": self._abstract_ints(shape.inputs.size),
        }
        if shape.full:
            width = mask_width(self.model.config.vocab_size)
            found |= {"state": self._abstract_state(), "masks": self._abstract_ints(_mask_rows(shape), width)}
        return found

    def _step(self, shape: StepShape) -> EngineStep:
        ways = 1 if self.mesh is None else self.mesh.shape.get("context", 1)
        forward_model = self._split_model if ways > 1 and not shape.decode and shape.tokens % ways == 0 else self.model
        return EngineStep(
            self.model, forward_model, self.spec.groups, shape, self.vocab_size, self.config.batch_invariant
        )

    def _abstract_state(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        state = jax.eval_shape(
            lambda: logits_processors.empty_state(self.config.max_sequences, self.model.config.vocab_size)
        )
        shapes = ((self._computed_at_once, *x.shape) for x in state)
        return tuple(
            jax.ShapeDtypeStruct(shape, x.dtype, sharding=self._per_replica)
            for shape, x in zip(shapes, state, strict=True)
        )

    def _abstract_pools(self) -> Pools:
        with self._on_page_mesh():
            shapes = jax.eval_shape(self._empty_pools)
        found = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            self._pool_shardings(shapes),
        )
        if self.config.draft_features:
            size = self.config.max_sequences, self.spec.max_len, self.model.config.embed_dim
            where = jax.sharding.SingleDeviceSharding(_device_of(self.params))
            found += (Slots(jax.ShapeDtypeStruct(size, jnp.dtype(self.model.config.dtype), sharding=where)),)
        return found

    def _abstract_ints(self, *sizes: int) -> jax.ShapeDtypeStruct:
        """Abstract int32 array with a leading replica dimension."""
        return jax.ShapeDtypeStruct((self._computed_at_once, *sizes), jnp.int32, sharding=self._per_replica)

    # Sharding

    def _empty_pools(self) -> Pools:
        spec = self.spec
        return empty_pools(self._page_rules, spec.groups, spec.pages, spec.page_size, self.config.max_sequences)

    def _pool_shardings(self, pools: Pools) -> Pools:
        """Shardings of pools; the slots of a format that keeps them in host memory are there."""
        place, found = self._page_sharding(*POOL_AXES), list[Slots]()
        for group, pool in zip(self.spec.groups, pools, strict=True):
            own = jax.tree.map(lambda _: place, pool)
            if group.format().kv_format.on_host:
                (device,) = place.device_set
                own = own._replace(data=host_sharding(device))
            found.append(own)
        return tuple(found)

    def _make_pools(self) -> None:
        away = [group.format().kv_format.on_host for group in self.spec.groups]

        def on_device(pools: Pools) -> Pools:
            return tuple(x._replace(data=None) if there else x for x, there in zip(pools, away, strict=True))

        shapes = jax.eval_shape(self._empty_pools)
        places = self._pool_shardings(shapes)
        # Without a mesh on its own device, not on the default one.
        own = on_device(places) if self._page_mesh is None else None
        made = jax.block_until_ready(jax.jit(lambda: on_device(self._empty_pools()), out_shardings=own)())
        self.pools = tuple(
            # Never on the device, which may have no room for it.
            x._replace(data=jax.device_put(np.zeros(shape.data.shape, shape.data.dtype), place.data)) if there else x
            for x, shape, place, there in zip(made, shapes, places, away, strict=True)
        )

    def _on_mesh(self) -> Any:
        return sharding.use_mesh(self.mesh)  # without one, that of a caller does not count either

    # Where pages are, which is where the weights are unless attention has devices of its own

    @property
    def _page_mesh(self) -> jax.sharding.Mesh | None:
        """Mesh of the devices that have pages."""
        return self.mesh

    @property
    def _page_rules(self) -> sharding.Rules:
        """Sharding rules of pages and attention."""
        return self.model.rules

    @property
    def _page_device(self) -> Any:
        """One of the devices that have pages."""
        return _device_of(self.params)

    def _on_page_mesh(self) -> Any:
        return sharding.use_mesh(self._page_mesh)

    def _page_sharding(self, *logical: str | None) -> jax.sharding.Sharding:
        return self._sharding(*logical)

    def _by_rules(self, function: Any) -> Any:
        return functools.partial(function, self.model.rules)

    @functools.cached_property
    def _per_replica(self) -> jax.sharding.Sharding:
        """Sharding of arrays whose first dimension is replicas."""
        return self._sharding("batch")

    def _weight_sharding(self, axes: sharding.LogicalAxes, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Sharding of factors of a weight with these logical axes: as the weight is used, not as it is stored."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(_device_of(self.params))
        spec = self.model.rules.spec(axes, self.mesh, shape, gathered=True, what="adapter")
        return jax.NamedSharding(self.mesh, spec)

    def _sharding(self, *logical: str | None) -> jax.sharding.Sharding:
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(_device_of(self.params))
        with self._on_mesh(), sharding.use_rules(self.model.rules):
            return jax.NamedSharding(self.mesh, sharding.spec(*logical))


def _host_memory() -> int:
    """Bytes of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _mask_rows(shape: StepShape) -> int:
    """Rows of the token masks of a step: one for each row whose logits are computed."""
    return shape.requests * shape.rows


def _abstract(params: Any, *, apart: bool = False) -> Any:
    """Shapes, dtypes and shardings of weights; with ``apart`` as if there were one array per layer."""
    tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    if not apart:
        return tree
    place = jax.tree.leaves(tree)[0].sharding
    shapes = jax.eval_shape(unstack_layers, tree)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)


def _on_one_device(x: jax.Array) -> jax.Array:
    """Array on the first of its devices; gathered there if it is split over several, as those of a training run are."""
    if x.is_fully_replicated:
        return x.addressable_data(0)
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(x.sharding.mesh.devices.flat[0]))  # type: ignore[attr-defined]


def _device_of(params: Any) -> Any:
    return jax.tree.leaves(params)[0].addressable_shards[0].device


def _bytes_of(tree: Any) -> int:
    """Bytes of a tree of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
