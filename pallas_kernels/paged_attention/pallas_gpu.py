"""Paged attention on NVIDIA GPUs: Pallas kernel through Triton, with split-KV decode (flash decoding).

A program owns a block of tokens of one request, some of the query heads that read one kv head, and a part of the slots
that the request filled in earlier steps. It reads the step's own keys and values from the flat batch, not from the
pages they go to, which a program of the same launch writes: so no program waits for another.

A decode step has few blocks, so each request's slots are split among enough programs to fill the device; each returns
its values and their logsumexp, and plain JAX combines them (arXiv:2311.01282).

Shared pages are read in a launch of their own, whose queries are those of all requests and which writes nothing; the
other launch begins behind them, see ``shared_pages``.

Rows of scores are a block's tokens, repeated for each of its query heads. Head dims are split into powers of two. Slots
that are loaded are decoded piece by piece, by the layout of the pages' KV cache format. Pages that are encoded as a
whole are only read here, see ``two_phases.with_residual_window``.

Legend: L layers, P pages, K kv heads, C slots of a page, W elements of a slot, R requests, T tokens, N query heads, G
= N / K, H head dim of keys, V of values, I blocks, Q tokens of a block, B query heads of a program, M = Q x B rows, S
slots read at once, X parts of a request's slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import is_interpreting, result_like, target_device
from pallas_kernels._pallas import MASK_VALUE, dot
from pallas_kernels.flash_attention import blockwise
from pallas_kernels.flash_attention.xla import ScoreOptions
from pallas_kernels.paged_attention import config
from pallas_kernels.paged_attention.kernel_support import check_format
from pallas_kernels.paged_attention.pages import PageFormat, Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch
from pallas_kernels.paged_attention.residual_window import Residual
from pallas_kernels.paged_attention.slot_layout import Piece, piece_values, pieces_of
from pallas_kernels.paged_attention.tree_mask import TreeMask, hides
from pallas_kernels.paged_attention.two_phases import (
    AttentionPhase,
    in_two_phases,
    merge_parts,
    with_residual_window,
)

MIN_DOT_DIM = 16
"""Smallest dimension of a Triton dot."""


def paged_attention_pallas_gpu(
    q: Float[Array, "T N H"],
    new: Slots,
    pool: Slots,
    layer: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    ragged: RaggedBatch,
    *,
    format: PageFormat,
    scale: float,
    window: int | None,
    softcap: float | None,
    decode_only: bool,
    tree: TreeMask | None = None,
    shared: Int[Array, " R"] | None = None,
    residual: Residual | None = None,
) -> tuple[Float[Array, "T N V"], Slots]:
    """Paged attention on GPUs: (output, pages); see ``paged_attention``.

    Raises:
        NotImplementedError: a head dim, or a run of values of its format, is not a multiple of ``MIN_DOT_DIM``, or see
            ``check_format``.
    """
    check_format("pallas_gpu", format, q, new, pool)
    if format.key_dim % MIN_DOT_DIM or format.value_dim % MIN_DOT_DIM:
        raise NotImplementedError(
            f"pallas_gpu takes head dims of a multiple of {MIN_DOT_DIM}, not {format.key_dim} and {format.value_dim}."
        )
    pieces = [*_pieces(format, 0, format.key_dim), *_pieces(format, format.value_start, format.value_dim)]
    if any(piece.size % MIN_DOT_DIM for piece in pieces):
        raise NotImplementedError(
            f"pallas_gpu reads {format.encoding!r} in pieces of a multiple of {MIN_DOT_DIM} values, and head dims of "
            f"{format.key_dim} and {format.value_dim} have none; choose int8 or fp8, or implementation 'xla'."
        )
    options = ScoreOptions(scale, window, softcap)

    if shared is None and residual is None:
        plan = _Plan.of(q, pool.data, ragged, format, options, decode_only, None)
        out, _, pool = _attend(plan, q, new, pool, layer, sinks, ragged, tree)
        return out.astype(q.dtype), pool

    def attend(pool: Slots, ragged: RaggedBatch, phase: AttentionPhase) -> tuple[Array, Array, Slots]:
        plan = _Plan.of(q, pool.data, ragged, format, options, decode_only, phase)
        return _attend(plan, q, new, pool, layer, None if plan.reads_alone else sinks, ragged, None, phase)

    if residual is None:
        assert shared is not None
        out, pool = in_two_phases(attend, q.shape[0], pool, ragged, shared)
    else:
        out, pool = with_residual_window(
            attend, q, new, pool, layer, sinks, ragged, residual, format=format, scale=scale, window=window,
            softcap=softcap, decode_only=decode_only,
        )  # fmt: skip
    return out.astype(q.dtype), pool


def _attend(
    plan: _Plan,
    q: Float[Array, "T N H"],
    new: Slots,
    pool: Slots,
    layer: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    ragged: RaggedBatch,
    tree: TreeMask | None,
    phase: AttentionPhase | None = None,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"], Slots]:
    """Output, logsumexp and pages."""
    tokens = ragged.tokens(q.shape[0])
    operands = {"q": q, "new": new.data, "table": ragged.page_table, "starts": ragged.starts, "kv_lens": ragged.kv_lens}
    blocks = ragged.blocks(q.shape[0], plan.tokens)
    operands |= {"request": blocks.request, "first": blocks.first, "count": blocks.tokens, "layer": layer[None]}
    if tree is not None:
        operands |= {"hidden": tree.hidden, "behind": tree.behind, "tree": tree.first}
    if sinks is not None:
        operands["sinks"] = sinks.astype(jnp.float32)
    if new.scales is not None:
        operands["new_scales"] = new.scales
    if phase is not None and phase.begin is not None:
        operands["begin"] = phase.begin
    if phase is not None and phase.reach is not None:
        operands["reach"] = phase.reach
    out, lse, pool = plan.call(operands, pool)
    real = tokens.real[:, None, None]
    if plan.parts == 1:
        return jnp.where(real, out[0], 0), lse[0], pool
    out, lse = merge_parts(out, jnp.where(real[..., 0], lse, -MASK_VALUE))
    return out, lse, pool


class _Plan(NamedTuple):
    """Block sizes of a launch.

    Attributes:
        format, options: page format and static options of the operation.
        group: G.
        tokens: Q, a power of two.
        heads: B, a power of two.
        slots: S, a power of two.
        parts: X.
        params: parameters of the Triton compiler.
        phase: "", "shared" or "encoded": which pages the launch reads alone, see ``AttentionPhase``; "own": it is the
            second phase.
    """

    format: PageFormat
    options: ScoreOptions
    group: int
    tokens: int
    heads: int
    slots: int
    parts: int
    params: plgpu.CompilerParams
    phase: str

    @classmethod
    def of(
        cls, q: Array, rows: Array, ragged: RaggedBatch, format: PageFormat, options: ScoreOptions, decode_only: bool,
        phase: AttentionPhase | None,
    ) -> _Plan:  # fmt: skip
        (t, n, _), (kv, page_size) = q.shape, rows.shape[2:4]
        blocks = config.gpu_blocks(target_device().kind, max(format.key_dim, format.value_dim), q.dtype.itemsize)
        heads = min(pl.next_power_of_2(n // kv), blocks.rows)
        tokens, parts, common = 1, 1, phase is not None and phase.is_shared
        if common:
            tokens = config.block_tokens(t, 1, blocks.rows // heads)
        if decode_only:
            programs = (
                -(-t // tokens) * kv * -(-n // kv // heads) if common else ragged.requests * kv * -(-n // kv // heads)
            )
            longest = ragged.page_table.shape[1] * page_size // blocks.slots
            parts = config.power_of_two(min(blocks.programs // programs, longest))
        else:
            tokens = config.block_tokens(t, ragged.requests, blocks.rows // heads)
        if tokens * heads < MIN_DOT_DIM:  # decode is memory-bound: empty rows are free
            tokens, heads = (tokens, MIN_DOT_DIM // tokens) if decode_only else (MIN_DOT_DIM // heads, heads)
        params = plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages)
        name = "" if phase is None else phase.name
        return cls(format, options, n // kv, tokens, heads, blocks.slots, parts, params, name)

    @property
    def reads_alone(self) -> bool:
        """Whether the launch writes nothing."""
        return self.phase in ("shared", "encoded")

    @property
    def head_blocks(self) -> int:
        """Number of programs that share a kv head."""
        return -(-self.group // self.heads)

    @property
    def key_pieces(self) -> list[Piece]:
        """Pieces that add up to a key."""
        return _pieces(self.format, 0, self.format.key_dim)

    @property
    def value_pieces(self) -> list[Piece]:
        """Pieces that add up to a value."""
        return _pieces(self.format, self.format.value_start, self.format.value_dim)

    def call(self, operands: dict[str, Array], pool: Slots) -> tuple[Array, Array, Slots]:
        """Launches the kernel: (values, logsumexp, pages), with values and logsumexp of each part."""
        q = operands["q"]
        t, n, _ = q.shape
        whole = self.parts > 1 or self.phase != ""
        results = {
            "out": result_like(q, (self.parts, t, n, self.format.value_dim), "float32" if whole else q.dtype),
            "lse": result_like(q, (self.parts, t, n), jnp.float32),
        }
        held = {"pool": pool.data, "scales": pool.scales, "channels": pool.channels}
        held = {name: x for name, x in held.items() if x is not None}
        operands = operands | held
        if not self.reads_alone:
            results |= {f"written_{name}": result_like(x, x.shape, x.dtype) for name, x in held.items()}
        updated = len(results) - 2
        first = len(operands) - updated
        names = (*operands, *results)

        def body(*refs: Any) -> None:
            _Program.of(self, dict(zip(names, refs, strict=True))).run()

        call = pl.pallas_call(
            body,
            grid=(operands["request"].shape[0], self.format.kv_heads * self.head_blocks, self.parts),
            out_shape=list(results.values()),
            input_output_aliases={first + i: 2 + i for i in range(updated)},
            compiler_params=self.params,
            interpret=is_interpreting(),
            name=self.name,
        )
        out, lse, *written = call(*operands.values())
        return out, lse, pool if self.reads_alone else Slots(*written)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        if self.reads_alone:
            return f"paged_attention_{self.phase}"
        return "paged_attention_decode" if self.tokens == 1 else "paged_attention"


class _Program(NamedTuple):
    """One program of the kernel.

    Attributes:
        plan: block sizes.
        refs: whole arrays by name.
        kv_head: kv head of the program.
        part: which part of the request's slots it reads.
        request, first, count: request, first row and number of tokens of its block.
        start: position of the request's first token of this step.
        token, head: token and query head of each row, [M], in the flat batch.
        real: Bool[M], False for rows without a token or head.
    """

    plan: _Plan
    refs: dict[str, Any]
    kv_head: Array
    part: Array
    request: Array
    first: Array
    count: Array
    start: Array
    token: Array
    head: Array
    real: Array

    @classmethod
    def of(cls, plan: _Plan, refs: dict[str, Any]) -> _Program:
        block, heads, part = (pl.program_id(axis) for axis in range(3))
        request, first, count = (refs[name][block] for name in ("request", "first", "count"))
        lengths = refs["starts"][request + 1] - refs["starts"][request]
        row = jax.lax.iota(jnp.int32, plan.tokens * plan.heads)
        place, head = row // plan.heads, heads % plan.head_blocks * plan.heads + row % plan.heads
        real = (place < count) & (head < plan.group)
        kv_head = heads // plan.head_blocks
        start = refs["kv_lens"][request] - lengths
        token, head = first + place, kv_head * plan.group + head
        return cls(plan, refs, kv_head, part, request, first, count, start, token, head, real)

    def run(self) -> None:
        """Attends to earlier slots and to the step's own, then writes the block's slots to their pages."""
        plan, options = self.plan, self.plan.options
        begin_batch = self.refs["starts"][self.request]
        position = self.start + self.first - begin_batch  # position of the block's first token
        end = jnp.where(self.count > 0, position + self.count, 0)
        at = (self.start + self.token - begin_batch)[:, None]
        least, branch, own_place, words = position, position, at, list[Array]()
        if "tree" in self.refs:
            branch = self.refs["tree"][self.request]
            words = [self._of_token("hidden", i)[:, None] for i in range(self.refs["hidden"].shape[1])]
            least, own_place = jnp.minimum(position, branch), at - self._of_token("behind")[:, None]
        begin = jnp.int32(0) if options.window is None else jnp.maximum(least - options.window + 1, 0)
        if "begin" in self.refs:
            begin = self.refs["begin"][self.request]
        reach = self._of_token("reach")[:, None] if "reach" in self.refs else None
        q = [self._load("q", (self.token, self.head), (x.start, x.size), self.real) for x in plan.key_pieces]
        m, value_pieces = plan.tokens * plan.heads, plan.value_pieces

        def more(stop: Any, held: Callable[[Array, Array], Callable[[Piece], Array]]) -> Callable[[Any, Any], Any]:
            def step(place: Any, state: Any) -> Any:
                top, total, out = state
                kv_pos = place + jax.lax.iota(jnp.int32, plan.slots)
                there = kv_pos < stop
                load, loaded = held(kv_pos, there), dict[Piece, Array]()

                def slots(piece: Piece) -> Array:
                    if piece not in loaded:
                        loaded[piece] = load(piece)
                    return loaded[piece]

                keys = [slots(piece) for piece in plan.key_pieces]
                products = functools.reduce(jnp.add, (dot(a, b, (1, 1)) for a, b in zip(q, keys, strict=True)))
                seen = (there & (kv_pos >= begin))[None] & (kv_pos[None] <= at)
                if reach is not None:
                    seen = seen & (kv_pos[None] < reach)
                if words:
                    seen = seen & jnp.logical_not(hides(words, (kv_pos - branch)[None]))
                if options.window is not None:
                    seen = seen & (kv_pos[None] > own_place - options.window)
                scores, _ = blockwise.masked_scores(products, seen, options)
                top, total, weights, keep = blockwise.online_softmax_step(top, total, scores, axis=1)
                weights = weights.astype(q[0].dtype)
                values = [slots(piece) for piece in value_pieces]
                return top, total, tuple(x * keep + dot(weights, v, (1, 0)) for x, v in zip(out, values, strict=True))

            return step

        def of_pages(kv_pos: Array, there: Array) -> Callable[[Piece], Array]:
            index = self.refs["layer"][0], self._pages(kv_pos, there), self.kv_head, kv_pos % self.refs["pool"].shape[3]
            return self._decoded("pool", "scales", index, there)

        def of_step(kv_pos: Array, there: Array) -> Callable[[Piece], Array]:
            return self._decoded("new", "new_scales", (begin_batch + kv_pos - self.start, self.kv_head), there)

        def fold(first: Any, steps: Any, step: Any, state: Any) -> Any:
            return jax.lax.fori_loop(0, steps, lambda i, state: step(first + i * plan.slots, state), state)

        top, total = blockwise.init_softmax(None, (m, 1))
        if "sinks" in self.refs:
            sink = plgpu.load(self.refs["sinks"].at[self.head], mask=self.real, other=0.0)[:, None]
            top, total = jnp.where(self.part == 0, sink, top), jnp.where(self.part == 0, 1.0, total)
        state = top, total, tuple(jnp.zeros((m, size), jnp.float32) for _, size, *_ in value_pieces)
        # Slots of earlier steps: those of this part.
        stop = jnp.minimum(self.start, end)
        if "reach" in self.refs:  # the last token's is the farthest
            last = jnp.maximum(self.first + self.count - 1, 0)
            stop = jnp.where(self.count > 0, self.refs["reach"][last], 0)
        steps = pl.cdiv(jnp.maximum(stop - begin, 0), plan.slots)
        each = pl.cdiv(steps, plan.parts)
        mine = jnp.clip(steps - self.part * each, 0, each)
        state = fold(begin + self.part * each * plan.slots, mine, more(stop, of_pages), state)
        if not plan.reads_alone:  # the step's own slots: the last part reads them
            own = jnp.maximum(self.start, begin)
            steps = jnp.where(self.part == plan.parts - 1, pl.cdiv(jnp.maximum(end - own, 0), plan.slots), 0)
            state = fold(own, steps, more(end, of_step), state)
        top, total, out = state

        safe, lse = blockwise.finish_softmax(top, total)
        for x, piece in zip(out, value_pieces, strict=True):
            place = piece.start - plan.format.value_start, piece.size
            self._store("out", (self.part, self.token, self.head), place, self.real, x / safe)
        part = jnp.broadcast_to(self.part, self.token.shape)
        plgpu.store(self.refs["lse"].at[part, self.token, self.head], lse[:, 0], mask=self.real)
        if not plan.reads_alone:
            self._write(position)

    # Interpret mode takes either slices or one index array per dimension, all of one shape, and also accesses masked
    # elements: these must lie beyond the end of the array or belong to the program.

    def _at(self, name: str, index: tuple[Any, ...], piece: tuple[int, int]) -> Any:
        shape = next(x.shape[0] for x in index if jnp.ndim(x)), piece[1]
        rows = (jnp.broadcast_to(x[:, None] if jnp.ndim(x) else x, shape) for x in index)
        return self.refs[name].at[(*rows, piece[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 1))]

    def _of_token(self, name: str, *number: int) -> Array:
        """Integer of each row's token."""
        rest = (jnp.full(self.token.shape, i, jnp.int32) for i in number)
        return plgpu.load(self.refs[name].at[(self.token, *rest)], mask=self.real, other=0)

    def _load(self, name: str, index: tuple[Any, ...], piece: tuple[int, int], mask: Array) -> Array:
        mask = jnp.broadcast_to(mask[:, None], (mask.shape[0], piece[1]))
        zero = 0.0 if jnp.issubdtype(self.refs[name].dtype, jnp.floating) else 0
        return plgpu.load(self._at(name, index, piece), mask=mask, other=zero)

    def _decoded(self, name: str, scales: str, index: tuple[Any, ...], mask: Array) -> Callable[[Piece], Array]:
        """Loads pieces of slots, decoded by the layout of the pages' format; elements of several pieces once."""
        form, dtype, raw = self.plan.format, self.refs["q"].dtype, dict[tuple[int, int], Array]()
        if form.encoding == "plain":
            return lambda piece: self._load(name, index, (piece.start, piece.size), mask).astype(dtype)
        layout, decoder = form.layout, form.kv_format
        assert layout is not None

        def words(row: Any) -> Array:
            if jnp.ndim(row) == 0:
                return plgpu.load(self._scale_at(scales, index, mask.shape, row), mask=mask, other=0)
            shape = *mask.shape, *row.shape
            at = [jnp.broadcast_to(x[:, None] if jnp.ndim(x) else x, shape) for x in index]
            at.insert(min(3, len(at)), jnp.broadcast_to(row[None], shape))
            return plgpu.load(self.refs[scales].at[tuple(at)], mask=jnp.broadcast_to(mask[:, None], shape), other=0)

        def channels(number: Array) -> Array:
            shape, zero = (*mask.shape, *number.shape), jnp.int32(0)
            at = [jnp.broadcast_to(x[:, None] if jnp.ndim(x) else x, shape) for x in (*index[:3], zero)]
            at.append(jnp.broadcast_to(number[None], shape))
            return plgpu.load(self.refs["channels"].at[tuple(at)], mask=jnp.broadcast_to(mask[:, None], shape), other=0)

        def load(piece: Piece) -> Array:
            place = piece.element, piece.size
            if place not in raw:
                raw[place] = self._load(name, index, place, mask)
            return piece_values(decoder, layout, piece, raw[place], words, channels, dtype)  # pyright: ignore[reportArgumentType]

        return load

    def _scale_at(self, name: str, index: tuple[Any, ...], shape: tuple[int, ...], number: Any) -> Any:
        """Word ``number`` of each slot's scales: of pages [L, P, K, Z, C], or of the step's tokens [T, K, Z]."""
        rows = [jnp.broadcast_to(x, shape) for x in index]
        rows.insert(min(3, len(rows)), jnp.full(shape, number, jnp.int32))
        return self.refs[name].at[tuple(rows)]

    def _store(self, name: str, index: tuple[Any, ...], piece: tuple[int, int], mask: Array, value: Array) -> None:
        mask = jnp.broadcast_to(mask[:, None], value.shape)
        plgpu.store(self._at(name, index, piece), value.astype(self.refs[name].dtype), mask=mask)

    def _pages(self, at: Array, mask: Array) -> Array:
        """Page number of each position; where masked, one beyond the last page."""
        pages, page_size = self.refs["pool"].shape[1], self.refs["pool"].shape[3]
        request = jnp.broadcast_to(self.request, at.shape)
        return plgpu.load(self.refs["table"].at[request, at // page_size], mask=mask, other=pages)

    def _write(self, position: Array) -> None:
        """Writes the block's slots to their pages, in one of the programs that share the block and the kv head."""
        plan = self.plan
        place = jax.lax.iota(jnp.int32, plan.tokens)
        chosen = (pl.program_id(1) % plan.head_blocks == 0) & (self.part == plan.parts - 1)
        mask = (place < self.count) & chosen
        at = position + place
        target = self.refs["layer"][0], self._pages(at, mask), self.kv_head, at % self.refs["pool"].shape[3]
        source = self.first + place, self.kv_head
        for piece in pieces(plan.format.stored_width):
            self._store("written_pool", target, piece, mask, self._load("new", source, piece, mask))
        for number in range(plan.format.scales):
            scale = plgpu.load(self._scale_at("new_scales", source, mask.shape, number), mask=mask, other=0)
            plgpu.store(self._scale_at("written_scales", target, mask.shape, number), scale, mask=mask)


def _pieces(format: PageFormat, start: int, size: int) -> list[Piece]:
    """Pieces of a slot that add up to consecutive values."""
    assert format.layout is not None
    return pieces_of(format.layout, start, size)


def pieces(width: int) -> list[tuple[int, int]]:
    """(start, size) of the powers of two that add up to a width, the largest first."""
    found, start = [], 0
    for bit in reversed(range(width.bit_length())):
        if width >> bit & 1:
            found.append((start, 1 << bit))
            start += 1 << bit
    return found
