"""Fused linear cross-entropy on TPUs: Pallas kernels through Mosaic.

Four matmuls, and no logits in HBM. The forward pass is flash attention with the head as keys and values: where a
gradient will be needed, it also accumulates the softmax-weighted average of the head's rows, which is all that the
gradient of hidden needs of the vocabulary. The backward pass recomputes the logits once for the gradient of the head.

Legend: T tokens, D embed, V vocab (or this shard's slice of it).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import result_like, target_device
from pallas_kernels._pallas import (
    MASK_VALUE,
    bytes_of,
    check_supported,
    cost,
    dot,
    interpret_tpu,
    pad_to_multiple,
    round_up,
)
from pallas_kernels.cross_entropy import blockwise, config
from pallas_kernels.cross_entropy.blockwise import (
    NO_TARGET,
    LogitGradTerms,
    LossOptions,
    SoftmaxStats,
    apply_softcap,
)


def cross_entropy_pallas_tpu(
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
    """Fused cross-entropy on TPUs; see ``linear_cross_entropy``: (loss, sum of nll, sum of squared lse).

    Raises:
        NotImplementedError: ``chunk`` is given, D is too large for the device's VMEM, or see
            ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_tpu", hidden=hidden, head=head)
    if chunk is not None:
        raise NotImplementedError(f"pallas_tpu never holds all tokens' logits; chunk = {chunk} must be None.")
    if config.tpu_blocks(target_device().kind, hidden.shape[1], hidden.dtype.itemsize) is None:
        raise NotImplementedError(
            f"pallas_tpu: 128 rows of {hidden.shape[1]} columns of {hidden.dtype} (hidden {list(hidden.shape)}) do not "
            f"fit into the fast memory of {target_device().kind}."
        )
    return blockwise.sums(_Kernels(), LossOptions(z_loss, softcap, vocab_axis), hidden, head, targets, weights)


class _Kernels(NamedTuple):
    """TPU kernels of ``blockwise.sums``."""

    def forward(
        self, options: LossOptions, hidden: Array, head: Array, local: Array, gradients: bool
    ) -> tuple[SoftmaxStats, tuple[Array, SoftmaxStats] | None]:
        blocks = _blocks(hidden)
        tokens, (vocab, embed) = hidden.shape[0], head.shape
        size, step = min(blocks.tokens, round_up(tokens, 128)), min(blocks.vocab, round_up(vocab, 128))
        padded = pad_to_multiple(hidden, 0, size)
        rows = padded.shape[0]

        def body(hidden: Any, head: Any, local: Any, top: Any, total: Any, target: Any, *average: Any) -> None:
            j = pl.program_id(1)

            @pl.when(j == 0)
            def _() -> None:
                top[...] = jnp.full_like(top, MASK_VALUE)
                for ref in (total, target, *average):
                    ref[...] = jnp.zeros_like(ref)

            matrix = head[...]
            if vocab % step:  # the last block reads undefined rows beyond the end
                matrix = jnp.where(j * step + _iota((step, 1), 0) < vocab, matrix, 0)
            logits, slope = apply_softcap(dot(hidden[...], matrix, (1, 1)), options.softcap)
            column = j * step + _iota(logits.shape, 1)
            if vocab % step:
                logits = jnp.where(column < vocab, logits, MASK_VALUE)
            highest = jnp.maximum(top[...], jnp.max(logits, axis=1, keepdims=True))
            exps, keep = jnp.exp(logits - highest), jnp.exp(top[...] - highest)
            top[...], total[...] = highest, total[...] * keep + jnp.sum(exps, axis=1, keepdims=True)
            target[...] += jnp.sum(jnp.where(column == local[...], logits, 0.0), axis=1, keepdims=True)
            for ref in average:
                ref[...] = ref[...] * keep + dot((exps * slope).astype(matrix.dtype), matrix, (1, 0))

        per_token = pl.BlockSpec((size, 1), lambda i, j: (i, 0))
        wide = pl.BlockSpec((size, embed), lambda i, j: (i, 0))
        out = [result_like(hidden, (rows, 1), jnp.float32)] * 3
        if gradients:
            out.append(result_like(hidden, (rows, embed), jnp.float32))
        top, total, target, *average = pl.pallas_call(
            body,
            grid=(rows // size, -(-vocab // step)),
            in_specs=[wide, pl.BlockSpec((step, embed), lambda i, j: (j, 0)), per_token],
            out_specs=[per_token] * 3 + [wide] * gradients,
            out_shape=out,
            compiler_params=_params(blocks),
            interpret=interpret_tpu(),
            cost_estimate=cost(
                2 * rows * vocab * embed * (1 + gradients),
                bytes_of(padded, *out) + rows // size * bytes_of(head),
                rows * vocab,
            ),
            name="cross_entropy",
        )(padded, head, pad_to_multiple(local, 0, size, NO_TARGET)[:, None])
        part = SoftmaxStats(*(x[:tokens, 0] for x in (top, total, target)))
        return part, (average[0][:tokens], part) if gradients else None

    def backward(
        self,
        options: LossOptions,
        hidden: Array,
        head: Array,
        local: Array,
        slopes: LogitGradTerms,
        saved: tuple[Array, SoftmaxStats],
    ) -> tuple[Array, Array]:
        average, part = saved
        scale = slopes.softmax * jnp.exp(part.top - slopes.lse)
        slope = 1.0 if options.softcap is None else 1.0 - (part.target / options.softcap) ** 2
        hit = jnp.where(local == NO_TARGET, 0.0, slopes.target * slope)
        rows = jnp.take(head, jnp.maximum(local, 0), axis=0).astype(jnp.float32)
        d_hidden = scale[:, None] * average - hit[:, None] * rows
        return d_hidden.astype(hidden.dtype), self._d_head(options, hidden, head, local, slopes)

    def _d_head(self, options: LossOptions, hidden: Array, head: Array, local: Array, slopes: LogitGradTerms) -> Array:
        blocks = _blocks(hidden)
        vocab, embed = head.shape
        size, step = min(blocks.tokens_back, round_up(len(hidden), 128)), min(blocks.vocab_back, round_up(vocab, 128))
        padded = pad_to_multiple(hidden, 0, size)

        def body(
            hidden: Any, head: Any, local: Any, lse: Any, softmax: Any, target: Any, d_head: Any, acc: Any
        ) -> None:
            i, j = pl.program_id(0), pl.program_id(1)

            @pl.when(j == 0)
            def _() -> None:
                acc[...] = jnp.zeros_like(acc)

            # Rows beyond the vocabulary's end are computed but not written.
            logits, slope = apply_softcap(dot(head[...], hidden[...], (1, 1)), options.softcap)
            hit = i * step + _iota(logits.shape, 0) == local[...]
            d_logits = (softmax[...] * jnp.exp(logits - lse[...]) - jnp.where(hit, target[...], 0.0)) * slope
            acc[...] += dot(d_logits.astype(hidden.dtype), hidden[...], (1, 0))

            @pl.when(j == pl.num_programs(1) - 1)
            def _() -> None:
                d_head[...] = acc[...].astype(d_head.dtype)

        per_token = pl.BlockSpec((1, size), lambda i, j: (0, j))
        own = pl.BlockSpec((step, embed), lambda i, j: (i, 0))
        return pl.pallas_call(
            body,
            grid=(-(-vocab // step), padded.shape[0] // size),
            in_specs=[pl.BlockSpec((size, embed), lambda i, j: (j, 0)), own, *[per_token] * 4],
            out_specs=own,
            out_shape=result_like(head, head.shape, head.dtype),
            scratch_shapes=[pltpu.VMEM((step, embed), jnp.float32)],
            compiler_params=_params(blocks),
            interpret=interpret_tpu(),
            cost_estimate=cost(
                4 * padded.shape[0] * vocab * embed,
                2 * bytes_of(head) + -(-vocab // step) * bytes_of(padded),
                padded.shape[0] * vocab,
            ),
            name="cross_entropy_d_head",
        )(
            padded,
            head,
            pad_to_multiple(local, 0, size, NO_TARGET)[None],
            *(pad_to_multiple(x, 0, size)[None] for x in slopes),
        )


def _blocks(hidden: Array) -> config.CrossEntropyTpuBlocks:
    blocks = config.tpu_blocks(target_device().kind, hidden.shape[1], hidden.dtype.itemsize)
    assert blocks is not None
    return blocks


def _params(blocks: config.CrossEntropyTpuBlocks) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=blocks.vmem_bytes,
    )


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
