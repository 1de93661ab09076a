"""Cross-entropy of a linear head on TPUs, through Pallas and Mosaic.

Four products, and no logits in memory. The forward pass is attention with the head as keys and as values: where a
gradient will be asked for, it also adds up the softmax's average of the head's rows, which is all that the gradient of
hidden needs of the vocabulary. The backward pass computes the logits once more for the gradient of the head.

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
from pallas_kernels._pallas import bytes_of, check, cost, dot, interpret_tpu, round_up
from pallas_kernels.cross_entropy import blockwise, config
from pallas_kernels.cross_entropy.blockwise import LOWEST, NOWHERE, Options, Part, Slopes, cap


def cross_entropy_pallas_tpu(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    *,
    z_loss: float,
    softcap: float | None,
    vocab_axis: str | None,
    chunk: int | None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """See ``linear_cross_entropy``: (loss, sum of nll, sum of squared lse).

    Raises:
        NotImplementedError: ``chunk`` is given, D is too large for the device's fast memory, not traced for a TPU and
            not interpreted, or see ``pallas_kernels._pallas.check``.
    """
    check("pallas_tpu", hidden=hidden, head=head)
    if chunk is not None:
        raise NotImplementedError(f"pallas_tpu holds no tokens' logits; chunk = {chunk}.")
    if config.tpu_blocks(target_device().kind, hidden.shape[1], hidden.dtype.itemsize) is None:
        raise NotImplementedError(
            f"pallas_tpu: 128 rows of {hidden.shape[1]} columns of {hidden.dtype} (hidden {list(hidden.shape)}) do not "
            f"fit into the fast memory of {target_device().kind}."
        )
    return blockwise.sums(_Kernels(), Options(z_loss, softcap, vocab_axis), hidden, head, targets, weights)


class _Kernels(NamedTuple):
    """The TPU's part of ``blockwise.sums``."""

    def forward(
        self, options: Options, hidden: Array, head: Array, local: Array, gradients: bool
    ) -> tuple[Part, tuple[Array, Part] | None]:
        blocks = _blocks(hidden)
        tokens, (vocab, embed) = hidden.shape[0], head.shape
        size, step = min(blocks.tokens, round_up(tokens, 128)), min(blocks.vocab, round_up(vocab, 128))
        padded = _pad(hidden, size)
        rows = padded.shape[0]

        def body(hidden: Any, head: Any, local: Any, top: Any, total: Any, target: Any, *average: Any) -> None:
            j = pl.program_id(1)

            @pl.when(j == 0)
            def _() -> None:
                top[...] = jnp.full_like(top, LOWEST)
                for ref in (total, target, *average):
                    ref[...] = jnp.zeros_like(ref)

            matrix = head[...]
            if vocab % step:  # the last block reads beyond the end, whatever is there
                matrix = jnp.where(j * step + _iota((step, 1), 0) < vocab, matrix, 0)
            logits, slope = cap(dot(hidden[...], matrix, (1, 1)), options.softcap)
            column = j * step + _iota(logits.shape, 1)
            if vocab % step:
                logits = jnp.where(column < vocab, logits, LOWEST)
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
        )(padded, head, _pad(local, size, NOWHERE)[:, None])
        part = Part(*(x[:tokens, 0] for x in (top, total, target)))
        return part, (average[0][:tokens], part) if gradients else None

    def backward(
        self, options: Options, hidden: Array, head: Array, local: Array, slopes: Slopes, saved: tuple[Array, Part]
    ) -> tuple[Array, Array]:
        average, part = saved
        scale = slopes.softmax * jnp.exp(part.top - slopes.lse)
        slope = 1.0 if options.softcap is None else 1.0 - (part.target / options.softcap) ** 2
        hit = jnp.where(local == NOWHERE, 0.0, slopes.target * slope)
        rows = jnp.take(head, jnp.maximum(local, 0), axis=0).astype(jnp.float32)
        d_hidden = scale[:, None] * average - hit[:, None] * rows
        return d_hidden.astype(hidden.dtype), self._d_head(options, hidden, head, local, slopes)

    def _d_head(self, options: Options, hidden: Array, head: Array, local: Array, slopes: Slopes) -> Array:
        blocks = _blocks(hidden)
        vocab, embed = head.shape
        size, step = min(blocks.tokens_back, round_up(len(hidden), 128)), min(blocks.vocab_back, round_up(vocab, 128))
        padded = _pad(hidden, size)

        def body(
            hidden: Any, head: Any, local: Any, lse: Any, softmax: Any, target: Any, d_head: Any, acc: Any
        ) -> None:
            i, j = pl.program_id(0), pl.program_id(1)

            @pl.when(j == 0)
            def _() -> None:
                acc[...] = jnp.zeros_like(acc)

            # What a row beyond the vocabulary's end gives is not written.
            logits, slope = cap(dot(head[...], hidden[...], (1, 1)), options.softcap)
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
        )(padded, head, _pad(local, size, NOWHERE)[None], *(_pad(x, size)[None] for x in slopes))


def _blocks(hidden: Array) -> config.TpuBlocks:
    blocks = config.tpu_blocks(target_device().kind, hidden.shape[1], hidden.dtype.itemsize)
    assert blocks is not None
    return blocks


def _params(blocks: config.TpuBlocks) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=blocks.vmem_bytes,
    )


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _pad(x: Array, multiple: int, value: int = 0) -> Array:
    """Whole blocks of tokens."""
    missing = -x.shape[0] % multiple
    widths = [(0, missing), *((0, 0) for _ in x.shape[1:])]
    return jnp.pad(x, widths, constant_values=value) if missing else x
