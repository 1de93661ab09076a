"""Fused linear cross-entropy on NVIDIA GPUs: Pallas kernels through Triton.

Registers hold a tile of logits but no whole rows of the embedding. The forward pass therefore accumulates a tile's
logits along the embedding and keeps their online-softmax statistics; each program covers a part of the vocabulary. The
backward pass goes through the vocabulary in bands: a kernel recomputes a band's logits and writes their gradients,
rounded as operands of the two matmuls that follow, which XLA runs. Four matmuls in all; memory is tokens x one band.

Loads mask the edges of arrays, except that tokens are padded to whole blocks.

Legend: T tokens, D embed, V vocab (or this shard's slice of it), C columns of a band.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import is_interpreting, result_like, target_device
from pallas_kernels._pallas import MASK_VALUE, check_supported, dot, pad_to_multiple, round_up
from pallas_kernels.cross_entropy import blockwise, config
from pallas_kernels.cross_entropy.blockwise import (
    NO_TARGET,
    LogitGradTerms,
    LossOptions,
    SoftmaxStats,
    apply_softcap,
)

MAX_ELEMENTS = 2**31
"""Offsets in an array are 32-bit integers."""


def cross_entropy_pallas_gpu(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    *,
    z_loss: float,
    softcap: float | None,
    vocab_axis: str | tuple[str, ...] | None,
    chunk: int | None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Fused cross-entropy on GPUs; see ``linear_cross_entropy``: (loss, sum of nll, sum of squared lse).

    Raises:
        NotImplementedError: ``chunk`` is given, an array has ``MAX_ELEMENTS`` or more elements, or see
            ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_gpu", hidden=hidden, head=head)
    if chunk is not None:
        raise NotImplementedError(f"pallas_gpu never holds all tokens' logits; chunk = {chunk} must be None.")
    if max(hidden.size, head.size) >= MAX_ELEMENTS:
        raise NotImplementedError(
            f"pallas_gpu takes arrays of fewer than 2^31 elements: hidden {list(hidden.shape)}, head "
            f"{list(head.shape)}."
        )
    return blockwise.sums(_Kernels(), LossOptions(z_loss, softcap, vocab_axis), hidden, head, targets, weights)


class _Kernels(NamedTuple):
    """GPU kernels of ``blockwise.sums``."""

    def forward(
        self, options: LossOptions, hidden: Array, head: Array, local: Array, gradients: bool
    ) -> tuple[SoftmaxStats, None]:
        blocks = config.gpu_blocks(target_device().kind, hidden.dtype.itemsize)
        tokens, shape = hidden.shape[0], head.shape
        vocab = shape[0]
        padded = pad_to_multiple(hidden, 0, blocks.tokens)
        across, down = -(-vocab // blocks.vocab), padded.shape[0] // blocks.tokens
        per_program = max(1, across * down // blocks.programs)
        parts = -(-across // per_program)

        def body(hidden: Any, head: Any, local: Any, top: Any, total: Any, target: Any) -> None:
            i, part = pl.program_id(0), pl.program_id(1)
            rows = pl.ds(i * blocks.tokens, blocks.tokens)
            here = plgpu.load(local.at[rows])[:, None]

            def more(j: Any, state: Any) -> Any:
                top, total, target = state
                products, column = _products(blocks, shape, hidden, head, i, j * blocks.vocab)
                logits = jnp.where(column < vocab, apply_softcap(products, options.softcap)[0], MASK_VALUE)
                highest = jnp.maximum(top, jnp.max(logits, axis=1))
                exps = jnp.exp(logits - highest[:, None])
                target = target + jnp.sum(jnp.where(column == here, logits, 0.0), axis=1)
                return highest, total * jnp.exp(top - highest) + jnp.sum(exps, axis=1), target

            zeros = jnp.zeros(blocks.tokens, jnp.float32)
            first = part * per_program
            state = zeros + MASK_VALUE, zeros, zeros
            state = jax.lax.fori_loop(first, jnp.minimum(first + per_program, across), more, state)
            for ref, value in zip((top, total, target), state, strict=True):
                plgpu.store(ref.at[part, rows], value)

        out = [result_like(hidden, (parts, padded.shape[0]), jnp.float32)] * 3
        operands = padded, head, pad_to_multiple(local, 0, blocks.tokens, NO_TARGET)
        top, total, target = _call(body, (down, parts), operands, out, blocks, "cross_entropy")
        highest = jnp.max(top, axis=0)
        total = jnp.sum(total * jnp.exp(top - highest), axis=0)
        return SoftmaxStats(highest[:tokens], total[:tokens], jnp.sum(target, axis=0)[:tokens]), None

    def backward(
        self, options: LossOptions, hidden: Array, head: Array, local: Array, slopes: LogitGradTerms, saved: None
    ) -> tuple[Array, Array]:
        blocks = config.gpu_blocks(target_device().kind, hidden.dtype.itemsize)
        tokens, vocab = hidden.shape[0], head.shape[0]
        padded, local = pad_to_multiple(hidden, 0, blocks.tokens), pad_to_multiple(local, 0, blocks.tokens, NO_TARGET)
        slopes = LogitGradTerms(*(pad_to_multiple(x, 0, blocks.tokens) for x in slopes))
        most = min(blocks.band_logits // padded.shape[0], vocab // blocks.bands)
        band = min(round_up(max(most, blocks.least_band), blocks.vocab), vocab)

        def add(first: Any, size: int, d_hidden: Array, d_head: Array) -> tuple[Array, Array]:
            # The barrier orders the bands: XLA unrolls a loop of few bands and would hold all of them at once.
            lse, d_hidden = jax.lax.optimization_barrier((slopes.lse, d_hidden))
            mine = slopes._replace(lse=lse)
            d_logits = _d_logits(blocks, options, padded, head, local, mine, first, size)
            rows = jax.lax.dynamic_slice_in_dim(head, first, size)
            d_hidden += jnp.einsum("tc,cd->td", d_logits, rows, preferred_element_type=jnp.float32)
            d_rows = jnp.einsum("tc,td->cd", d_logits, padded, preferred_element_type=jnp.float32)
            return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_rows.astype(head.dtype), first, 0)

        state = jnp.zeros_like(padded, jnp.float32), jnp.zeros_like(head)
        state = jax.lax.fori_loop(0, vocab // band, lambda i, state: add(i * band, band, *state), state)
        if vocab % band:
            state = add(vocab - vocab % band, vocab % band, *state)
        d_hidden, d_head = state
        return d_hidden[:tokens].astype(hidden.dtype), d_head


def _d_logits(
    blocks: config.CrossEntropyGpuBlocks,
    options: LossOptions,
    hidden: Array,
    head: Array,
    local: Array,
    slopes: LogitGradTerms,
    first: Any,
    size: int,
) -> Float[Array, "T C"]:
    """Gradients of a band's logits: ``size`` columns from ``first``, recomputed from the logsumexp."""
    down, shape = hidden.shape[0] // blocks.tokens, head.shape
    together = min(blocks.together, down)

    def body(hidden: Any, head: Any, local: Any, lse: Any, softmax: Any, target: Any, first: Any, out: Any) -> None:
        # Grid steps past the last block of tokens repeat the last one.
        i = jnp.minimum(pl.program_id(2) * together + pl.program_id(0), down - 1)
        rows, start = pl.ds(i * blocks.tokens, blocks.tokens), pl.program_id(1) * blocks.vocab
        products, column = _products(blocks, shape, hidden, head, i, first[0] + start)
        logits, slope = apply_softcap(products, options.softcap)
        at, norm, of_softmax, of_target = (plgpu.load(x.at[rows])[:, None] for x in (local, lse, softmax, target))
        d_logits = (of_softmax * jnp.exp(logits - norm) - jnp.where(column == at, of_target, 0.0)) * slope
        mask = jnp.broadcast_to(column - first[0] < size, d_logits.shape)
        plgpu.store(out.at[rows, pl.ds(start, blocks.vocab)], d_logits.astype(out.dtype), mask=mask)

    grid = together, -(-size // blocks.vocab), -(-down // together)
    out = [result_like(hidden, (hidden.shape[0], size), hidden.dtype)]
    operands = hidden, head, local, *slopes, jnp.full_like(local[:1], first)
    return _call(body, grid, operands, out, blocks, "cross_entropy_d_logits")[0]


def _products(
    blocks: config.CrossEntropyGpuBlocks, head_shape: tuple[int, ...], hidden: Any, head: Any, i: Any, first: Any
) -> tuple[Array, Array]:
    """Uncapped logits of token block i and the columns from ``first``, with the [1 columns] vocabulary index of each.

    Logits beyond the end of the vocabulary are zero.
    """
    vocab, embed = head_shape
    rows, columns = pl.ds(i * blocks.tokens, blocks.tokens), pl.ds(first, blocks.vocab)
    column = first + jnp.arange(blocks.vocab, dtype=jnp.int32)
    ragged = embed % blocks.embed > 0

    def more(k: Any, acc: Array) -> Array:
        start = k * blocks.embed
        inside = (start + jnp.arange(blocks.embed, dtype=jnp.int32) < embed)[None]
        here = pl.ds(start, blocks.embed)
        a = _load(hidden.at[rows, here], inside if ragged else None, (blocks.tokens, blocks.embed))
        both = (column < vocab)[:, None]
        b = _load(head.at[columns, here], both & inside if ragged else both, (blocks.vocab, blocks.embed))
        return acc + dot(a, b, (1, 1))

    acc = jnp.zeros((blocks.tokens, blocks.vocab), jnp.float32)
    return jax.lax.fori_loop(0, -(-embed // blocks.embed), more, acc), column[None]


def _load(ref: Any, mask: Array | None, shape: tuple[int, int]) -> Array:
    if mask is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=jnp.broadcast_to(mask, shape), other=0.0)


def _call(
    body: Any,
    grid: tuple[int, ...],
    operands: tuple[Array, ...],
    out: list[jax.ShapeDtypeStruct],
    blocks: config.CrossEntropyGpuBlocks,
    name: str,
) -> Sequence[Array]:
    def whole(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        """Spec of a whole array, rounded up to whole blocks: the interpreter shifts slices that leave the array."""
        shape = x.shape
        if len(shape) == 2:
            shape = round_up(shape[0], blocks.vocab) + blocks.vocab, round_up(shape[1], max(blocks.vocab, blocks.embed))
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    call = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[whole(x) for x in operands],
        out_specs=[whole(x) for x in out],
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=is_interpreting(),
        name=name,
    )
    return call(*operands)
