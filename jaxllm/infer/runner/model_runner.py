"""The device's side of an engine: programs, pools of pages, the last token of each slot."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.grammar import mask_width
from jaxllm.infer.length_limits import settle_length
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.engine_step import Pools, Shape, Step, empty_pools, read_pages, seat, write_pages
from jaxllm.infer.runner.paged_cache import HELD_AXES, POOL_AXES, LayerGroup, layer_groups
from jaxllm.infer.runner.program_cache import Manifest, Program, config_key, describe
from jaxllm.infer.runner.runner_protocol import Runner as Runner
from jaxllm.infer.runner.runner_protocol import Spec as Spec
from jaxllm.infer.runner.serving_mesh import check_mesh, placements, put, serving_model, spans_processes
from jaxllm.models import Functional
from jaxllm.parallel import distributed
from pallas_kernels.paged_attention import Slots

MOVED = 16
"""Pages that one program takes to the host or back."""
SHARE = 0.9
"""Of an accelerator's memory that parameters, pools and a step's temporaries may take together."""
CPU_SHARE = 0.25
"""Of a computer's memory that pools may take."""


class Device:
    """A ``Runner`` of a real model; arguments as those of ``Engine.of``.

    Attributes:
        spec: the sizes.
        manifest: of its programs, with counts of what was compiled.
        spans: its devices are of several processes, see ``together``.
    """

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
    ):
        self.config, self.vocab_size = config, vocab_size
        self.model, self._reader = serving_model(model), serving_model(model, split=True)
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        latent = any(block.attention.cached.latent for block in model.config.blocks)
        check_mesh(self.mesh, invariant=config.batch_invariant, latent=latent)
        self.spans = spans_processes(self.mesh)
        replicas = 1
        if self.mesh is None:  # a mesh of one device would be part of their types, and not of those that programs make
            params = jax.tree.map(lambda x: x.addressable_data(0), params)
        else:
            params = jax.tree.map(put, params, placements(self.model, params, self.mesh))
            with self._on_mesh(), sharding.use_rules(self.model.rules):
                replicas = sharding.axis_size("batch")
        self.params = params
        self._abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        groups = layer_groups(model.config, config.kv_dtype)
        max_len = settle_length(model.config, config.max_len, longest)
        page_size = config.page_size or -(-max_len // 64) * 64
        columns = -(-max_len // page_size)
        devices = list(self.mesh.devices.flat) if self.mesh is not None else [_device_of(params)]
        own = [jax.process_index()] if self.spans else []
        key = [
            *own,
            *config_key(model.config, config),
            str(self.model.rules),
            describe(self._abstract),
            vocab_size,
            max_len,
        ]
        self.manifest = Manifest(manifest, key, devices, strict)
        least = (columns + 1,) * len(groups)
        self.spec = Spec(groups, least, page_size, columns, max_len, model.config.vocab_size, replicas)
        if config.pages is not None or (pages := self.manifest.note("pages")) is None:
            pages = self._pages(config.pages or self._agreed(self._room()))
            self.manifest.note("pages", list(pages))
        self.spec = dataclasses.replace(self.spec, pages=tuple(pages))
        self._moves = config.preemption == "swap"
        self.programs = self.manifest.make(self._programs())
        with self._on_mesh():
            self.pools = tuple(jax.block_until_ready(jax.jit(self._empty_pools)()))
            self.last = put(np.zeros((replicas, config.sequences), np.int32), self._each)
            if self._full:
                state = logits_processors.empty_state(config.sequences, model.config.vocab_size)
                self.state = tuple(put(np.broadcast_to(x, (replicas, *x.shape)), self._each) for x in state)
                sizes = {shape.requests for shape in self._shapes() if shape.full}
                width = mask_width(model.config.vocab_size)
                self._all_tokens = {n: put(np.full((replicas, n, width), -1, np.int32), self._each) for n in sizes}
        self.manifest.ready = True

    # Steps

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> Shape:
        """The smallest program that a step fits."""
        full = full or "plain" not in self.config.samplers
        sizes = self.config.decode_buckets
        if decode and sizes:
            return self.shape(next(size for size in sizes if size >= requests), True, full)
        return self.shape(next(size for size in self.config.prompt_buckets if size >= tokens), False, full)

    def run(self, shape: Shape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Sends a step; what it gives is on its way to the host."""
        program = self.programs[shape.name]
        with self._on_mesh():
            arguments = self.params, self.pools, self.last, put(packed, self._each)
            if shape.full:
                legal = self._all_tokens[shape.requests] if masks is None else put(masks, self._each)
                self.pools, self.last, out, self.state = program(*arguments, self.state, legal)
            else:
                self.pools, self.last, out = program(*arguments)
        out.copy_to_host_async()
        return out

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Puts what a request asks for into its slot."""
        every = np.zeros((self.spec.replicas, packed.size), np.int32)
        for row in every:
            logits_processors.row_layout(self.spec.vocab).views(row)["slot"][...] = self.config.sequences  # nowhere
        every[replica] = packed
        with self._on_mesh():
            self.state = self.programs["seat"](self.state, put(every, self._each))

    def check(self, params: Any) -> None:
        """Whether ``swap`` takes them.

        Raises:
            ValueError: names what differs.
        """
        want, got = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (self._abstract, params))
        if [path for path, _ in want] != [path for path, _ in got]:
            raise ValueError("the weights have another structure than those that this engine was built for.")
        for (path, w), (_, g) in zip(want, got, strict=True):
            if (w.shape, w.dtype) != (g.shape, g.dtype):
                raise ValueError(
                    f"weights{jax.tree_util.keystr(path)} are {g.dtype}{list(g.shape)}; this engine was built for "
                    f"{w.dtype}{list(w.shape)}. Give them in that form."
                )

    def swap(self, params: Any) -> None:
        """Puts other weights in the place of those there are, for the same programs.

        Args:
            params: that ``check`` takes; on the same devices or others.
        """
        self.check(params)
        if self.mesh is None:
            params = jax.tree.map(lambda x: x.addressable_data(0) if x.is_fully_replicated else x, params)
        # Copied where they already lie right: a training step gives its buffers away.
        self.params = jax.tree.map(lambda x, there: put(x, there.sharding, may_alias=False), params, self._abstract)

    # Pages on the host

    def read(self, replica: int, group: int, pages: list[int]) -> Slots:
        """Pages of a replica's pool, on the host."""
        parts = []
        for at in range(0, len(pages), MOVED):
            some = pages[at : at + MOVED]
            with self._on_mesh():
                found = self.programs[f"read-{group}"](self.pools[group], self._padded(replica, some, group))
            parts.append(jax.tree.map(lambda x, some=some: np.asarray(x)[:, : len(some)], found))
        return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts) if parts else Slots(np.empty(0))

    def write(self, replica: int, group: int, pages: list[int], content: Slots) -> None:
        """Puts pages from the host into a replica's pool."""
        for at in range(0, len(pages), MOVED):
            some = pages[at : at + MOVED]
            rest = ((0, 0), (0, MOVED - len(some)), *((0, 0),) * 3)
            held = jax.tree.map(lambda x, at=at, rest=rest: np.pad(x[:, at : at + MOVED], rest), content)
            with self._on_mesh():
                placed = jax.tree.map(lambda x: put(x, self._place(*HELD_AXES)), held)
                pool = self.programs[f"write-{group}"](self.pools[group], self._padded(replica, some, group), placed)
            self.pools = (*self.pools[:group], pool, *self.pools[group + 1 :])

    def _padded(self, replica: int, pages: list[int], group: int) -> Any:
        padded = np.full((self.spec.replicas, MOVED), self.spec.pages[group], np.int32)  # beyond the last: nowhere
        padded[replica, : len(pages)] = pages
        return put(padded, self._each)

    # Sizes

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers and on all shards, scales included."""
        return sum(group.token_bytes(self._shards) for group in self.spec.groups)

    @property
    def _shards(self) -> int:
        """Of kv heads."""
        with self._on_mesh(), sharding.use_rules(self.model.rules):
            return sharding.axis_size("attn_kv_heads")

    def _room(self) -> int:
        """Pages that the memory has room for, beside the parameters and the largest program's temporaries."""
        memory = _device_of(self.params).memory_stats()
        if memory is None or "bytes_limit" not in memory:
            devices = 1 if self.mesh is None else self.mesh.size
            room = CPU_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices
            most = (
                self.config.sequences + 1
            ) * self.spec.columns  # no more than can be in use, and one to be found again
        else:
            largest = self._step(self.shape(self.config.budget, False, "full" in self.config.samplers))
            temporaries = self.manifest.make([largest])[largest.name].memory.temp_size_in_bytes
            self.manifest.counts.compiled = self.manifest.counts.loaded = 0
            weights, slots = map(_bytes_of, (self._abstract, self._abstract_state() if self._full else ()))
            room = SHARE * memory["bytes_limit"] - weights - temporaries - slots
            most = int(max(room, 0) // min(map(self._page_bytes, self.spec.groups)))
        least = self.spec.columns + 1

        def taken(pages: int) -> int:
            return sum(n * self._page_bytes(g) for n, g in zip(self._pages(pages), self.spec.groups, strict=True))

        if taken(least) > room:
            raise ValueError(
                f"the device has room for {max(room, 0) / 2**30:.2f} GiB of keys and values, and a sequence of "
                f"{self.spec.max_len} tokens needs {taken(least) / 2**30:.2f}: give a smaller max_len or budget."
            )
        pages = bisect.bisect_right(range(most + 1), room, key=taken, lo=least) - 1
        return max(pages, least)

    def _agreed(self, room: int) -> int:
        """The least of all processes."""
        if not self.spans:
            return room
        said = distributed.group().gather("room for pages", str(room))
        return int(distributed.group().tell("pages", str(min(map(int, said))) if said else ""))

    def _pages(self, most: int) -> tuple[int, ...]:
        """Pages of each group: those with windows need no more than the windows of all sequences reach."""
        spec = self.spec
        if most < spec.columns + 1:
            raise ValueError(
                f"engine: pages = {most}, but one sequence of {spec.max_len} tokens needs {spec.columns + 1} of "
                f"{spec.page_size}: give more pages or a smaller max_len."
            )
        ahead = max(self.config.budget, self.config.loop)
        reach = [
            spec.columns if g.window is None else -(-(g.window + ahead) // spec.page_size) + 2 for g in spec.groups
        ]
        return tuple(
            most if g.window is None else min(most, self.config.sequences * min(n, spec.columns) + spec.columns + 1)
            for n, g in zip(reach, spec.groups, strict=True)
        )

    def _page_bytes(self, group: LayerGroup) -> int:
        shards = self._shards
        return group.token_bytes(shards) // shards * self.spec.page_size

    # Programs

    def shape(self, tokens: int, decode: bool, full: bool) -> Shape:
        """A step's."""
        return Shape(
            tokens=tokens,
            requests=min(tokens, self.config.sequences),
            decode=decode,
            full=full,
            slots=self.config.sequences,
            columns=self.spec.columns,
            groups=len(self.spec.groups),
            loop=self.config.loop,
            top=min(self.config.top_logprobs, self.model.config.vocab_size),
            real=str(jnp.promote_types(self.model.config.dtype, jnp.float32)),
        )

    def _programs(self) -> list[Program]:
        """All of them, the ones that take longest to compile first."""
        programs = [self._step(shape) for shape in self._shapes()]
        if self._full:
            row = logits_processors.row_layout(self.model.config.vocab_size)
            arguments = {"state": self._abstract_state(), "packed": self._abstract_ints(row.size)}
            programs.append(Program("seat", self._by_rules(seat), arguments, donated=("state",)))
        for group in range(len(self.spec.groups)) if self._moves else ():
            pool, pages = self._abstract_pools()[group], self._abstract_ints(MOVED)
            place = self._place(*HELD_AXES)
            held = jax.tree.map(
                lambda x, place=place: jax.ShapeDtypeStruct((x.shape[0], MOVED, *x.shape[2:]), x.dtype, sharding=place),
                pool,
            )
            programs.append(Program(f"read-{group}", self._by_rules(read_pages), {"pool": pool, "pages": pages}))
            arguments = {"pool": pool, "pages": pages, "held": held}
            programs.append(Program(f"write-{group}", self._by_rules(write_pages), arguments, donated=("pool",)))
        return programs

    def _shapes(self) -> list[Shape]:
        return [
            self.shape(tokens, decode, sampler == "full")
            for decode, sizes in ((False, self.config.prompt_buckets), (True, self.config.decode_buckets))
            for tokens in reversed(sizes)
            for sampler in self.config.samplers
        ]

    @property
    def _full(self) -> bool:
        return "full" in self.config.samplers

    def _step(self, shape: Shape) -> Program:
        arguments = {
            "params": self._abstract,
            "pools": self._abstract_pools(),
            "last": self._abstract_ints(shape.slots),
            "packed": self._abstract_ints(shape.inputs.size),
        }
        if shape.full:
            width = mask_width(self.model.config.vocab_size)
            arguments |= {"state": self._abstract_state(), "masks": self._abstract_ints(shape.requests, width)}
        ways = 1 if self.mesh is None else self.mesh.shape.get("context", 1)
        reader = self._reader if ways > 1 and not shape.decode and shape.tokens % ways == 0 else self.model
        step = Step(self.model, reader, self.spec.groups, shape, self.vocab_size, self.config.batch_invariant)
        return Program(shape.name, step.__call__, arguments, donated=("pools", "last", "state"))

    def _abstract_state(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        state = jax.eval_shape(
            lambda: logits_processors.empty_state(self.config.sequences, self.model.config.vocab_size)
        )
        shapes = ((self.spec.replicas, *x.shape) for x in state)
        return tuple(
            jax.ShapeDtypeStruct(shape, x.dtype, sharding=self._each) for shape, x in zip(shapes, state, strict=True)
        )

    def _abstract_pools(self) -> Pools:
        with self._on_mesh():
            shapes = jax.eval_shape(self._empty_pools)
        place = self._place(*POOL_AXES)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)

    def _abstract_ints(self, *sizes: int) -> jax.ShapeDtypeStruct:
        """Numbers of each replica."""
        return jax.ShapeDtypeStruct((self.spec.replicas, *sizes), jnp.int32, sharding=self._each)

    # Places

    def _empty_pools(self) -> Pools:
        return empty_pools(self.model.rules, self.spec.groups, self.spec.pages, self.spec.page_size)

    def _on_mesh(self) -> Any:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _by_rules(self, function: Any) -> Any:
        return functools.partial(function, self.model.rules)

    @functools.cached_property
    def _each(self) -> jax.sharding.Sharding:
        """Of arrays whose first dim is replicas."""
        return self._place("batch")

    def _place(self, *logical: str | None) -> jax.sharding.Sharding:
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(_device_of(self.params))
        with self._on_mesh(), sharding.use_rules(self.model.rules):
            return jax.NamedSharding(self.mesh, sharding.spec(*logical))


def _device_of(params: Any) -> Any:
    return jax.tree.leaves(params)[0].addressable_shards[0].device


def _bytes_of(tree: Any) -> int:
    """On one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
