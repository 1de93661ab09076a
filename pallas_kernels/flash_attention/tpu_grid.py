"""Block layout and grid of the TPU flash attention kernels: only blocks that the mask leaves are visited.

Queries lie along lanes: a block of scores is [keys, rows], where the rows are the block's queries, repeated for each
query head that reads one kv head (GQA). So each block of keys is read once for all of these heads, and a row's running
maximum and sum are [1, rows] in memory too.

In memory the vectors of queries are [B, X, F, S, H] where H fills whole lanes: the projections around attention write
and read this order without a copy. Other head dims would be padded in it, so their rows are last, [B, X, H, W].

The grid's last dimension runs over the blocks that the mask leaves; scalars prefetched to SMEM give their indices
before a block is fetched. Steps after the last block repeat its index: it is not fetched again, and nothing is
computed.

Legend: B batch, S queries, T keys, N query heads, K kv heads, F query heads folded into a block, X = N / F, H head dim
of keys, V of values, R = F x queries of a block, W rows of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels._pallas import bytes_of, cost, dot, interpret_tpu, pad_to_multiple
from pallas_kernels.flash_attention import blockwise, config
from pallas_kernels.flash_attention.blockwise import PaddedMask
from pallas_kernels.flash_attention.xla import AttentionMask, ScoreOptions

LANES = 128
SUBLANES = 16
"""Rows of a tile of bfloat16: the heads of a block are joined along them."""

# Names of arrays by block spec: along rows, along keys, and along keys transposed.
_ROWS = ("q", "d_q", "d_out", "out", "lse", "delta", "top", "total", "acc")
_KEYS = ("k", "v", "d_k", "d_v", "d_k_acc", "d_v_acc")
_COLUMNS = ("k_columns", "v_columns")


class BlockLayout(NamedTuple):
    """Block layout of queries and keys: sizes, and conversions between [B, S, N, H] and the kernels' layout."""

    batch: int
    s: int
    t: int
    heads: int
    kv_heads: int
    fold: int
    q_block: int
    kv_block: int

    @classmethod
    def of(cls, q: Array, k: Array, blocks: config.FlashTpuBlocks) -> BlockLayout:
        """Layout for these arrays: as many query heads folded as fit into ``blocks.rows``."""
        (b, s, n, _), (t, kv) = q.shape, k.shape[1:3]
        group = n // kv
        fold = max(f for f in range(1, group + 1) if group % f == 0 and f * LANES <= max(blocks.rows, LANES))
        q_block = min(_power_of_two(max(s, SUBLANES)), 1 << (blocks.rows // fold).bit_length() - 1)
        return cls(b, s, t, n, kv, fold, q_block, min(blocks.kv, -(-t // LANES) * LANES))

    @property
    def rows(self) -> int:
        """Rows of a block: queries times folded heads (R)."""
        return self.fold * self.q_block

    @property
    def q_blocks(self) -> int:
        """Number of query blocks."""
        return -(-self.s // self.q_block)

    @property
    def kv_blocks(self) -> int:
        """Number of key blocks."""
        return -(-self.t // self.kv_block)

    @property
    def splits(self) -> int:
        """Number of head blocks that share a kv head."""
        return self.heads // self.kv_heads // self.fold

    def queries(self, x: Float[Array, "B S N H"]) -> Float[Array, "B X *block"]:
        """Vectors of queries as the kernels take them: [B, X, F, S2, H], or ``to_rows`` if H does not fill lanes."""
        if x.shape[3] % LANES:
            return self.to_rows(x)
        x = pad_to_multiple(x, 1, self.q_block)
        return x.reshape(*x.shape[:2], -1, self.fold, x.shape[3]).transpose(0, 2, 3, 1, 4)

    def from_queries(self, x: Float[Array, "B X *block"]) -> Float[Array, "B S N H"]:
        """Inverse of ``queries``."""
        if x.ndim == 4:
            return self.from_rows(x)
        return x.transpose(0, 3, 1, 2, 4).reshape(self.batch, -1, self.heads, x.shape[4])[:, : self.s]

    def queries_shape(self, width: int) -> tuple[int, ...]:
        """Shape of ``queries`` whose vectors have this width."""
        if width % LANES:
            return self.rows_shape(width)
        return self.batch, self.heads // self.fold, self.fold, self.q_blocks * self.q_block, width

    def rows_shape(self, width: int) -> tuple[int, int, int, int]:
        """Shape of ``to_rows`` of vectors of this width."""
        return self.batch, self.heads // self.fold, width, self.q_blocks * self.rows

    def to_rows(self, x: Float[Array, "B S N H"]) -> Float[Array, "B X H W"]:
        """Queries along the last dimension: block by block, and inside a block folded head by folded head."""
        x = pad_to_multiple(x, 1, self.q_block).reshape(
            self.batch, self.q_blocks, self.q_block, -1, self.fold, x.shape[3]
        )
        return x.transpose(0, 3, 5, 1, 4, 2).reshape(self.batch, x.shape[3], x.shape[5], -1)

    def from_rows(self, x: Float[Array, "B X H W"]) -> Float[Array, "B S N H"]:
        """Inverse of ``to_rows``."""
        h = x.shape[2]
        x = x.reshape(self.batch, -1, h, self.q_blocks, self.fold, self.q_block).transpose(0, 3, 5, 1, 4, 2)
        return x.reshape(self.batch, -1, self.heads, h)[:, : self.s]

    def keys(self, x: Float[Array, "B T K H"]) -> Float[Array, "B K T2 H"]:
        """Keys or values padded to whole blocks, kv heads first."""
        return pad_to_multiple(x, 1, self.kv_block).swapaxes(1, 2)

    def per_row(self, x: Int[Array, "b S2"]) -> Int[Array, "b 1 W"]:
        """Per-query values repeated for each folded head."""
        x = x.reshape(x.shape[0], self.q_blocks, 1, self.q_block)
        return jnp.broadcast_to(x, (x.shape[0], self.q_blocks, self.fold, self.q_block)).reshape(x.shape[0], 1, -1)

    def sink_rows(self, sinks: Float[Array, " N"]) -> Float[Array, "X 1 R"]:
        """Attention sink of each row."""
        return jnp.repeat(sinks.astype(jnp.float32).reshape(-1, 1, self.fold), self.q_block, axis=2)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class BlockGrid(NamedTuple):
    """Grid of a kernel: outer blocks of queries or of keys and, for each, the inner blocks that the mask leaves.

    Attributes:
        layout: block layout.
        padded: positions and segment ids.
        bounds: ``blockwise.block_ranges`` of each outer block.
        inner_queries: whether the inner blocks are blocks of queries.
        steps: most inner blocks of an outer block.
    """

    layout: BlockLayout
    padded: PaddedMask
    bounds: Array
    inner_queries: bool
    steps: int

    @property
    def outer_blocks(self) -> int:
        """Number of outer blocks."""
        return self.layout.kv_blocks if self.inner_queries else self.layout.q_blocks

    @property
    def bounds_per_row(self) -> bool:
        """True if each row of the batch has its own bounds."""
        return self.bounds.shape[0] > 4 * self.outer_blocks

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Grid shape: rows of the batch, blocks of heads, outer blocks, inner blocks."""
        layout = self.layout
        if self.inner_queries:
            return layout.batch, layout.kv_heads, self.outer_blocks, self.steps * layout.splits
        return layout.batch, layout.heads // layout.fold, self.outer_blocks, self.steps

    @classmethod
    def over_keys(cls, layout: BlockLayout, mask: AttentionMask, options: ScoreOptions) -> BlockGrid:
        """Grid whose outer blocks are queries and whose inner blocks are keys (forward, dq)."""
        return cls._of(layout, mask, options, False)

    @classmethod
    def over_queries(cls, layout: BlockLayout, mask: AttentionMask, options: ScoreOptions) -> BlockGrid:
        """Grid whose outer blocks are keys and whose inner blocks are queries (dk, dv)."""
        return cls._of(layout, mask, options, True)

    @classmethod
    def _of(cls, layout: BlockLayout, mask: AttentionMask, options: ScoreOptions, inner_queries: bool) -> BlockGrid:
        sizes = layout.q_block, layout.kv_block
        padded = PaddedMask.of(mask, layout.s, layout.t, *sizes)
        live, whole = padded.blocks(*sizes, options.window)
        if inner_queries:
            live, whole = live.mT, whole.mT
        steps = live.shape[2]
        if mask.q_positions is None and options.window is not None:
            inner, outer = sizes if inner_queries else sizes[::-1]
            steps = min(steps, (outer + options.window - 2) // inner + 2)
        return cls(layout, padded, blockwise.block_ranges(live, whole), inner_queries, steps)

    def mask_operands(self) -> dict[str, Array]:
        """Positions and segment ids as kernel operands."""
        padded = self.padded
        operands = {"q_pos": self.layout.per_row(padded.q_pos), "kv_pos": padded.kv_pos[:, None]}
        if padded.q_seg is not None and padded.kv_seg is not None:
            operands |= {"q_seg": self.layout.per_row(padded.q_seg), "kv_seg": padded.kv_seg[:, None]}
        return operands

    def step(self, bounds: Any) -> GridStep:
        """Grid step that a kernel is at, for use inside the kernel; ``bounds`` is the grid's bounds in SMEM."""
        return GridStep.at(bounds, self.bounds_per_row, self.outer_blocks, self.steps)

    def call(
        self,
        kernel: Callable[..., None],
        options: ScoreOptions,
        blocks: config.FlashTpuBlocks,
        operands: dict[str, Array],
        results: dict[str, jax.ShapeDtypeStruct],
        scratch: dict[str, tuple[int, ...]],
        widths: int,
    ) -> dict[str, Array]:
        """Runs ``kernel(refs, options, step)`` at every grid step; an array's name selects its block spec.

        Args:
            widths: sum of the head dims of the kernel's matmuls, for the cost estimate.
        """
        operands = operands | self.mask_operands()
        names = (*operands, *results, *scratch)

        def body(bounds: Any, *refs: Any) -> None:
            kernel(dict(zip(names, refs, strict=True)), options, self.step(bounds))

        call = pl.pallas_call(
            body,
            out_shape=list(results.values()),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=self.shape,
                in_specs=[self.spec(name, x.shape) for name, x in operands.items()],
                out_specs=[self.spec(name, x.shape) for name, x in results.items()],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=blocks.vmem_bytes,
            ),
            interpret=interpret_tpu(),
            cost_estimate=self.cost(options, operands | results, widths),
            name=f"flash_attention{kernel.__name__.removesuffix('_kernel')}",
        )
        return dict(zip(results, call(self.bounds, *operands.values()), strict=True))

    def cost(
        self, options: ScoreOptions, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], widths: int
    ) -> pl.CostEstimate:
        """Cost estimate of a kernel whose matmuls have head dims ``widths`` in all; each row counts as one segment."""
        layout = self.layout
        pairs = blockwise.visible_pairs(layout.s, layout.t, options.window)
        met = pairs / (layout.s * layout.t)
        again = {name: bytes_of(x) for name, x in arrays.items() if (name in _KEYS + _COLUMNS) != self.inner_queries}
        times = max(1.0, self.outer_blocks * met)
        moved = bytes_of(*arrays.values()) + sum(again.values()) * (times - 1)
        products = layout.batch * layout.heads * pairs
        return cost(2 * products * widths, moved, products)

    def spec(self, name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Block spec of the array with that name."""
        layout, steps, outer_blocks = self.layout, self.steps, self.outer_blocks
        bounds_per_row = self.bounds_per_row

        def at(b: Any, head: Any, outer: Any, step: Any, bounds: Any) -> tuple[Any, Any, Any, Any]:
            """(block of heads, kv head, block of queries, block of keys) of a grid step."""
            bound = _bound(b if bounds_per_row else 0, outer, outer_blocks)
            first, stop = bounds[bound], bounds[bound + 1]
            inner = jnp.clip(first + step % steps, 0, jnp.maximum(stop - 1, 0))
            if self.inner_queries:
                return head * layout.splits + step // steps, head, inner, outer
            return head, head // layout.splits, outer, inner

        def row(b: Any) -> Any:
            return b if shape[0] > 1 else 0

        rows, keys = layout.rows, layout.kv_block
        if len(shape) == 5:
            block = None, None, layout.fold, layout.q_block, shape[4]
            return pl.BlockSpec(block, lambda b, *i: (b, at(b, *i)[0], 0, at(b, *i)[2], 0))
        if name in _ROWS:
            return pl.BlockSpec((None, None, shape[2], rows), lambda b, *i: (b, at(b, *i)[0], 0, at(b, *i)[2]))
        if name in _KEYS:
            return pl.BlockSpec((None, None, keys, shape[3]), lambda b, *i: (b, at(b, *i)[1], at(b, *i)[3], 0))
        if name in _COLUMNS:
            return pl.BlockSpec((None, None, shape[2], keys), lambda b, *i: (b, at(b, *i)[1], 0, at(b, *i)[3]))
        if name in ("q_pos", "q_seg"):
            return pl.BlockSpec((None, 1, rows), lambda b, *i: (row(b), 0, at(b, *i)[2]))
        if name in ("kv_pos", "kv_seg"):
            return pl.BlockSpec((None, 1, keys), lambda b, *i: (row(b), 0, at(b, *i)[3]))
        return pl.BlockSpec((None, 1, rows), lambda b, *i: (at(b, *i)[0], 0, 0))  # sinks


class GridStep(NamedTuple):
    """Position of a grid step in its loop over inner blocks.

    Attributes:
        first, last: whether it is the first or last step of its outer block.
        masked, whole: whether some pair, or every pair, in the inner block is visible; at most one is true.
    """

    first: Array
    last: Array
    masked: Array
    whole: Array

    @classmethod
    def at(cls, bounds: Any, bounds_per_row: bool, outer_blocks: int, steps: int) -> GridStep:
        """Current grid step, from the program ids and the bounds in SMEM."""
        row, outer, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        bound = _bound(row if bounds_per_row else 0, outer, outer_blocks)
        first, stop, whole_first, whole_stop = (bounds[bound + i] for i in range(4))
        inner = first + step % steps
        whole = (inner >= whole_first) & (inner < whole_stop)
        return cls(step == 0, step == pl.num_programs(3) - 1, (inner < stop) & ~whole, whole)

    def visit(self, refs: dict[str, Any], options: ScoreOptions, block: Callable[[Array | None], None]) -> None:
        """Calls ``block(mask)`` if the inner block has visible pairs; the mask is None where all pairs are visible."""

        @pl.when(self.whole)
        def _() -> None:
            block(None)

        @pl.when(self.masked)
        def _() -> None:
            q_seg, kv_seg = (refs["q_seg"][...], column(refs["kv_seg"][...])) if "q_seg" in refs else (None, None)
            block(
                blockwise.visibility_mask(
                    refs["q_pos"][...], column(refs["kv_pos"][...]), q_seg, kv_seg, options.window
                )
            )


def _bound(row: Any, outer: Any, outer_blocks: int) -> Any:
    return (row * outer_blocks + outer) * 4


def dot_queries(x: Array, ref: Any, over: str) -> Array:
    """Matmul of ``x`` and a block of queries, over their vectors (``"width"``) or over its rows (``"rows"``).

    Args:
        x: operand; its second dim is contracted.
        ref: block as ``BlockLayout.queries`` has it in memory, [F S H] or [H R].
        over: what is contracted.
    """
    block, dim = ref[...], ("width", "rows").index(over)
    if block.ndim == 3:
        block, dim = block.reshape(-1, block.shape[2]), 1 - dim
    return dot(x, block, (1, dim))


def store_queries(ref: Any, rows: Float[Array, "H R"]) -> None:
    """Writes a block of queries, given with its rows last."""
    ref[...] = (rows if ref.ndim == 2 else rows.T.reshape(ref.shape)).astype(ref.dtype)


def column(x: Int[Array, "1 T"]) -> Int[Array, "T 1"]:
    """Transposes from lanes to sublanes; a transpose works on whole tiles of 8 x 128."""
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]
