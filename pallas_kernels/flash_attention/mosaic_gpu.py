"""Flash attention on NVIDIA Hopper GPUs: Pallas kernels through Mosaic-GPU, with wgmma and TMA.

A block of threads has three warpgroups. One copies tiles from device memory into a ring of buffers in shared memory
(TMA); the other two each own a tile of rows and multiply (wgmma). A barrier for each buffer says that it is full, and
another that both are done with it (FlashAttention-3's pipeline, arXiv:2407.08608, without its exchange of turns between
the two warpgroups).

Rows are queries in the forward pass and for the gradient of queries; they are keys for the gradients of keys and
values, whose block of threads adds up all query heads that read its kv head, in a fixed order: there are no atomic
additions, and two runs give the same bits.

Legend: B batch, S queries, T keys, N query heads, K kv heads, G = N / K, H head dim of keys, V of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import result_like, vary_over, varying_axes
from pallas_kernels._mosaic_gpu import check_hopper, interpret_mosaic_gpu
from pallas_kernels._pallas import pad_to_multiple
from pallas_kernels.flash_attention import blockwise, config, warpgroup
from pallas_kernels.flash_attention.blockwise import PaddedMask
from pallas_kernels.flash_attention.warpgroup import OF_COLUMNS, OF_ROWS
from pallas_kernels.flash_attention.xla import AttentionMask, ScoreOptions

WORKERS = 2
"""Warpgroups of a block of threads that multiply; one more copies."""
HEAD_DIMS = (64, 128)


def attention_mosaic_gpu(
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
    """Flash attention on Hopper GPUs: (output, logsumexp); see ``flash_attention``.

    Raises:
        NotImplementedError: a head dim is not in ``HEAD_DIMS``, or see ``pallas_kernels._mosaic_gpu.check_hopper``.
    """
    check_hopper(q=q, k=k, v=v)
    if wrong := {q.shape[3], v.shape[3]}.difference(HEAD_DIMS):
        legal = " or ".join(map(str, HEAD_DIMS))
        raise NotImplementedError(f"mosaic_gpu takes head dims {legal}, not {', '.join(map(str, sorted(wrong)))}.")
    mask = AttentionMask(q_positions, kv_positions, q_segment_ids, kv_segment_ids)
    return blockwise.attend(_Kernels(), ScoreOptions(scale, window, softcap), q, k, v, sinks, mask)


class _Kernels(NamedTuple):
    """Hopper kernels of ``blockwise.attend``."""

    def forward(
        self, options: ScoreOptions, q: Array, k: Array, v: Array, sinks: Array | None, mask: AttentionMask
    ) -> tuple[Array, Array]:
        blocks = config.hopper_blocks(max(q.shape[3], v.shape[3]))
        call = _Call.of(options, q, k, mask, (WORKERS * blocks.rows, blocks.kv), blocks.rows, blocks.stages)
        operands = {"q": call.queries(q), "k": call.keys(k), "v": call.keys(v)}
        if sinks is not None:
            operands["sink"] = sinks.astype(jnp.float32)
        b, s, n, _ = operands["q"].shape
        results = {
            "out": result_like(q, (b, s, n, v.shape[3]), q.dtype),
            "lse": result_like(q, (b, n, s), jnp.float32),
        }
        scratch = {
            "own_q": call.own(q),
            "own_out": call.own(v),
            "own_lse": plgpu.SMEM((WORKERS, call.rows), jnp.float32),
            "loaded": plgpu.Barrier(num_barriers=WORKERS),
        }
        made = call.over_keys(_forward_kernel, operands, results, scratch, ("k", "v"))
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
        blocks = config.hopper_blocks(max(q.shape[3], v.shape[3]))
        rows, inner, stages = blocks.rows, blocks.inner_back, blocks.stages_back

        def operands_of(call: _Call) -> dict[str, Array]:
            found = {"q": call.queries(q), "k": call.keys(k), "v": call.keys(v), "d_out": call.queries(d_out)}
            return found | {"lse": call.queries(lse).swapaxes(1, 2), "delta": call.queries(delta).swapaxes(1, 2)}

        call = _Call.of(options, q, k, mask, (WORKERS * rows, inner), rows, stages)
        operands = operands_of(call)
        results = {"d_q": result_like(q, operands["q"].shape, q.dtype)}
        scratch = {"own_q": call.own(q), "own_d_out": call.own(v)}
        scratch["loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS)
        d_q = call.over_keys(_d_q_kernel, operands, results, scratch, ("k", "v"))["d_q"]
        call = _Call.of(options, q, k, mask, (inner, WORKERS * rows), rows, stages)
        operands = operands_of(call)
        results = {f"d_{name}": result_like(q, operands[name].shape, k.dtype) for name in ("k", "v")}
        scratch = {"own_k": call.own(k), "own_v": call.own(v)}
        scratch["loaded"] = plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS)
        d_kv = call.over_queries(_d_kv_kernel, operands, results, scratch, ("q", "d_out"))
        return d_q[:, : q.shape[1]], d_kv["d_k"][:, : k.shape[1]], d_kv["d_v"][:, : k.shape[1]]


class _Call(NamedTuple):
    """Launch of one kernel.

    Attributes:
        options: static options of the operation.
        padded: the padded mask operands.
        live, whole: block masks, see ``PaddedMask.blocks``.
        group: query heads that read one kv head.
        q_block, kv_block: queries and keys of a block: of all workers for the rows that they own.
        rows: rows that one worker owns.
        stages: buffers of each array that is copied while others are multiplied.
    """

    options: ScoreOptions
    padded: PaddedMask
    live: Array
    whole: Array
    group: int
    q_block: int
    kv_block: int
    rows: int
    stages: int

    @classmethod
    def of(
        cls,
        options: ScoreOptions,
        q: Array,
        k: Array,
        mask: AttentionMask,
        blocks: tuple[int, int],
        rows: int,
        stages: int,
    ) -> _Call:
        padded = PaddedMask.of(mask, q.shape[1], k.shape[1], *blocks)
        live, whole = padded.blocks(*blocks, options.window)
        return cls(options, padded, live, whole, q.shape[2] // k.shape[2], *blocks, rows, stages)

    def queries(self, x: Array) -> Array:
        """``x`` padded to whole blocks of queries."""
        return pad_to_multiple(x, 1, self.q_block)

    def keys(self, x: Array) -> Array:
        """``x`` padded to whole blocks of keys."""
        return pad_to_multiple(x, 1, self.kv_block)

    def own(self, x: Array) -> Any:
        """Shared memory for the rows of ``x`` that the workers own."""
        return warpgroup.tiles(WORKERS, self.rows, x.shape[3], x.dtype)

    def over_keys(
        self, kernel: _Kernel, operands: _Arrays, results: _Types, scratch: _Types, moving: _Names
    ) -> _Arrays:
        """Runs a kernel whose workers own queries of one query head; blocks of the arrays ``moving`` pass by."""
        b, s, heads, _ = operands["q"].shape
        grid = heads, s // self.q_block, b
        return self._run(kernel, operands, results, scratch, moving, grid, self.live, self.whole, self.kv_block)

    def over_queries(
        self, kernel: _Kernel, operands: _Arrays, results: _Types, scratch: _Types, moving: _Names
    ) -> _Arrays:
        """Runs a kernel whose workers own keys of one kv head; blocks of the arrays ``moving`` pass by."""
        b, t, heads, _ = operands["k"].shape
        grid = heads, t // self.kv_block, b
        return self._run(kernel, operands, results, scratch, moving, grid, self.live.mT, self.whole.mT, self.q_block)

    def _run(
        self,
        kernel: _Kernel,
        operands: _Arrays,
        results: _Types,
        scratch: _Types,
        moving: _Names,
        grid: tuple[int, int, int],
        live: Array,
        whole: Array,
        size: int,
    ) -> _Arrays:
        operands = operands | {name: x for name, x in self.padded._asdict().items() if x is not None}
        operands["bounds"] = blockwise.block_ranges(live, whole).reshape(live.shape[0], -1)
        scratch = dict(scratch)
        for name in moving:
            x = operands[name]
            scratch[f"ring_{name}"] = warpgroup.tiles(self.stages, size, x.shape[3], x.dtype)
            scratch[f"full_{name}"] = plgpu.Barrier(num_barriers=self.stages)
            scratch[f"free_{name}"] = plgpu.Barrier(num_arrivals=WORKERS, num_barriers=self.stages)

        def body(*refs: Any, **buffers: Any) -> None:
            named = dict(zip((*operands, *results), refs, strict=True))
            program = _Program.of(self, named | buffers, size)
            is_worker = program.worker < WORKERS

            @pl.when(is_worker)
            def _work() -> None:
                plgpu.set_max_registers(232, action="increase")
                kernel(program)

            @pl.when(jnp.logical_not(is_worker))
            def _copy() -> None:
                plgpu.set_max_registers(40, action="decrease")
                program.copy(moving)

        body.__name__ = f"flash_attention{kernel.__name__.removesuffix('_kernel')}"
        call = plgpu.kernel(
            body,
            out_type=list(results.values()),
            scratch_types=scratch,
            grid=grid,
            grid_names=("head", "block", "row"),
            num_threads=WORKERS + 1,
            thread_name="warpgroup",
            interpret=interpret_mosaic_gpu(),
            # The fast tanh is off by 5e-4, too much for scores that a soft cap leaves large.
            compiler_params=plgpu.CompilerParams(approx_math=self.options.softcap is None),
        )
        made = call(*operands.values())
        axes = varying_axes(operands["q"])  # which such a kernel forgets
        return {name: vary_over(x, axes) for name, x in zip(results, made, strict=True)}


class _Program(NamedTuple):
    """One block of threads of a kernel, as one of its warpgroups sees it.

    Attributes:
        call: the launch.
        refs: by name, arrays in device memory and buffers and barriers in shared memory.
        size: rows of a block that passes by.
        row, head, block: of the batch, of the heads, and of the blocks of rows that the workers own.
        worker: index of the warpgroup; the last one copies.
        heads: heads of the arrays that pass by, for one head of the rows owned.
        bounds: the block's four entries of ``blockwise.block_ranges``.
    """

    call: _Call
    refs: dict[str, Any]
    size: int
    row: Array
    head: Array
    block: Array
    worker: Array
    heads: int
    bounds: tuple[Array, ...]

    @classmethod
    def of(cls, call: _Call, refs: dict[str, Any], size: int) -> _Program:
        row, head, block, worker = (jax.lax.axis_index(name) for name in ("row", "head", "block", "warpgroup"))
        bounds, at = refs["bounds"], row if refs["bounds"].shape[0] > 1 else 0
        heads = call.group if "ring_q" in refs else 1
        return cls(
            call, refs, size, row, head, block, worker, heads, tuple(bounds[at, block * 4 + i] for i in range(4))
        )

    @property
    def first(self) -> Array:
        """First row that this worker owns."""
        return (self.block * WORKERS + self.worker) * self.call.rows

    def own(self, name: str) -> Any:
        """This worker's part of a buffer."""
        return self.refs[f"own_{name}"].at[self.worker]

    def load_own(self, *names: str, head: Array) -> None:
        """Copies the rows that this worker owns into its buffers."""
        loaded = self.refs["loaded"].at[self.worker]
        for name in names:
            source = self.refs[name].at[self.row, pl.ds(self.first, self.call.rows), head]
            plgpu.copy_gmem_to_smem(source, self.own(name), loaded)
        plgpu.barrier_wait(loaded)

    def store_own(self, **tiles: tuple[str, Array]) -> None:
        """Stores the rows that this worker owns: result=(buffer to go through, value)."""
        for buffer, value in tiles.values():
            own = self.own(buffer)
            own[...] = value.astype(own.dtype)
        plgpu.commit_smem()
        rows = pl.ds(self.first, self.call.rows)
        for name, (buffer, _) in tiles.items():
            place = (self.row, self.head, rows) if name == "lse" else (self.row, rows, self.head)
            plgpu.copy_smem_to_gmem(self.own(buffer), self.refs[name].at[place])
        plgpu.wait_smem_to_gmem(0)

    def copy(self, names: tuple[str, ...]) -> None:
        """In the copying warpgroup: fills the rings, and returns when the workers are done with them."""
        first, stop, *_ = self.bounds
        count, stages = stop - first, self.call.stages
        total = count * self.heads

        def step(n: Array, _: None) -> None:
            slot = jax.lax.rem(n, stages)
            for name in names:

                @pl.when(n >= stages)
                def _wait(name: str = name) -> None:
                    plgpu.barrier_wait(self.refs[f"free_{name}"].at[slot])

                @pl.when(n < total)
                def _fill(name: str = name) -> None:
                    head, block = self._passing(name, n, count)
                    source = self.refs[name].at[self.row, pl.ds((first + block) * self.size, self.size), head]
                    plgpu.copy_gmem_to_smem(
                        source, self.refs[f"ring_{name}"].at[slot], self.refs[f"full_{name}"].at[slot]
                    )

        jax.lax.fori_loop(0, total + stages, step, None)

    def _passing(self, name: str, n: Array, count: Array) -> tuple[Array, Array]:
        """(head, block in the live range) of step ``n`` of an array that passes by."""
        if name in ("k", "v"):
            return jax.lax.div(self.head, self.call.group), n
        count = jnp.maximum(count, 1)
        return self.head * self.call.group + jax.lax.div(n, count), jax.lax.rem(n, count)

    def await_full(self, name: str, slot: Array) -> Any:
        """A buffer of a ring, when it is full."""
        plgpu.barrier_wait(self.refs[f"full_{name}"].at[slot])
        return self.refs[f"ring_{name}"].at[slot]

    def release(self, name: str, slot: Array) -> None:
        """Says that this worker is done with a buffer of a ring."""
        plgpu.barrier_arrive(self.refs[f"free_{name}"].at[slot])

    def fold(self, step: Callable[[Any, Array, Any, bool], Any], state: Any, head: Any = 0) -> Any:
        """Folds ``step(block, slot, state, masked)`` over the live range, for the ``head``-th head that passes by."""
        first, stop, whole_first, whole_stop = self.bounds
        before = head * (stop - first) - first
        for begin, end, masked in (
            (first, whole_first, True),
            (whole_first, whole_stop, False),
            (whole_stop, stop, True),
        ):

            def at(n: Array, state: Any, begin: Array = begin, masked: bool = masked) -> Any:
                return step(begin + n, jax.lax.rem(before + begin + n, self.call.stages), state, masked)

            # From 0 on: a counter that begins at a number read from an operand has the operand's varying axes, and
            # loses them when it is incremented in here.
            state = jax.lax.fori_loop(0, end - begin, at, state)
        return state

    def vector(self, name: str, place: Array, size: int, layout: Any, head: Array | None = None) -> Array:
        """Row statistics, positions or segment ids from ``place`` on."""
        ref = self.refs[name]
        row = self.row if ref.shape[0] > 1 else 0
        at = (row, pl.ds(place, size)) if head is None else (row, head, pl.ds(place, size))
        return warpgroup.load(ref.at[at], layout)

    def scores(self, products: Array, block: Array, masked: bool, queries: Any) -> tuple[Array, Array | float]:
        """``blockwise.masked_scores`` of this worker's rows and the block that passes by; ``queries`` is the layout of
        queries, rows or columns.
        """
        seen = self._seen(block, products.shape, queries) if masked else None
        return blockwise.masked_scores(products, seen, self.call.options)

    def _seen(self, block: Array, shape: tuple[int, ...], queries: Any) -> Array:
        def spread(name: str) -> Array:
            layout = queries if name.startswith("q") else OF_COLUMNS if queries is OF_ROWS else OF_ROWS
            owned = layout is OF_ROWS
            place, size = (self.first, shape[0]) if owned else (block * self.size, shape[1])
            return warpgroup.spread(self.vector(name, place, size, layout), shape, layout)

        q_seg, kv_seg = (spread("q_seg"), spread("kv_seg")) if "q_seg" in self.refs else (None, None)
        return blockwise.visibility_mask(spread("q_pos"), spread("kv_pos"), q_seg, kv_seg, self.call.options.window)


_Kernel = Callable[[_Program], None]
_Arrays = dict[str, Array]
_Types = dict[str, Any]
_Names = tuple[str, ...]


def _forward_kernel(program: _Program) -> None:
    program.load_own("q", head=program.head)
    q, rows = program.own("q"), program.call.rows
    sink = program.refs["sink"][program.head] if "sink" in program.refs else None
    top, total = (warpgroup.laid_out(x, OF_ROWS) for x in blockwise.init_softmax(sink, (rows,)))

    def step(j: Array, slot: Array, state: Any, masked: bool) -> Any:
        top, total, out = state
        products = warpgroup.transposed_product(q, program.await_full("k", slot))
        program.release("k", slot)
        scores, _ = program.scores(products, j, masked, OF_ROWS)
        highest = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - warpgroup.spread(highest, scores.shape, OF_ROWS))
        keep = jnp.exp(top - highest)
        total = total * keep + jnp.sum(weights, axis=1)
        out = out * warpgroup.spread(keep, out.shape, OF_ROWS)
        out = warpgroup.add_product(out, weights.astype(q.dtype), program.await_full("v", slot))
        program.release("v", slot)
        return highest, total, out

    values = program.refs["v"].shape[3]
    top, total, out = program.fold(step, (top, total, warpgroup.zeros(rows, values)))
    safe, lse = blockwise.finish_softmax(top, total)
    out = out / warpgroup.spread(safe, out.shape, OF_ROWS)
    program.store_own(out=("out", out), lse=("lse", lse))


def _d_q_kernel(program: _Program) -> None:
    program.load_own("q", "d_out", head=program.head)
    q, d_out, rows = program.own("q"), program.own("d_out"), program.call.rows
    lse, delta = (program.vector(name, program.first, rows, OF_ROWS, program.head) for name in ("lse", "delta"))

    def step(j: Array, slot: Array, d_q: Array, masked: bool) -> Array:
        k = program.await_full("k", slot)
        scores, slope = program.scores(warpgroup.transposed_product(q, k), j, masked, OF_ROWS)
        d_weights = warpgroup.transposed_product(d_out, program.await_full("v", slot))
        program.release("v", slot)
        of_lse, of_delta = (warpgroup.spread(x, scores.shape, OF_ROWS) for x in (lse, delta))
        _, d_products = blockwise.score_gradients(scores, slope, of_lse, d_weights, of_delta)
        d_q = warpgroup.add_product(d_q, d_products.astype(q.dtype), k)
        program.release("k", slot)
        return d_q

    d_q = program.fold(step, warpgroup.zeros(rows, q.shape[1]))
    program.store_own(d_q=("q", d_q))


def _d_kv_kernel(program: _Program) -> None:
    program.load_own("k", "v", head=program.head)
    k, v, rows = program.own("k"), program.own("v"), program.call.rows

    def of_head(number: Any, state: Any) -> Any:
        head = program.head * program.heads + number

        def step(i: Array, slot: Array, state: Any, masked: bool) -> Any:
            d_k, d_v = state
            q = program.await_full("q", slot)
            scores, slope = program.scores(warpgroup.transposed_product(k, q), i, masked, OF_COLUMNS)
            d_out = program.await_full("d_out", slot)
            d_weights = warpgroup.transposed_product(v, d_out)
            place, size = i * program.size, program.size
            lse, delta = (program.vector(name, place, size, OF_COLUMNS, head) for name in ("lse", "delta"))
            lse, delta = (warpgroup.spread(x, scores.shape, OF_COLUMNS) for x in (lse, delta))
            weights, d_products = blockwise.score_gradients(scores, slope, lse, d_weights, delta)
            d_v = warpgroup.add_product(d_v, weights.astype(q.dtype), d_out)
            program.release("d_out", slot)
            d_k = warpgroup.add_product(d_k, d_products.astype(q.dtype), q)
            program.release("q", slot)
            return d_k, d_v

        return program.fold(step, state, number)

    state = warpgroup.zeros(rows, k.shape[1]), warpgroup.zeros(rows, v.shape[1])
    d_k, d_v = jax.lax.fori_loop(0, program.heads, of_head, state) if program.heads > 1 else of_head(0, state)
    program.store_own(d_k=("k", d_k), d_v=("v", d_v))
