"""Flash attention on TPUs: Pallas kernels through Mosaic; ``tpu_grid`` has the block layout and the grid.

Legend: B batch, S queries, T keys, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import result_like, target_device
from pallas_kernels._pallas import dot
from pallas_kernels.flash_attention import blockwise, config
from pallas_kernels.flash_attention.tpu_grid import BlockGrid, BlockLayout, GridStep, dot_queries, store_queries
from pallas_kernels.flash_attention.xla import AttentionMask, ScoreOptions


def attention_pallas_tpu(
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
    """Flash attention on TPUs: (output, logsumexp); see ``flash_attention``.

    Raises:
        NotImplementedError: see ``blockwise.check_supported``.
    """
    blockwise.check_supported("pallas_tpu", q, k, v)
    mask = AttentionMask(q_positions, kv_positions, q_segment_ids, kv_segment_ids)
    return blockwise.attend(_Kernels(), ScoreOptions(scale, window, softcap), q, k, v, sinks, mask)


class _Kernels(NamedTuple):
    """TPU kernels of ``blockwise.attend``."""

    def forward(
        self, options: ScoreOptions, q: Array, k: Array, v: Array, sinks: Array | None, mask: AttentionMask
    ) -> tuple[Array, Array]:
        blocks = config.tpu_blocks(target_device().kind, q.dtype.itemsize)
        layout = BlockLayout.of(q, k, blocks)
        grid = BlockGrid.over_keys(layout, mask, options)
        operands = {"q": layout.queries(q), "k": layout.keys(k), "v_columns": layout.keys(v).mT}
        if sinks is not None:
            operands["sink"] = layout.sink_rows(sinks)
        results = {
            "out": result_like(q, layout.queries_shape(v.shape[3]), q.dtype),
            "lse": result_like(q, layout.rows_shape(1), jnp.float32),
        }
        scratch = {"top": (1, layout.rows), "total": (1, layout.rows), "acc": (v.shape[3], layout.rows)}
        made = grid.call(_forward_kernel, options, blocks, operands, results, scratch, q.shape[3] + v.shape[3])
        out, lse = blockwise.name_residuals(made["out"], made["lse"])
        return layout.from_queries(out), layout.from_rows(lse)[..., 0]

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
        blocks = config.tpu_blocks(target_device().kind, q.dtype.itemsize)
        layout = BlockLayout.of(q, k, blocks)
        operands = {"q": layout.queries(q), "d_out": layout.queries(d_out), "k": layout.keys(k), "v": layout.keys(v)}
        operands |= {"lse": layout.to_rows(lse[..., None]), "delta": layout.to_rows(delta[..., None])}
        d_q = BlockGrid.over_keys(layout, mask, options).call(
            _d_q_kernel,
            options,
            blocks,
            operands | {"k_columns": operands["k"].mT},
            {"d_q": result_like(q, operands["q"].shape, q.dtype)},
            {"acc": (q.shape[3], layout.rows)},
            2 * q.shape[3] + v.shape[3],
        )["d_q"]
        d_kv = BlockGrid.over_queries(layout, mask, options).call(
            _d_kv_kernel,
            options,
            blocks,
            operands,
            {f"d_{name}": result_like(q, operands[name].shape, k.dtype) for name in ("k", "v")},
            {"d_k_acc": (layout.kv_block, k.shape[3]), "d_v_acc": (layout.kv_block, v.shape[3])},
            2 * (q.shape[3] + v.shape[3]),
        )
        d_k, d_v = (d_kv[name].swapaxes(1, 2)[:, : layout.t] for name in ("d_k", "d_v"))
        return layout.from_queries(d_q), d_k, d_v


def _forward_kernel(refs: dict[str, Any], options: ScoreOptions, step: GridStep) -> None:
    top, total, acc = refs["top"], refs["total"], refs["acc"]

    @pl.when(step.first)
    def _() -> None:
        top[...], total[...] = blockwise.init_softmax(refs["sink"][...] if "sink" in refs else None, top.shape)
        acc[...] = jnp.zeros_like(acc)

    step.visit(refs, options, lambda seen: attend_block(refs, options, seen))

    @pl.when(step.last)
    def _() -> None:
        safe, refs["lse"][...] = blockwise.finish_softmax(top[...], total[...])
        store_queries(refs["out"], acc[...] / safe)


def _d_q_kernel(refs: dict[str, Any], options: ScoreOptions, step: GridStep) -> None:
    acc = refs["acc"]

    @pl.when(step.first)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    step.visit(refs, options, lambda seen: add_d_q(refs, options, seen))

    @pl.when(step.last)
    def _() -> None:
        store_queries(refs["d_q"], acc[...])


def _d_kv_kernel(refs: dict[str, Any], options: ScoreOptions, step: GridStep) -> None:
    d_k, d_v = refs["d_k_acc"], refs["d_v_acc"]

    @pl.when(step.first)
    def _() -> None:
        d_k[...], d_v[...] = jnp.zeros_like(d_k), jnp.zeros_like(d_v)

    step.visit(refs, options, lambda seen: add_d_kv(refs, options, seen))

    @pl.when(step.last)
    def _() -> None:
        refs["d_k"][...], refs["d_v"][...] = d_k[...].astype(refs["d_k"].dtype), d_v[...].astype(refs["d_v"].dtype)


# --- one block; refs are looked up by name --------------------------------------------------------------------------


def attend_block(refs: dict[str, Any], options: ScoreOptions, seen: Array | None) -> None:
    """Forward step of a block: updates the running maximum ``top``, the sum ``total`` and the accumulator ``acc``."""
    top, total, acc, values = refs["top"], refs["total"], refs["acc"], refs["v_columns"][...]
    scores, _ = blockwise.masked_scores(dot_queries(refs["k"][...], refs["q"], "width"), seen, options)
    top[...], total[...], weights, keep = blockwise.online_softmax_step(top[...], total[...], scores, axis=0)
    acc[...] = acc[...] * keep + dot(values, weights.astype(values.dtype), (1, 0))


def add_d_q(refs: dict[str, Any], options: ScoreOptions, seen: Array | None) -> None:
    """Backward step for dq: adds a block's gradient of the queries to ``acc``."""
    _, d_products = _weights(refs, options, seen)
    refs["acc"][...] += dot(refs["k_columns"][...], d_products, (1, 0))


def add_d_kv(refs: dict[str, Any], options: ScoreOptions, seen: Array | None) -> None:
    """Backward step for dk and dv: adds a block's gradients to ``d_k_acc`` and ``d_v_acc``."""
    weights, d_products = _weights(refs, options, seen)
    refs["d_k_acc"][...] += dot_queries(d_products, refs["q"], "rows")
    refs["d_v_acc"][...] += dot_queries(weights, refs["d_out"], "rows")


def _weights(refs: dict[str, Any], options: ScoreOptions, seen: Array | None) -> tuple[Array, Array]:
    """(recomputed probabilities, gradient of q k^T), [keys, rows], as operands of the next matmuls."""
    k, v = refs["k"][...], refs["v"][...]
    scores, slope = blockwise.masked_scores(dot_queries(k, refs["q"], "width"), seen, options)
    d_weights = dot_queries(v, refs["d_out"], "width")
    both = blockwise.score_gradients(scores, slope, refs["lse"][...], d_weights, refs["delta"][...])
    return both[0].astype(k.dtype), both[1].astype(k.dtype)
