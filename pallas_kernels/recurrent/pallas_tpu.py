"""Head-wise recurrent network on TPUs: Pallas kernels through Mosaic, forward and backward.

The grid is heads x blocks of rows x chunks of tokens; the chunks of a block of rows follow each other, and the states
stay in VMEM between them. The recurrent matrices of a head stay in VMEM for all of its rows and tokens. Arrays have the
sequence and the gates as leading dimensions, so that a token's gate is a tile of [rows, H]. Neither the last chunk nor
the last block of rows is padded: the loop ends at the last token, and rows do not meet each other.

Legend: B batch, S sequence, N heads, G gates, H head dim, I the same as H: inputs of a recurrent matrix, E gradients of
a token's gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import result_like
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, interpret_tpu
from pallas_kernels.recurrent.cells import CELLS
from pallas_kernels.recurrent.config import RecurrentTpuBlocks, tpu_blocks
from pallas_kernels.recurrent.recurrent_loops import States, StatesBefore, StepGrads, two_loops

VMEM_LIMIT = 64 * 2**20
"""VMEM limit that the compiler is given, above what blocks may take: it needs some for itself."""


def recurrent_pallas_tpu(
    cell: str,
    x: Float[Array, "B S N G H"],
    recurrent: Float[Array, "N G I H"],
    bias: Float[Array, "N G H"],
    resets: Bool[Array, "B S"],
    initial: States,
) -> tuple[Float[Array, "B S N H"], States]:
    """Recurrent network on TPUs; see ``pallas_kernels.recurrent.recurrent``.

    Raises:
        NotImplementedError: the matrices of a head do not fit into VMEM beside the smallest block, or see
            ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_tpu", x=x, recurrent=recurrent, bias=bias)
    b, s, _, _, h = x.shape
    return two_loops(TpuLoop(tpu_blocks(cell, b, s, h, x.dtype.itemsize)), cell, x, recurrent, bias, resets, initial)


@dataclass(frozen=True)
class TpuLoop:
    """Loops of a recurrent network by TPU kernels.

    Attributes:
        blocks: rows and tokens of a block.
    """

    blocks: RecurrentTpuBlocks

    def forward(
        self, cell: str, x: Array, recurrent: Array, bias: Array, resets: Array, initial: States, *, save: bool
    ) -> tuple[Array, States, StatesBefore]:
        """Hidden states, last states, and the states before each token."""
        (b, s, n, gates, h), count = x.shape, len(initial)
        rows, chunk = self.blocks.rows, self.blocks.tokens

        def body(x: Any, recurrent: Any, bias: Any, keep: Any, *refs: Any) -> None:
            first, out, last = refs[:count], refs[count], refs[count + 1 : 2 * count + 1]
            before, held = refs[2 * count + 1 : -count], refs[-count:]
            part = pl.program_id(2)

            @pl.when(part == 0)
            def _() -> None:
                for ref, one in zip(held, first, strict=True):
                    ref[...] = one[...]

            def step(t: Any, _: Any) -> None:
                states = tuple(jnp.where(keep[t] > 0, ref[...], 0.0) for ref in held)
                for ref, one in zip(before, states, strict=save):
                    ref[t] = one
                a = _terms(states[0], recurrent, bias)
                after = CELLS[cell].forward(_inputs(x, t), a, states)
                for ref, one in zip(held, after, strict=True):
                    ref[...] = one
                out[t] = after[0].astype(out.dtype)

            jax.lax.fori_loop(0, jnp.minimum(chunk, s - part * chunk), step, None)

            @pl.when(part == pl.num_programs(2) - 1)
            def _() -> None:
                for ref, one in zip(last, held, strict=True):
                    ref[...] = one[...]

        state = result_like(x, (n, b, h), jnp.float32)
        saved = result_like(x, (n, s, b, h), jnp.float32)
        made = (result_like(x, (n, s, b, h), x.dtype), *[state] * count, *[saved] * (count if save else 0))
        tokens = pl.BlockSpec((None, chunk, rows, h), lambda i, j, k: (i, k, j, 0))
        whole = pl.BlockSpec((None, rows, h), lambda i, j, k: (i, j, 0))
        operands = _operands(x, recurrent, bias, resets)
        out, *rest = pl.pallas_call(
            body,
            out_shape=made,
            grid=(n, pl.cdiv(b, rows), pl.cdiv(s, chunk)),
            in_specs=[*_specs(self.blocks, gates, h, lambda k: k), *[whole] * count],
            out_specs=[tokens, *[whole] * count, *[tokens] * (count if save else 0)],
            scratch_shapes=[pltpu.VMEM((rows, h), jnp.float32)] * count,
            compiler_params=_params(),
            interpret=interpret_tpu(),
            cost_estimate=cost(
                2 * b * s * n * gates * h * h, bytes_of(*operands, *initial, *made), b * s * n * (gates + 1) * h
            ),
            name="recurrent_forward",
        )(*operands, *(jnp.moveaxis(one, 1, 0) for one in initial))
        last, before = rest[:count], rest[count:]
        return (
            jnp.transpose(out, (2, 1, 0, 3)),
            tuple(jnp.moveaxis(one, 0, 1) for one in last),
            tuple(jnp.transpose(one, (2, 1, 0, 3)) for one in before),
        )

    def backward(
        self,
        cell: str,
        x: Array,
        recurrent: Array,
        bias: Array,
        resets: Array,
        before: StatesBefore,
        d_out: Array,
        d_last: States,
    ) -> StepGrads:
        """Gradients of one pass over the tokens in reverse."""
        (b, s, n, gates, h), kind = x.shape, CELLS[cell]
        rows, chunk = self.blocks.rows, self.blocks.tokens
        count, carried, chunks, apart = len(before), kind.grads, pl.cdiv(s, chunk), cell == "gru"

        def body(x: Any, recurrent: Any, bias: Any, keep: Any, d_out: Any, *refs: Any) -> None:
            before, last = refs[:count], refs[count : count + carried]
            d_x, first, held = refs[count + carried], refs[count + carried + 1 : -carried], refs[-carried:]
            part = chunks - 1 - pl.program_id(2)

            @pl.when(pl.program_id(2) == 0)
            def _() -> None:
                for ref, one in zip(held, last, strict=True):
                    ref[...] = one[...]

            size = jnp.minimum(chunk, s - part * chunk)

            def step(i: Any, _: Any) -> None:
                t = size - 1 - i
                states = tuple(one[t] for one in before)
                grads = (held[0][...] + d_out[t].astype(jnp.float32), *(ref[...] for ref in held[1:]))
                d_gates, d_terms, d_states = kind.backward(
                    _inputs(x, t), _terms(states[0], recurrent, bias), states, grads
                )
                rounded: list[Array] = [one.astype(d_x.dtype) for one in d_terms]
                made: list[Array] = [*d_gates, *(rounded[-1:] if apart else [])]
                d_h = sum(dot(one, recurrent[g], (1, 1)) for g, one in enumerate(rounded))
                for ref, one in zip(held, (d_states[0] + d_h, *d_states[1:]), strict=True):
                    ref[...] = jnp.where(keep[t] > 0, one, 0.0)
                for g, one in enumerate(made):
                    d_x[t, g] = one.astype(d_x.dtype)

            jax.lax.fori_loop(0, size, step, None)

            @pl.when(part == 0)
            def _() -> None:
                for ref, one in zip(first, held, strict=True):
                    ref[...] = one[...]

        wide = gates + apart
        state = result_like(x, (n, b, h), jnp.float32)
        made = (result_like(x, (n, s, wide, b, h), x.dtype), *[state] * carried)

        def back(k: Any) -> Any:
            return chunks - 1 - k

        tokens = pl.BlockSpec((None, chunk, rows, h), lambda i, j, k: (i, back(k), j, 0))
        whole = pl.BlockSpec((None, rows, h), lambda i, j, k: (i, j, 0))
        operands = _operands(x, recurrent, bias, resets)
        more = [jnp.transpose(one, (2, 1, 0, 3)) for one in (d_out, *before)]
        d_x, *first = pl.pallas_call(
            body,
            out_shape=made,
            grid=(n, pl.cdiv(b, rows), chunks),
            in_specs=[
                *_specs(self.blocks, gates, h, back),
                *[tokens] * (1 + count),
                *[whole] * carried,
            ],
            out_specs=[
                pl.BlockSpec((None, chunk, wide, rows, h), lambda i, j, k: (i, back(k), 0, j, 0)),
                *[whole] * carried,
            ],
            scratch_shapes=[pltpu.VMEM((rows, h), jnp.float32)] * carried,
            compiler_params=_params(),
            interpret=interpret_tpu(),
            cost_estimate=cost(
                4 * b * s * n * gates * h * h, bytes_of(*operands, *more, *made), b * s * n * (gates + 1) * h
            ),
            name="recurrent_backward",
        )(*operands, *more, *(jnp.moveaxis(one.astype(jnp.float32), 1, 0) for one in d_last[:carried]))
        d_x = jnp.transpose(d_x, (3, 1, 0, 2, 4))
        inputs = d_x[..., :gates, :]
        terms = jnp.concatenate([d_x[..., : gates - 1, :], d_x[..., gates:, :]], axis=3) if apart else None
        return StepGrads(inputs, terms, tuple(jnp.moveaxis(one, 0, 1) for one in first))


def _operands(x: Array, recurrent: Array, bias: Array, resets: Array) -> tuple[Array, ...]:
    """Gate inputs [N S G B H], matrices [N G I H], biases [N G 1 H], and 1.0 where a token keeps its states [S B 1]."""
    keep = (~resets).astype(jnp.float32).T[..., None]
    return jnp.transpose(x, (2, 1, 3, 0, 4)), recurrent, bias[:, :, None], keep


def _specs(blocks: RecurrentTpuBlocks, gates: int, h: int, part: Any) -> list[pl.BlockSpec]:
    """Blocks of ``_operands``; ``part`` is the chunk of a step of the grid."""
    rows, chunk = blocks.rows, blocks.tokens
    return [
        pl.BlockSpec((None, chunk, gates, rows, h), lambda i, j, k: (i, part(k), 0, j, 0)),
        pl.BlockSpec((None, gates, h, h), lambda i, j, k: (i, 0, 0, 0)),
        pl.BlockSpec((None, gates, 1, h), lambda i, j, k: (i, 0, 0, 0)),
        pl.BlockSpec((chunk, rows, 1), lambda i, j, k: (part(k), j, 0)),
    ]


def _params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT)


def _inputs(x: Any, t: Any) -> tuple[Array, ...]:
    return tuple(x[t, g].astype(jnp.float32) for g in range(x.shape[1]))


def _terms(h: Array, recurrent: Any, bias: Any) -> tuple[Array, ...]:
    """Recurrent terms of each gate of a block of rows."""
    rounded = h.astype(recurrent.dtype)
    return tuple(dot(rounded, recurrent[g], (1, 0)) + bias[g].astype(jnp.float32) for g in range(recurrent.shape[0]))
