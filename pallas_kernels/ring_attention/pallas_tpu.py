"""Ring attention on TPUs: one Pallas kernel per pass, which overlaps remote DMA of keys and values with attention.

At each step a device sends on the shard it holds (``tpu_remote_dma``) and computes its blocks, those of
``flash_attention``, in a pipeline inside the kernel. In the backward pass the gradients of keys and values follow one
step behind: a device's partial sums travel during its next step's dq and arrive before the neighbour's gradient of
those keys, which is added to them.

The residuals of the backward pass are a shard's own q, k, v, its output and one logsumexp per query and head.
Positions follow from the layout, or are given; these and segment ids, four bytes a token, are all-gathered before the
kernel starts, so that the blocks that the mask leaves at every step are known in advance.

Where a device has two cores (v4, v5p) each does half of the kv heads: two rings of half the bytes, core to core, which
wait for one another only at the end. An odd number of kv heads leaves the second core idle.

Legend: B batch, S tokens of a shard, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import result_like, target_device, vary_over, varying_axes
from pallas_kernels._pallas import bytes_of, cost, interpret_tpu
from pallas_kernels.flash_attention import blockwise, config
from pallas_kernels.flash_attention.pallas_tpu import add_d_kv, add_d_q, attend_block
from pallas_kernels.flash_attention.tpu_grid import BlockGrid, BlockLayout, GridStep
from pallas_kernels.flash_attention.xla import AttentionMask, ScoreOptions
from pallas_kernels.ring_attention.layout import places
from pallas_kernels.ring_attention.tpu_remote_dma import RingExchange, collective_id, neighbours, semaphores
from pallas_kernels.ring_attention.xla import RingConfig, in_one_ring

_STATE = ("top", "total", "acc")


def ring_attention_pallas_tpu(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    segment_ids: Int[Array, "B S"] | None,
    positions: Int[Array, "B S"] | None,
    sinks: Float[Array, " N"] | None,
    *,
    rings: tuple[RingConfig, ...],
    which: Int[Array, ""] | None,
) -> Float[Array, "B S N V"]:
    """Ring attention on TPUs; see ``ring_attention``.

    Raises:
        NotImplementedError: see ``blockwise.check_supported``.
    """
    blockwise.check_supported("pallas_tpu", q, k, v)
    return _ring(rings, which, q, k, v, segment_ids, positions, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(rings: tuple[RingConfig, ...], which: Array | None, *arrays: Array | None) -> Array:
    return _forward(rings, which, *arrays)[0]


def _forward(rings: tuple[RingConfig, ...], which: Array | None, *arrays: Array | None) -> tuple[Array, Any]:
    out, lse = _attention(rings, which, *arrays)
    return out, (which, *arrays, out, lse)


@in_one_ring
def _attention(
    ring: RingConfig,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    positions: Array | None,
    sinks: Array | None,
) -> tuple[Array, Array]:
    ring_pass = _RingPass.of(ring, q, k, segments, positions)
    layout = ring_pass.keys.layout
    sink = None if sinks is None else jnp.tile(layout.sink_rows(sinks), (1, 1, layout.q_blocks))
    top, total = blockwise.init_softmax(sink, layout.rows_shape(1))
    acc = jnp.zeros(layout.rows_shape(v.shape[3]), jnp.float32)
    done = ring_pass.run(
        _forward_step,
        {"q": layout.queries(q)},
        {"k": layout.keys(k), "v_columns": layout.keys(v).mT},
        dict(zip(_STATE, (top, total, acc), strict=True)),
        {},
        q.shape[3] + v.shape[3],
    )
    safe, lse = blockwise.finish_softmax(done["top"], done["total"])
    out = layout.from_rows((done["acc"] / safe).astype(q.dtype))
    return out, layout.from_rows(lse)[..., 0]


def _backward(rings: tuple[RingConfig, ...], residuals: Any, d_out: Array) -> tuple[Array | None, ...]:
    which, *arrays = residuals
    d_q, d_k, d_v, d_sinks = _gradients(rings, which, *arrays, d_out)
    return None, d_q, d_k, d_v, None, None, d_sinks


@in_one_ring
def _gradients(
    ring: RingConfig,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    positions: Array | None,
    sinks: Array | None,
    out: Array,
    lse: Array,
    d_out: Array,
) -> tuple[Array | None, ...]:
    ring_pass = _RingPass.of(ring, q, k, segments, positions)
    layout = ring_pass.keys.layout
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    rows = {"q": layout.queries(q), "d_out": layout.queries(d_out.astype(q.dtype))}
    rows |= {"lse": layout.to_rows(lse[..., None]), "delta": layout.to_rows(delta[..., None])}
    keys, values = layout.keys(k), layout.keys(v)
    done = ring_pass.run(
        _backward_step,
        rows,
        {"k": keys, "v": values, "k_columns": keys.mT},
        {"acc": jnp.zeros(layout.rows_shape(q.shape[3]), jnp.float32)},
        {"d_k_acc": keys, "d_v_acc": values},
        4 * q.shape[3] + 3 * v.shape[3],
    )
    d_q = layout.from_rows(done["acc"])
    home = ring.shift((done["d_k_acc"][ring_pass.last % 2], done["d_v_acc"][ring_pass.last % 2]), -ring_pass.last)
    d_k, d_v = (x.swapaxes(1, 2)[:, : layout.t] for x in home)
    d_sinks = None
    if sinks is not None:
        d_sinks = -jnp.sum(jnp.exp(sinks.astype(jnp.float32) - lse) * delta, axis=(0, 1)).astype(sinks.dtype)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks


_ring.defvjp(_forward, _backward)


class _RingPass(NamedTuple):
    """One pass around the ring.

    Attributes:
        ring: static configuration of the ring.
        options: static options of the scores.
        blocks: block sizes.
        keys, queries: grids over a shard's keys for its queries, and the other way round, with the bounds and mask of
            the first step.
        bounds: bounds of both grids for every step, [steps * bounds].
        masks: positions and segment ids of the keys for every step, [steps, ...].
    """

    ring: RingConfig
    options: ScoreOptions
    blocks: config.FlashTpuBlocks
    keys: BlockGrid
    queries: BlockGrid
    bounds: tuple[Array, Array]
    masks: dict[str, Array]

    @classmethod
    def of(cls, ring: RingConfig, q: Array, k: Array, segments: Array | None, positions: Array | None) -> _RingPass:
        options = ScoreOptions(ring.scale, ring.window, ring.softcap)
        blocks = config.tpu_blocks(target_device().kind, q.dtype.itemsize)
        layout = BlockLayout.of(q, k, blocks)
        size, mine = q.shape[1], ring.place()
        everyone = None if segments is None else ring.gather(segments)
        everywhere = None if positions is None else ring.gather(positions)

        def grids(step: Array) -> tuple[BlockGrid, BlockGrid]:
            theirs = (mine - step) % ring.shards
            if ring.layout is None:
                q_pos, kv_pos = positions, None if everywhere is None else everywhere[theirs]
            else:
                q_pos, kv_pos = (jnp.asarray(places(ring.layout, x, ring.shards, size))[None] for x in (mine, theirs))
            mask = AttentionMask(q_pos, kv_pos, segments, None if everyone is None else everyone[theirs])
            return BlockGrid.over_keys(layout, mask, options), BlockGrid.over_queries(layout, mask, options)

        def arrays(step: Array) -> tuple[tuple[Array, Array], dict[str, Array]]:
            keys, queries = grids(step)
            masks = keys.mask_operands()
            return (keys.bounds, queries.bounds), {name: masks[name] for name in masks if name.startswith("kv_")}

        bounds, masks = jax.vmap(arrays)(jnp.arange(ring.steps(size), dtype=jnp.int32))
        flat = bounds[0].reshape(-1), bounds[1].reshape(-1)
        return cls(ring, options, blocks, *grids(jnp.int32(0)), flat, masks)

    @property
    def last(self) -> int:
        """Index of the last step."""
        return next(iter(self.masks.values())).shape[0] - 1

    @property
    def cores(self) -> int:
        """Cores of a device that share the kv heads."""
        return self.blocks.cores if self.keys.layout.kv_heads % self.blocks.cores == 0 else 1

    def core_part(self, ref: Any, dim: int) -> Any:
        """This core's part of an array whose dimension ``dim`` is kv heads, or blocks of the heads that read them."""
        if self.cores == 1:
            return ref
        size = ref.shape[dim] // self.cores
        return ref.at[(slice(None),) * dim + (pl.ds(pl.program_id(0) * size, size),)]

    def run(
        self,
        at_step: Callable[[_RingStep], None],
        rows: Mapping[str, Array],
        rotating: Mapping[str, Array],
        state: Mapping[str, Array],
        accumulated: Mapping[str, Array],
        widths: int,
    ) -> dict[str, Array]:
        """Calls ``at_step`` at every step, inside one kernel.

        Args:
            at_step: kernel of a step.
            rows: resident operands, one value per row.
            rotating: arrays that rotate around the ring; each has two buffers (double buffering).
            state: resident arrays that are updated.
            accumulated: shapes of the arrays that follow one step behind, in float32, uninitialised.
            widths: sum of the head dims of the matmuls, for the cost estimate.

        Returns:
            The state and both buffers of the accumulated arrays, after the last step.
        """
        like = rows["q"]
        state = {name: vary_over(x, varying_axes(like)) for name, x in state.items()}
        masks = self.keys.mask_operands()
        operands = dict(rows) | {name: masks[name] for name in masks if name.startswith("q_")} | self.masks
        operands |= {f"own_{name}": x for name, x in rotating.items()} | {f"{n}_before": x for n, x in state.items()}
        results = {name: result_like(like, x.shape, x.dtype) for name, x in state.items()}
        results |= {name: result_like(like, (2, *x.shape), jnp.float32) for name, x in accumulated.items()}
        results |= {name: result_like(like, (2, *x.shape), x.dtype) for name, x in rotating.items()}
        scalars = {"keys_bounds": self.bounds[0], "queries_bounds": self.bounds[1], "neighbours": neighbours(self.ring)}
        names = (*scalars, *operands, *results)
        aliases = {names.index(f"{name}_before"): list(results).index(name) for name in state}
        buffers = {*rotating, *accumulated}
        heads = {name: 2 if name in buffers else 1 for name in (*operands, *results) if name not in masks}

        def body(*refs: Any) -> None:
            named, counters = dict(zip(names, refs, strict=False)), refs[len(names) :]
            named |= {name: self.core_part(named[name], dim) for name, dim in heads.items()}
            at_step(
                _RingStep(self, named, RingExchange(named, tuple(rotating), tuple(accumulated), self.last, *counters))
            )

        done = pl.pallas_call(
            body,
            out_shape=list(results.values()),
            grid=(self.cores, self.last + 1),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars)
            + [pl.BlockSpec(memory_space=pltpu.HBM)] * len(operands),
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(results),
            scratch_shapes=semaphores(rotating, accumulated),
            input_output_aliases=aliases,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=self.blocks.vmem_bytes,
                collective_id=collective_id(self.ring) if self.last else None,
            ),
            interpret=interpret_tpu(self.cores),
            cost_estimate=self.cost(operands | results, widths),
            name=f"ring_attention{at_step.__name__.removesuffix('_step')}",
        )(*scalars.values(), *operands.values())
        return dict(zip(results, done, strict=True))

    def cost(self, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], widths: int) -> pl.CostEstimate:
        """Cost estimate of a device with the mean number of visible keys, with each row taken as one segment."""
        layout, row = self.keys.layout, self.keys.layout.s * self.ring.shards
        products = (
            layout.batch * layout.heads * blockwise.visible_pairs(row, row, self.options.window) / self.ring.shards
        )
        return cost(2 * products * widths, bytes_of(*arrays.values()) * (self.last + 1), products)


class _RingStep(NamedTuple):
    """One step on one device, inside the kernel."""

    ring_pass: _RingPass
    refs: dict[str, Any]
    exchange: RingExchange

    def pipeline(
        self, kernel: Callable[..., None], grid: BlockGrid, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> None:
        """Runs ``kernel(refs, options, step)`` over all blocks of this step; outputs are accumulated."""
        whole, cores = grid.layout, self.ring_pass.cores
        grid = grid._replace(layout=whole._replace(heads=whole.heads // cores, kv_heads=whole.kv_heads // cores))
        which = "queries" if grid.inner_queries else "keys"
        bounds = _Bounds(self.refs[f"{which}_bounds"], self.exchange.step * grid.bounds.shape[0])
        masks = {name: self.refs[name] for name in ("q_pos", "q_seg") if name in self.refs}
        masks |= {name: self.refs[name].at[self.exchange.step] for name in ("kv_pos", "kv_seg") if name in self.refs}
        read = dict(inputs) | masks | {f"{name}_before": ref for name, ref in outputs.items()}
        names = (*read, *outputs)

        def cut(name: str, ref: Any) -> pl.BlockSpec:
            spec = grid.spec(name.removesuffix("_before"), ref.shape)
            index: Any = spec.index_map
            return pl.BlockSpec(spec.block_shape, lambda *i: index(*i, bounds))

        def body(*refs: Any) -> None:
            kernel(dict(zip(names, refs, strict=True)), self.ring_pass.options, grid.step(bounds))

        pltpu.emit_pipeline(
            body,
            grid=grid.shape,
            in_specs=[cut(name, ref) for name, ref in read.items()],
            out_specs=[cut(name, ref) for name, ref in outputs.items()],
        )(*read.values(), *outputs.values())


@dataclass(frozen=True)
class _Bounds:
    """Bounds of one step: a view into those of all steps."""

    ref: Any
    offset: Any

    def __getitem__(self, i: Any) -> Any:
        return self.ref[self.offset + i]


def _forward_step(here: _RingStep) -> None:
    refs, exchange = here.refs, here.exchange
    exchange.load_own()
    exchange.send()
    shard = {name: refs[name].at[exchange.slot] for name in ("k", "v_columns")}
    here.pipeline(_attend, here.ring_pass.keys, {"q": refs["q"], **shard}, {name: refs[name] for name in _STATE})
    exchange.receive()


def _backward_step(here: _RingStep) -> None:
    refs, exchange = here.refs, here.exchange
    exchange.load_own()
    exchange.send()
    exchange.send_grads()
    rows = {name: refs[name] for name in ("q", "d_out", "lse", "delta")}
    shard = {name: refs[name].at[exchange.slot] for name in ("k", "v")}
    columns = {"k_columns": refs["k_columns"].at[exchange.slot]}
    here.pipeline(_d_q, here.ring_pass.keys, rows | shard | columns, {"acc": refs["acc"]})
    exchange.receive_grads()
    d_kv = functools.partial(_d_kv, exchange.step == 0)
    here.pipeline(
        d_kv, here.ring_pass.queries, rows | shard, {n: refs[n].at[exchange.slot] for n in exchange.accumulated}
    )
    exchange.receive()


def _attend(refs: dict[str, Any], options: ScoreOptions, step: GridStep) -> None:
    _continue(refs, step, _STATE)
    step.visit(refs, options, lambda seen: attend_block(refs, options, seen))


def _d_q(refs: dict[str, Any], options: ScoreOptions, step: GridStep) -> None:
    _continue(refs, step, ("acc",))
    step.visit(refs, options, lambda seen: add_d_q(refs, options, seen))


def _d_kv(fresh: Any, refs: dict[str, Any], options: ScoreOptions, step: GridStep) -> None:
    names = "d_k_acc", "d_v_acc"
    _continue(refs, step._replace(first=step.first & ~fresh), names)

    @pl.when(step.first & fresh)
    def _() -> None:
        for name in names:
            refs[name][...] = jnp.zeros_like(refs[name])

    step.visit(refs, options, lambda seen: add_d_kv(refs, options, seen))


def _continue(refs: dict[str, Any], step: GridStep, names: tuple[str, ...]) -> None:
    @pl.when(step.first)
    def _() -> None:
        for name in names:
            refs[name][...] = refs[f"{name}_before"][...]
