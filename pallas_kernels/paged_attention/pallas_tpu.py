"""Paged attention on TPUs: Pallas kernel through Mosaic, with double-buffered DMA of pages.

A grid step owns a block of tokens of one request. Pages stay in HBM: those that the request filled before are copied
to VMEM, many at a time, while the previous ones are being processed; page numbers are scalars in SMEM. The block's own
keys and values are an operand, laid out by slots, so they are attended to without being read back; then they are
merged into the tiles of the pages that they belong to, and those tiles are written. Later blocks of the request run
later on the same core and find them there.

Rows of scores are a block's tokens, repeated for each of the query heads that read one kv head (GQA). A block of one
token (decode) processes only its own rows, however many the others have.

Shared pages are read in a call of their own, whose queries are those of all requests and which writes nothing; the
other call begins behind them, see ``shared_pages``.

Quantised pages come with a page of scales each, and a tile is decoded by the layout of the pages' KV cache format once
it is in VMEM. The scales of a page are one tile: those of a block's own tokens are merged into the pages of scales that
it writes to. Pages that are encoded as a whole are only read here, see ``two_phases.with_residual_window``.

Legend: L layers, P pages, K kv heads, C slots of a page, W elements of a slot, R requests, T tokens, N query heads, G
= N / K, H head dim of keys, V of values, I blocks, Q tokens of a block, M = Q x G rows, U slots of a tile, A slots of
the tiles that a block writes to, E pages that it writes to, J pages fetched at once, S = J x C, Z words of a slot's
scales.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels._compat import result_like, target_device
from pallas_kernels._pallas import dot, interpret_tpu, round_up
from pallas_kernels.flash_attention import blockwise
from pallas_kernels.flash_attention.xla import ScoreOptions
from pallas_kernels.paged_attention import config
from pallas_kernels.paged_attention.kernel_support import check_format
from pallas_kernels.paged_attention.pages import PageFormat, Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch, TokenBlocks
from pallas_kernels.paged_attention.residual_window import Residual
from pallas_kernels.paged_attention.slot_layout import decode_lanes
from pallas_kernels.paged_attention.tree_mask import TreeMask, hides
from pallas_kernels.paged_attention.two_phases import AttentionPhase, in_two_phases, with_residual_window

LANES = 128
MAX_UNROLLED = 2**17
"""Most elements of scores that a program processes without a loop over heads."""
MAX_TABLE_ENTRIES = 2**17
"""Most entries of a page table that fit into a core's SMEM beside the other scalars."""


def paged_attention_pallas_tpu(
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
    """Paged attention on TPUs: (output, pages); see ``paged_attention``.

    Raises:
        NotImplementedError: pages are not whole tiles, the page table is too large, or see ``check_format``.
    """
    check_format("pallas_tpu", format, q, new, pool)
    rows = pool.data
    tile = 32 // rows.dtype.itemsize
    if rows.shape[3] % tile:
        raise NotImplementedError(
            f"pallas_tpu takes pages of a multiple of {tile} slots in {rows.dtype}, not {rows.shape[3]}."
        )
    if rows.shape[4] % LANES:
        raise NotImplementedError(
            f"pallas_tpu takes slots of a multiple of {LANES} elements, not {rows.shape[4]}: "
            f"PageFormat(multiple={LANES})."
        )
    if format.scales > len(format.value_parts) and rows.shape[3] % LANES:
        raise NotImplementedError(
            f"pallas_tpu takes pages of a multiple of {LANES} slots in {format.encoding!r}, not {rows.shape[3]}: the "
            f"scales of fewer do not fill tiles, and XLA would copy all of them in each step; give page_size={LANES}."
        )
    if ragged.page_table.size > MAX_TABLE_ENTRIES:
        raise NotImplementedError(
            f"pallas_tpu takes a page table of up to {MAX_TABLE_ENTRIES} entries, not {list(ragged.page_table.shape)}."
        )
    options = ScoreOptions(scale, window, softcap)

    if shared is None and residual is None:
        plan = _Plan.of(q, rows, format, options, None if decode_only else ragged.requests, None)
        out, _, pool = _attend(plan, q, new, pool, layer, sinks, ragged, tree)
        return out, pool

    def attend(pool: Slots, ragged: RaggedBatch, phase: AttentionPhase) -> tuple[Array, Array, Slots]:
        single = decode_only and not phase.is_shared
        plan = _Plan.of(q, rows, format, options, None if single else ragged.requests, phase)
        sink = None if phase.reads_alone else sinks
        out, lse, pool = _attend(plan, q, new, pool, layer, sink, ragged, None, phase)
        assert lse is not None
        return out, lse, pool

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
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"] | None, Slots]:
    """Output, logsumexp in one of two phases, and pages."""
    format = plan.format
    blocks = ragged.blocks(q.shape[0], plan.tokens)
    if phase is not None and phase.is_shared:  # all slots before the tokens are seen, by all of them
        blocks = blocks._replace(position=jnp.broadcast_to(ragged.offsets, blocks.position.shape))
    operands = {"q": plan.queries(q, blocks)}
    if not plan.reads_alone:
        operands["new"] = plan.own(new.data, blocks)
    if new.scales is not None and not plan.reads_alone:
        values = format.unpack(Slots(new.data[:, :, None], new.scales[..., None]), jnp.float32)[:, :, 0]
        values = jnp.pad(values, ((0, 0), (0, 0), (0, plan.width - format.width)))
        operands["own"] = plan.own(values.astype(q.dtype), blocks)
        operands["new_scales"] = plan.own_scales(new.scales, blocks)
    operands["row_token"] = jnp.repeat(jnp.arange(plan.tokens, dtype=jnp.int32), plan.group)[:, None]
    if sinks is not None:
        operands["sink"] = jnp.tile(sinks.astype(jnp.float32).reshape(format.kv_heads, -1), (1, plan.tokens))[..., None]
    if tree is not None:
        operands["hidden"] = plan.hidden(tree, blocks)
    scalars = {} if tree is None else {"first": tree.first[blocks.request]}
    if phase is not None and phase.begin is not None:
        scalars["begin"] = phase.begin[blocks.request]
    if phase is not None and phase.reach is not None:
        operands["reach"] = plan.by_row(phase.reach[:, None], blocks)
        scalars["stop"] = phase.reach[jnp.clip(blocks.first + blocks.tokens - 1, 0, q.shape[0] - 1)]
    out, lse, pool = plan.call(operands, pool, layer, ragged, blocks, scalars)
    values = plan.by_token(out, ragged, q.shape[0])[..., plan.own_values]
    return values, None if lse is None else plan.by_token(lse, ragged, q.shape[0])[..., 0], pool


class _Plan(NamedTuple):
    """Block sizes of a kernel call.

    Attributes:
        format, options: page format and static options of the operation.
        page_size: C.
        group: G.
        tokens: Q.
        pages: J.
        tile: U.
        heads: kv heads of one grid step; other cores process the rest.
        vmem_bytes: see ``config.PagedTpuBlocks``.
        phase: "", "shared" or "encoded": which pages the call reads alone, see ``AttentionPhase``; "own": it is the
            second phase. In a phase it returns the logsumexp.
    """

    format: PageFormat
    options: ScoreOptions
    page_size: int
    group: int
    tokens: int
    pages: int
    tile: int
    heads: int
    vmem_bytes: int | None
    phase: str

    @classmethod
    def of(
        cls,
        q: Array,
        rows: Array,
        format: PageFormat,
        options: ScoreOptions,
        requests: int | None,
        phase: AttentionPhase | None,
    ) -> _Plan:
        (t, n, _), (kv, page_size, width) = q.shape, rows.shape[2:]
        item = rows.dtype.itemsize
        blocks = config.tpu_blocks(target_device().kind, item)
        heads = kv // blocks.cores if kv % blocks.cores == 0 else kv
        tokens = 1 if requests is None else config.block_tokens(t, requests, blocks.rows // n)
        slots = min(blocks.slots, blocks.scores // (tokens * (n // kv)), blocks.buffer_bytes // (heads * width * item))
        pages = config.power_of_two(slots // page_size)
        name = "" if phase is None else phase.name
        return cls(format, options, page_size, n // kv, tokens, pages, 32 // item, heads, blocks.vmem_bytes, name)

    @property
    def reads_alone(self) -> bool:
        """Whether the call writes nothing."""
        return self.phase in ("shared", "encoded")

    @property
    def keeps_lse(self) -> bool:
        """Whether it returns the logsumexp."""
        return self.phase != ""

    @property
    def width(self) -> int:
        """Values of a decoded slot, up to whole registers (W)."""
        return round_up(self.format.width, LANES)

    @property
    def m(self) -> int:
        """Rows of a block (M)."""
        return self.tokens * self.group

    @property
    def own_slots(self) -> int:
        """Slots of the tiles that a block of tokens touches, wherever it begins."""
        return round_up(self.tokens - 1, self.tile) + self.tile

    # A slice of a slot that begins inside a tile of lanes would need a relayout. Instead the whole slot is used:
    # queries are zero where it holds a value, and the part of the result that belongs to keys is dropped.

    @property
    def key_lanes(self) -> int:
        """Width of the part of a slot that is multiplied by queries."""
        return self.format.key_dim if self.format.key_dim % LANES == 0 else self.width

    @property
    def value_lanes(self) -> slice:
        """Part of a slot that is accumulated as values."""
        start = self.format.value_start
        return slice(start, start + self.format.value_dim) if start % LANES == 0 else slice(0, self.width)

    def queries(self, q: Float[Array, "T N H"], blocks: TokenBlocks) -> Float[Array, "I K M H2"]:
        """Queries of each block, row by row: token by token, and inside a token the heads that share a kv head."""
        t, _, h = q.shape
        q = q[jnp.clip(blocks.first[:, None] + jnp.arange(self.tokens), 0, t - 1)]
        q = q.reshape(-1, self.tokens, self.format.kv_heads, self.group, h).swapaxes(1, 2)
        q = q.reshape(-1, self.format.kv_heads, self.m, h)
        return jnp.pad(q, ((0, 0),) * 3 + ((0, self.key_lanes - h),))

    @property
    def own_pages(self) -> int:
        """Most pages that a block of tokens writes to (E)."""
        return (self.tokens + self.page_size - 2) // self.page_size + 1

    def own_scales(self, scales: Shaped[Array, "T K Z"], blocks: TokenBlocks) -> Shaped[Array, "I K E Z C"]:
        """Scales of each block's own tokens, placed as in the pages that they belong to; zeros elsewhere."""
        found, inside = self._place(scales, blocks, self.page_size, self.own_pages * self.page_size)
        inside = inside.reshape(-1, 1, self.own_pages, 1, self.page_size)
        pages = (self.own_pages, self.page_size) if self.tokens > 1 else (1, 1)
        found = found.reshape(-1, *pages, *found.shape[2:])  # I E C K Z
        return jnp.where(inside, found.transpose(0, 3, 1, 4, 2), 0)

    def own(self, new: Shaped[Array, "T K W"], blocks: TokenBlocks) -> Shaped[Array, "I K A W"]:
        """Slots of each block's own tokens, placed as in the tiles that they belong to; zeros elsewhere."""
        slots, inside = self._place(new, blocks, self.tile, self.own_slots)
        return jnp.where(inside[:, None, :, None], slots.swapaxes(1, 2), 0)

    def _place(
        self, new: Shaped[Array, "T K X"], blocks: TokenBlocks, size: int, slots: int
    ) -> tuple[Shaped[Array, "I A2 K X"], Bool[Array, "I A"]]:
        """Row of ``new`` for each of a block's slots, which begin at a multiple of ``size``, and whether it has one. A
        block of one token has one row for all of them (A2 = 1): gathered for each slot, rows of scales would be padded
        to whole tiles of lanes, 16 times their bytes."""
        place = jnp.arange(slots, dtype=jnp.int32) - (blocks.position % size)[:, None]
        inside = (place >= 0) & (place < blocks.tokens[:, None])
        rows = blocks.first[:, None] + (place if self.tokens > 1 else 0)
        return new[jnp.clip(rows, 0, new.shape[0] - 1)], inside

    def hidden(self, tree: TreeMask, blocks: TokenBlocks) -> Int[Array, "I M E1"]:
        """Words of the tree mask for each row of a block, and after them how far its position is behind its slot."""
        return self.by_row(jnp.concatenate([tree.hidden, tree.behind[:, None]], axis=1), blocks)

    def by_row(self, each: Int[Array, "T X"], blocks: TokenBlocks) -> Int[Array, "I M X"]:
        """Numbers of each token for each row of a block."""
        each = each[jnp.clip(blocks.first[:, None] + jnp.arange(self.tokens), 0, each.shape[0] - 1)]
        return jnp.repeat(each, self.group, axis=1)

    @property
    def own_values(self) -> slice:
        """Part of what is accumulated that is values."""
        start = self.format.value_start - self.value_lanes.start
        return slice(start, start + self.format.value_dim)

    def by_token(self, out: Float[Array, "I K M X"], ragged: RaggedBatch, t: int) -> Float[Array, "T N X"]:
        """Rows of the kernel's output in the order of the flat batch; zeros for padding."""
        tokens = ragged.tokens(t)
        block, place = ragged.block_and_row(self.tokens, tokens)
        out = out.reshape(out.shape[0], self.format.kv_heads, self.tokens, self.group, -1)
        out = out[jnp.clip(block, 0, out.shape[0] - 1), :, place]
        return jnp.where(tokens.real[:, None, None], out.reshape(t, -1, out.shape[-1]), 0)

    def call(
        self,
        operands: dict[str, Array],
        pool: Slots,
        layer: Array,
        ragged: RaggedBatch,
        blocks: TokenBlocks,
        of_blocks: dict[str, Int[Array, " I"]],
    ) -> tuple[Float[Array, "I K M V2"], Float[Array, "I K M 1"] | None, Slots]:
        """Runs the kernel at every block, for the kv heads of every core; ``of_blocks``: further scalars of blocks."""
        held = {"pool": pool.data, "scales": pool.scales, "channels": pool.channels}
        held = {name: x for name, x in held.items() if x is not None}
        columns, numbers = ragged.page_table.shape[1], pool.data.shape[1]
        table = jnp.clip(ragged.page_table, 0, numbers - 1).reshape(-1)  # unused entries may be anything
        scalars = {
            "layer": layer[None],
            "table": table,
            "row": blocks.request * columns,
            "tokens": blocks.tokens,
            "position": blocks.position,
            **of_blocks,
        }
        width = self.value_lanes.stop - self.value_lanes.start
        dtype = pool.data.dtype
        scratch = {
            "buffer": pltpu.VMEM((2, self.pages, self.heads, self.page_size, self.format.stored_width), dtype),
            "tiles": pltpu.VMEM((self.own_slots // self.tile, self.heads, self.tile, self.format.stored_width), dtype),
            "top": pltpu.VMEM((self.heads, self.m, 1), jnp.float32),
            "total": pltpu.VMEM((self.heads, self.m, 1), jnp.float32),
            "acc": pltpu.VMEM((self.heads, self.m, width), jnp.float32),
            "fetched": pltpu.SemaphoreType.DMA((2,)),
            "tiled": pltpu.SemaphoreType.DMA,
        }
        made = {"out": (width, jnp.float32 if self.keeps_lse else operands["q"].dtype)}
        if self.keeps_lse:
            made["lse"] = 1, jnp.float32
        if pool.scales is not None:
            page = (self.heads, self.format.scales, self.page_size)
            scratch["scale_buffer"] = pltpu.VMEM((2, self.pages, *page), pool.scales.dtype)
            scratch["scale_tiles"] = pltpu.VMEM((self.own_pages, *page), pool.scales.dtype)
        if pool.channels is not None:
            scratch["channel_buffer"] = pltpu.VMEM((2, self.pages, self.heads, 1, self.format.channels), jnp.int32)
        read = list(held) if self.reads_alone else [f"_{name}" for name in held]
        written = [] if self.reads_alone else list(held)
        names = (*scalars, *operands, *read, *made, *written, *scratch)

        def body(*refs: Any) -> None:
            _Step(self, dict(zip(names, refs, strict=True))).run()

        cores = self.format.kv_heads // self.heads
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        call = pl.pallas_call(
            body,
            out_shape=[
                *(result_like(operands["q"], (*operands["q"].shape[:3], x), dtype) for x, dtype in made.values()),
                *(result_like(x, x.shape, x.dtype) for x in list(held.values())[: len(written)]),
            ],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(cores, blocks.request.shape[0]),
                in_specs=[*(self._spec(name, x.shape) for name, x in operands.items()), *(anywhere for _ in held)],
                out_specs=[
                    *(self._spec(name, (*operands["q"].shape[:3], x)) for name, (x, _) in made.items()),
                    *(anywhere for _ in written),
                ],
                scratch_shapes=list(scratch.values()),
            ),
            input_output_aliases={len(scalars) + len(operands) + i: len(made) + i for i in range(len(written))},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=self.vmem_bytes
            ),
            interpret=interpret_tpu(),
            name=self.name,
        )
        found = call(*scalars.values(), *operands.values(), *held.values())
        after = pool if self.reads_alone else Slots(*found[len(made) :])
        return found[0], found[1] if self.keeps_lse else None, after

    @property
    def name(self) -> str:
        """Name of the kernel."""
        if self.reads_alone:
            return f"paged_attention_{self.phase}"
        return "paged_attention_decode" if self.tokens == 1 else "paged_attention"

    def _spec(self, name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        if name == "row_token":
            return pl.BlockSpec(shape, lambda core, i, *_: (0, 0))
        if name == "sink":
            return pl.BlockSpec((self.heads, *shape[1:]), lambda core, i, *_: (core, 0, 0))
        if name in ("hidden", "reach"):
            return pl.BlockSpec((None, *shape[1:]), lambda core, i, *_: (i, 0, 0))
        rest = (0,) * (len(shape) - 2)
        return pl.BlockSpec((None, self.heads, *shape[2:]), lambda core, i, *_: (i, core, *rest))


class _Step:
    """One grid step: a block of tokens and the kv heads of one core.

    Attributes:
        plan: block sizes.
        refs: refs by name.
        tokens, position: number of tokens of the block, and position of its first token.
        first: slot of the tree's first token; without a tree the block's.
        begin: first visible position (sliding window, or behind the shared pages).
        stop: the slot behind the last one that is read from pages.
        scaled: whether the pages are quantised.
    """

    def __init__(self, plan: _Plan, refs: dict[str, Any]) -> None:
        block, window = pl.program_id(1), plan.options.window
        self.plan, self.refs = plan, refs
        self.layer, self.row = refs["layer"][0], refs["row"][block]
        self.tokens, self.position = refs["tokens"][block], refs["position"][block]
        self.first = refs["first"][block] if "first" in refs else self.position
        least = jnp.minimum(self.position, self.first)
        self.begin = 0 if window is None else jnp.maximum(least - window + 1, 0)
        if "begin" in refs:
            self.begin = refs["begin"][block]
        self.stop = refs["stop"][block] if "stop" in refs else self.position
        self.head = pl.program_id(0) * plan.heads
        self.scaled = "scales" in refs

    def run(self) -> None:
        """Attends and writes the block's slots; does nothing for an empty block."""
        one = min(self.plan.m, round_up(self.plan.group, 8))
        single = self.tokens == 1 if one < self.plan.m else False

        @pl.when(self.tokens > 0)
        def _() -> None:
            self._each_tile(lambda i: self._tile(i, read=True).start())
            self._each_page(lambda i: self._scale_page(i, read=True).start())

            @pl.when(single)
            def _() -> None:
                self._attend(one)

            @pl.when(jnp.logical_not(single))
            def _() -> None:
                self._attend(self.plan.m)

            # Wait for all tiles before using any: they share a semaphore and arrive in any order.
            self._each_tile(lambda i: self._tile(i, read=True).wait())
            self._each_page(lambda i: self._scale_page(i, read=True).wait())
            self._each_tile(self._merge)
            self._each_page(self._merge_scales)
            self._each_tile(lambda i: self._tile(i, read=False).wait())
            self._each_page(lambda i: self._scale_page(i, read=False).wait())

    def _attend(self, m: int) -> None:
        """Computes the first ``m`` rows of the block's output."""
        plan, refs = self.plan, self.refs
        top, total, acc = (refs[name].at[:, :m] for name in ("top", "total", "acc"))
        sink = refs["sink"][:, :m] if "sink" in refs else None
        top[...], total[...] = blockwise.init_softmax(sink, top.shape)
        acc[...] = jnp.zeros_like(acc)
        first = self.begin // plan.page_size
        stop = (self.stop + plan.page_size - 1) // plan.page_size
        steps = (stop - first + plan.pages - 1) // plan.pages

        @pl.when(steps > 0)
        def _() -> None:
            self._fetch(first, stop, 0, wait=False)

        def more(i: Any, _: None) -> None:
            column, buffer = first + i * plan.pages, jax.lax.rem(i, 2)

            @pl.when(i + 1 < steps)
            def _() -> None:
                self._fetch(column + plan.pages, stop, 1 - buffer, wait=False)

            self._fetch(column, stop, buffer, wait=True)
            at = column * plan.page_size
            held = refs["buffer"].at[buffer]
            scales: Any = refs["scale_buffer"].at[buffer] if self.scaled else None
            channels: Any = refs["channel_buffer"].at[buffer] if "channels" in refs else None

            # Slots behind the last token may hold nan, and 0 * nan is nan.
            @pl.when(i + 1 == steps)
            def _() -> None:
                shape = plan.pages, plan.page_size, plan.format.stored_width
                page, slot = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
                filled = at + page * plan.page_size + slot < self.stop
                page, slot = (jax.lax.broadcasted_iota(jnp.int32, shape[:2], axis) for axis in (0, 1))
                filled_slots = at + page * plan.page_size + slot < self.stop

                def clean(head: Any) -> None:
                    held[:, head] = jnp.where(filled, held[:, head], 0)
                    for z in range(plan.format.scales):
                        scales[:, head, z] = jnp.where(filled_slots, scales[:, head, z], 0)
                    if channels is not None:
                        page = jax.lax.broadcasted_iota(jnp.int32, (plan.pages, 1, plan.format.channels), 0)
                        filled_pages = at + page * plan.page_size < self.stop
                        channels[:, head] = jnp.where(filled_pages, channels[:, head], 0)

                self._each_head(clean, filled.size)

            def slots(head: Any) -> Array:
                tile = held[:, head]
                if (layout := plan.format.layout) is not None and self.scaled:
                    words = None if channels is None else channels[:, head]
                    decoder: Any = plan.format.kv_format
                    tile = decode_lanes(decoder, layout, tile, lambda z: scales[:, head, z], words, LANES, plan.width)
                    tile = tile.astype(refs["q"].dtype)
                return tile.reshape(-1, plan.width)

            self._block(m, slots, at, self.stop)

        jax.lax.fori_loop(0, steps, more, None)
        if not plan.reads_alone:
            aligned = self.position - jax.lax.rem(self.position, plan.tile)
            own = refs["own" if self.scaled else "new"]
            self._block(m, lambda head: own[head], aligned, self.position + self.tokens, self.position)

        def finish(head: Any) -> None:
            safe, lse = blockwise.finish_softmax(top[head], total[head])
            if plan.keeps_lse:
                refs["lse"][head, :m] = lse
            refs["out"][head, :m] = (acc[head] / safe).astype(refs["out"].dtype)

        self._each_head(finish, acc.size // plan.heads)

    def _block(self, m: int, slots: Any, at: Any, stop: Any, start: Any = 0) -> None:
        """Online-softmax update by slots from position ``at`` on, head by head; only ``start`` to ``stop - 1`` are
        visible.
        """
        plan, refs, window = self.plan, self.refs, self.plan.options.window
        place = self.position + refs["row_token"][:m]  # M 1
        count = plan.own_slots if isinstance(start, jax.Array) else plan.pages * plan.page_size
        at = at + jax.lax.broadcasted_iota(jnp.int32, (1, count), 1)
        seen = (at >= start) & (at < stop) & (at <= place)
        if "reach" in refs:
            seen = seen & (at < refs["reach"][:m])
        if "hidden" in refs:
            *words, behind = (refs["hidden"][:m, i : i + 1] for i in range(refs["hidden"].shape[1]))
            seen = seen & jnp.logical_not(hides(words, at - self.first))
            place = place - behind
        if window is not None:
            seen = seen & (at > place - window)

        def take_in(head: Any) -> None:
            held = slots(head)
            products = dot(refs["q"][head, :m], held[:, : plan.key_lanes], (1, 1))
            scores, _ = blockwise.masked_scores(products, seen, plan.options)
            top, total, weights, keep = blockwise.online_softmax_step(
                refs["top"][head, :m], refs["total"][head, :m], scores, axis=1
            )
            refs["top"][head, :m], refs["total"][head, :m] = top, total
            part = dot(weights.astype(held.dtype), held[:, plan.value_lanes], (1, 0))
            refs["acc"][head, :m] = refs["acc"][head, :m] * keep + part

        self._each_head(take_in, m * count)

    def _each_head(self, action: Any, size: int) -> None:
        """Calls ``action(head)``, unrolled, or in a loop two heads at a time where ``size`` elements per head are too
        many.
        """
        heads = self.plan.heads
        together = heads if heads * size <= MAX_UNROLLED else 2 - heads % 2

        def some(i: Any, _: None) -> None:
            for j in range(together):
                action(i * together + j)

        jax.lax.fori_loop(0, heads // together, some, None)

    def _fetch(self, column: Any, stop: Any, buffer: Any, wait: bool) -> None:
        """Starts the DMA of the next pages into ``buffer``, or waits for it."""
        plan, refs = self.plan, self.refs

        buffers = {"pool": "buffer", "scales": "scale_buffer", "channels": "channel_buffer"}

        def page(j: Any, _: None) -> None:
            number = refs["table"][self.row + column + j]
            for name, target in buffers.items():
                if name in refs:
                    source = refs[name].at[self.layer, number, pl.ds(self.head, plan.heads)]
                    copy = pltpu.make_async_copy(source, refs[target].at[buffer, j], refs["fetched"].at[buffer])
                    copy.wait() if wait else copy.start()

        jax.lax.fori_loop(0, jnp.minimum(plan.pages, stop - column), page, None)

    def _tile(self, i: int, read: bool) -> Any:
        """DMA of tile ``i`` of those that the block writes to: from its page (``read``), or back to it."""
        plan, refs = self.plan, self.refs
        at = self.position - jax.lax.rem(self.position, plan.tile) + i * plan.tile
        number = refs["table"][self.row + at // plan.page_size]
        slots = pl.ds(pl.multiple_of(jax.lax.rem(at, plan.page_size), plan.tile), plan.tile)
        there = refs["pool"].at[self.layer, number, pl.ds(self.head, plan.heads), slots]
        here = refs["tiles"].at[i]
        source, target = (there, here) if read else (here, there)
        return pltpu.make_async_copy(source, target, refs["tiled"])

    def _each_tile(self, action: Any) -> None:
        plan = self.plan
        offset = jax.lax.rem(self.position, plan.tile)
        for i in range(0 if plan.reads_alone else plan.own_slots // plan.tile):
            pl.when(i * plan.tile < offset + self.tokens)(functools.partial(action, i))

    def _merge(self, i: int) -> None:
        """Merges the block's own slots into tile ``i``, which has been read, and starts to write it back."""
        plan, refs = self.plan, self.refs
        shape = plan.heads, plan.tile, plan.format.stored_width
        place = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + i * plan.tile
        place = place - jax.lax.rem(self.position, plan.tile)
        mine = (place >= 0) & (place < self.tokens)
        own = refs["new"][:, i * plan.tile : (i + 1) * plan.tile]
        refs["tiles"][i] = jnp.where(mine, own, refs["tiles"][i])
        self._tile(i, read=False).start()

    def _scale_page(self, i: int, read: bool) -> Any:
        """DMA of scales: of page ``i`` of those that the block writes to, from the pool (``read``), or back to it."""
        plan, refs = self.plan, self.refs
        number = refs["table"][self.row + self.position // plan.page_size + i]
        there = refs["scales"].at[self.layer, number, pl.ds(self.head, plan.heads)]
        here = refs["scale_tiles"].at[i]
        source, target = (there, here) if read else (here, there)
        return pltpu.make_async_copy(source, target, refs["tiled"])

    def _each_page(self, action: Any) -> None:
        """Calls ``action(i)`` for each page that the block writes to, if the pages have scales."""
        plan = self.plan
        offset = jax.lax.rem(self.position, plan.page_size)
        for i in range(plan.own_pages if self.scaled and not plan.reads_alone else 0):
            pl.when(i * plan.page_size < offset + self.tokens)(functools.partial(action, i))

    def _merge_scales(self, i: int) -> None:
        """Merges the block's own scales into those of page ``i``, which have been read, and starts to write those."""
        plan, refs = self.plan, self.refs
        shape = plan.heads, plan.format.scales, plan.page_size
        place = jax.lax.broadcasted_iota(jnp.int32, shape, 2) + i * plan.page_size
        place = place - jax.lax.rem(self.position, plan.page_size)
        mine = (place >= 0) & (place < self.tokens)
        refs["scale_tiles"][i] = jnp.where(mine, refs["new_scales"][:, i], refs["scale_tiles"][i])
        self._scale_page(i, read=False).start()
