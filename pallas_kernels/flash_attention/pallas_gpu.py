"""Flash attention on NVIDIA GPUs: Pallas kernels through Triton.

Queries lie along rows: a block of scores is [queries, keys]. A program owns one block of queries of one query head
(forward, dq) or one block of keys of one kv head (dk and dv, for all query heads that read it, so that partial sums
are added in a fixed order). It loops over the blocks that the mask leaves; where every pair in a block is visible, the
mask is not computed.

Lengths are padded to whole blocks outside the kernel; head dims are padded to powers of two on load.

Legend: B batch, S queries, T keys, N query heads, K kv heads, G = N / K, H head dim of keys, V of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import is_interpreting, result_like, target_device
from pallas_kernels._pallas import bytes_of, cost, dot, pad_to_multiple, stated
from pallas_kernels.flash_attention import blockwise, config
from pallas_kernels.flash_attention.blockwise import PaddedMask
from pallas_kernels.flash_attention.xla import AttentionMask, ScoreOptions


def attention_pallas_gpu(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    sinks: Float[Array, " N"] | None,
    *,
    q_positions: Int[Array, "B S"] | None,
    kv_positions: Int[Array, "B T"] | None,
    q_segment_ids: Int[Array, "B S"] | None,
    kv_segment_ids: Int[Array, "B T"] | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "B S N V"], Float[Array, "B S N"]]:
    """Flash attention on GPUs: (output, logsumexp); see ``flash_attention``.

    Raises:
        NotImplementedError: see ``blockwise.check_supported``.
    """
    blockwise.check_supported("pallas_gpu", q, k, v)
    mask = AttentionMask(q_positions, kv_positions, q_segment_ids, kv_segment_ids)
    return blockwise.attend(_Kernels(), ScoreOptions(scale, window, softcap), q, k, v, sinks, mask)


class _Kernels(NamedTuple):
    """GPU kernels of ``blockwise.attend``."""

    def forward(
        self, options: ScoreOptions, q: Array, k: Array, v: Array, sinks: Array | None, mask: AttentionMask
    ) -> tuple[Array, Array]:
        blocks = config.gpu_blocks(target_device().kind, max(q.shape[3], v.shape[3]), q.dtype.itemsize)
        call = _Call.of(options, q, k, mask, blocks.q, blocks.kv, blocks.warps, blocks.stages)
        operands = {"q": call.queries(q), "k": call.keys(k), "v": call.keys(v)}
        if sinks is not None:
            operands["sink"] = sinks.astype(jnp.float32)
        b, s, n, _ = operands["q"].shape
        results = {
            "out": result_like(q, (b, s, n, v.shape[3]), q.dtype),
            "lse": result_like(q, (b, n, s), jnp.float32),
        }
        made = call.over_keys(_forward_kernel, operands, results, q.shape[3] + v.shape[3])
        out, lse = blockwise.name_residuals(made["out"], made["lse"])
        return out[:, : q.shape[1]], lse.swapaxes(1, 2)[:, : q.shape[1]]

    def backward(
        self,
        options: ScoreOptions,
        q: Array,
        k: Array,
        v: Array,
        d_out: Array,
        lse: Array,
        delta: Array,
        mask: AttentionMask,
    ) -> tuple[Array, Array, Array]:
        blocks = config.gpu_blocks(target_device().kind, max(q.shape[3], v.shape[3]), q.dtype.itemsize)
        own, inner, params = blocks.own_back, blocks.inner_back, (blocks.warps_back, blocks.stages_back)

        def operands_of(call: _Call) -> dict[str, Array]:
            found = {"q": call.queries(q), "k": call.keys(k), "v": call.keys(v), "d_out": call.queries(d_out)}
            return found | {"lse": call.queries(lse).swapaxes(1, 2), "delta": call.queries(delta).swapaxes(1, 2)}

        call = _Call.of(options, q, k, mask, own, inner, *params)
        operands, widths = operands_of(call), 2 * q.shape[3] + v.shape[3]
        d_q = {"d_q": result_like(q, operands["q"].shape, q.dtype)}
        d_q = call.over_keys(_d_q_kernel, operands, d_q, widths)["d_q"]
        call = _Call.of(options, q, k, mask, inner, own, *params)
        operands = operands_of(call)
        results = {f"d_{name}": result_like(q, operands[name].shape, k.dtype) for name in ("k", "v")}
        d_kv = call.over_queries(_d_kv_kernel, operands, results, widths + v.shape[3])
        return d_q[:, : q.shape[1]], d_kv["d_k"][:, : k.shape[1]], d_kv["d_v"][:, : k.shape[1]]


class _Call(NamedTuple):
    """Arguments of a kernel launch.

    Attributes:
        options: static options of the operation.
        padded: positions and segment ids, padded to whole blocks.
        live, whole: block masks, see ``PaddedMask.blocks``.
        pairs: visible (query, key) pairs of all heads, each row as one segment.
        group: query heads that read one kv head.
        q_block, kv_block: queries and keys of a block.
        params: parameters of the Triton compiler.
    """

    options: ScoreOptions
    padded: PaddedMask
    live: Array
    whole: Array
    pairs: float
    group: int
    q_block: int
    kv_block: int
    params: plgpu.CompilerParams

    @classmethod
    def of(
        cls,
        options: ScoreOptions,
        q: Array,
        k: Array,
        mask: AttentionMask,
        q_block: int,
        kv_block: int,
        warps: int,
        stages: int,
    ) -> _Call:
        padded = PaddedMask.of(mask, q.shape[1], k.shape[1], q_block, kv_block)
        live, whole = padded.blocks(q_block, kv_block, options.window)
        params = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
        pairs = q.shape[0] * q.shape[2] * blockwise.visible_pairs(q.shape[1], k.shape[1], options.window)
        return cls(options, padded, live, whole, pairs, q.shape[2] // k.shape[2], q_block, kv_block, params)

    def queries(self, x: Array) -> Array:
        """``x`` padded to whole blocks of queries."""
        return pad_to_multiple(x, 1, self.q_block)

    def keys(self, x: Array) -> Array:
        """``x`` padded to whole blocks of keys."""
        return pad_to_multiple(x, 1, self.kv_block)

    def over_keys(
        self,
        kernel: Callable[[_Program], None],
        operands: dict[str, Array],
        results: dict[str, jax.ShapeDtypeStruct],
        widths: int,
    ) -> dict[str, Array]:
        """Runs one program for each block of queries of each query head; its matmuls have head dims ``widths`` in
        all.
        """
        b, s, heads, _ = operands["q"].shape
        return self._run(kernel, operands, results, widths, (s // self.q_block, b, heads), self.live, self.whole, 1)

    def over_queries(
        self,
        kernel: Callable[[_Program], None],
        operands: dict[str, Array],
        results: dict[str, jax.ShapeDtypeStruct],
        widths: int,
    ) -> dict[str, Array]:
        """Runs one program for each block of keys of each kv head; its matmuls have head dims ``widths`` in all."""
        b, t, heads, _ = operands["k"].shape
        grid = t // self.kv_block, b, heads
        return self._run(kernel, operands, results, widths, grid, self.live.mT, self.whole.mT, self.group)

    def _run(
        self,
        kernel: Callable[[_Program], None],
        operands: dict[str, Array],
        results: dict[str, jax.ShapeDtypeStruct],
        widths: int,
        grid: tuple[int, int, int],
        live: Array,
        whole: Array,
        heads: int,
    ) -> dict[str, Array]:
        """Launches the kernel over ``grid``; ``heads`` is the number of query heads of a program."""
        operands = operands | {name: x for name, x in self.padded._asdict().items() if x is not None}
        operands["bounds"] = blockwise.block_ranges(live, whole).reshape(live.shape[0], -1)
        shapes = {name: x.shape for name, x in (*operands.items(), *results.items())}
        dims = {name: shape[3] for name, shape in shapes.items() if len(shape) == 4}

        def body(*refs: Any) -> None:
            kernel(_Program.of(dict(zip(shapes, refs, strict=True)), self.options, dims, self.q_block, self.kv_block))

        specs = {name: self._spec(name, shape, heads) for name, shape in shapes.items()}
        # Keys that many programs read stay in the cache: each array moves once.
        estimate = cost(2 * self.pairs * widths, bytes_of(*operands.values(), *results.values()), self.pairs)
        call = pl.pallas_call(
            body,
            grid=grid,
            in_specs=[specs[name] for name in operands],
            out_specs=[specs[name] for name in results],
            out_shape=list(results.values()),
            compiler_params=self.params,
            interpret=is_interpreting(),
            cost_estimate=estimate,
            metadata=stated(estimate),
            name=f"flash_attention{kernel.__name__.removesuffix('_kernel')}",
        )
        return dict(zip(results, call(*operands.values()), strict=True))

    def _spec(self, name: str, shape: tuple[int, ...], heads: int) -> pl.BlockSpec:
        """Block spec: one row of the batch, and the ``heads`` of one program, or their kv head."""
        of_keys = name in ("k", "v", "d_k", "d_v")
        one_kv_head = heads > 1 or self.group == 1
        if len(shape) == 4:
            block = (None, shape[1], 1 if of_keys else heads, pl.next_power_of_2(shape[3]))
            shared = 1 if one_kv_head or not of_keys else self.group
            return pl.BlockSpec(block, lambda i, b, h: (b, 0, h // shared, 0))
        if name in ("lse", "delta"):
            return pl.BlockSpec((None, heads, shape[2]), lambda i, b, h: (b, h, 0))
        if name == "sink":
            return pl.BlockSpec((1,), lambda i, b, h: (h,))
        return pl.BlockSpec(
            (None, shape[1]), lambda i, b, h: (b if shape[0] > 1 else 0, 0)
        )  # positions, segment ids and bounds


class _Program(NamedTuple):
    """One program of a kernel.

    Attributes:
        refs: by name, one row of the batch of each array, and one head or a group's heads.
        options: static options of the operation.
        dims: head dims; in ``refs`` they are padded to powers of two.
        q_block, kv_block: queries and keys of a block.
        block: index of the block that the program owns.
        bounds: the block's four entries of ``blockwise.block_ranges``.
    """

    refs: dict[str, Any]
    options: ScoreOptions
    dims: dict[str, int]
    q_block: int
    kv_block: int
    block: Array
    bounds: tuple[Array, ...]

    @classmethod
    def of(
        cls, refs: dict[str, Any], options: ScoreOptions, dims: dict[str, int], q_block: int, kv_block: int
    ) -> _Program:
        block = pl.program_id(0)
        bounds = tuple(refs["bounds"][block * 4 + i] for i in range(4))
        return cls(refs, options, dims, q_block, kv_block, block, bounds)

    @property
    def heads(self) -> int:
        """Number of query heads of this program."""
        return self.refs["q"].shape[1]

    def load(self, name: str, block: Any, head: Any = 0) -> Array:
        """A block of a head: [queries or keys, head dim], or [queries] for a row statistic or a position."""
        size = self.kv_block if name in ("k", "v", "kv_pos", "kv_seg") else self.q_block
        rows, ref, head = pl.ds(block * size, size), self.refs[name], jnp.asarray(head, jnp.int32)
        if name in self.dims:
            return plgpu.load(ref.at[rows, head, :], mask=self._inside(name, size), other=0.0)
        return plgpu.load(ref.at[head, rows] if len(ref.shape) == 2 else ref.at[rows])

    def store(self, name: str, value: Array) -> None:
        """Stores the program's own block of a result."""
        size, ref = value.shape[0], self.refs[name]
        rows, head = pl.ds(self.block * size, size), jnp.int32(0)
        if name in self.dims:
            plgpu.store(ref.at[rows, head, :], value.astype(ref.dtype), mask=self._inside(name, size))
        else:
            plgpu.store(ref.at[head, rows], value)

    def _inside(self, name: str, size: int) -> Array:
        shape = size, self.refs[name].shape[2]
        return jax.lax.broadcasted_iota(jnp.int32, shape, 1) < self.dims[name]

    def seen(self, i: Any, j: Any) -> Array:
        """Mask Bool[queries, keys] of query block i and key block j."""
        q_seg, kv_seg = None, None
        if "q_seg" in self.refs:
            q_seg, kv_seg = self.load("q_seg", i)[:, None], self.load("kv_seg", j)[None]
        q_pos, kv_pos = self.load("q_pos", i)[:, None], self.load("kv_pos", j)[None]
        return blockwise.visibility_mask(q_pos, kv_pos, q_seg, kv_seg, self.options.window)

    def fold(self, step: Callable[[Any, Any, bool], Any], state: Any) -> Any:
        """Folds ``step(inner block, state, masked)`` over the blocks in the program's live range."""
        first, stop, whole_first, whole_stop = self.bounds
        for begin, end, masked in (
            (first, whole_first, True),
            (whole_first, whole_stop, False),
            (whole_stop, stop, True),
        ):
            state = jax.lax.fori_loop(begin, end, lambda i, state, masked=masked: step(i, state, masked), state)
        return state


def _forward_kernel(program: _Program) -> None:
    q = program.load("q", program.block)
    sink = program.refs["sink"][0] if "sink" in program.refs else None
    top, total = blockwise.init_softmax(sink, (program.q_block, 1))
    acc = jnp.zeros((program.q_block, program.refs["v"].shape[2]), jnp.float32)

    def step(j: Any, state: Any, masked: bool) -> Any:
        top, total, acc = state
        seen = program.seen(program.block, j) if masked else None
        scores, _ = blockwise.masked_scores(dot(q, program.load("k", j), (1, 1)), seen, program.options)
        top, total, weights, keep = blockwise.online_softmax_step(top, total, scores, axis=1)
        return top, total, acc * keep + dot(weights.astype(q.dtype), program.load("v", j), (1, 0))

    top, total, acc = program.fold(step, (top, total, acc))
    safe, lse = blockwise.finish_softmax(top, total)
    program.store("out", acc / safe)
    program.store("lse", lse[:, 0])


def _weights(program: _Program, i: Any, j: Any, q: Array, k: Array, v: Array, d_out: Array, head: Any, masked: bool):
    """(recomputed probabilities, gradient of q k^T), [queries, keys], as operands of the next matmuls."""
    seen = program.seen(i, j) if masked else None
    scores, slope = blockwise.masked_scores(dot(q, k, (1, 1)), seen, program.options)
    lse, delta = (program.load(name, i, head)[:, None] for name in ("lse", "delta"))
    both = blockwise.score_gradients(scores, slope, lse, dot(d_out, v, (1, 1)), delta)
    return both[0].astype(q.dtype), both[1].astype(q.dtype)


def _d_q_kernel(program: _Program) -> None:
    i = program.block
    q, d_out = program.load("q", i), program.load("d_out", i)

    def step(j: Any, d_q: Array, masked: bool) -> Array:
        k = program.load("k", j)
        _, d_products = _weights(program, i, j, q, k, program.load("v", j), d_out, 0, masked)
        return d_q + dot(d_products, k, (1, 0))

    program.store("d_q", program.fold(step, jnp.zeros(q.shape, jnp.float32)))


def _d_kv_kernel(program: _Program) -> None:
    j = program.block
    k, v = program.load("k", j), program.load("v", j)

    def of_head(head: Any, state: Any) -> Any:
        def step(i: Any, state: Any, masked: bool) -> Any:
            d_k, d_v = state
            q, d_out = program.load("q", i, head), program.load("d_out", i, head)
            weights, d_products = _weights(program, i, j, q, k, v, d_out, head, masked)
            return d_k + dot(d_products, q, (0, 0)), d_v + dot(weights, d_out, (0, 0))

        return program.fold(step, state)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, program.heads, of_head, zeros) if program.heads > 1 else of_head(0, zeros)
    program.store("d_k", d_k)
    program.store("d_v", d_v)
