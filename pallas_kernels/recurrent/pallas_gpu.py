"""Head-wise recurrent network on NVIDIA GPUs: Pallas kernels through Triton, forward and backward.

A program has one head and a block of rows, and goes through all tokens. It loads the recurrent matrices of its head
before the loop and keeps them, as FlashRNN (arXiv:2412.07752) does. Arrays are not padded: loads mask the rows beyond
the last.

Legend: B batch, S sequence, N heads, G gates, H head dim, I the same as H: inputs of a recurrent matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import is_interpreting, result_like
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, round_up, stated
from pallas_kernels.recurrent.cells import CELLS
from pallas_kernels.recurrent.recurrent_loops import States, StatesBefore, StepGrads, two_loops

ROWS = 16
"""Rows of a program: the fewest that a matmul instruction takes."""
LEAST_DIM = 16
"""Smallest head dim: matmul instructions take at least so many."""
MATRIX_BYTES = 2**17
"""Most bytes of a head's matrices: they stay on chip, in the 227 KiB of shared memory of an H100's program."""
MAX_ELEMENTS = 2**31
"""Offsets in an array are 32-bit integers."""


def recurrent_pallas_gpu(
    cell: str,
    x: Float[Array, "B S N G H"],
    recurrent: Float[Array, "N G I H"],
    bias: Float[Array, "N G H"],
    resets: Bool[Array, "B S"],
    initial: States,
) -> tuple[Float[Array, "B S N H"], States]:
    """Recurrent network on GPUs; see ``pallas_kernels.recurrent.recurrent``.

    Raises:
        NotImplementedError: the head dim is no power of two of at least ``LEAST_DIM``, a head's matrices have more than
            ``MATRIX_BYTES``, the gate inputs have ``MAX_ELEMENTS`` or more elements, or see
            ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_gpu", x=x, recurrent=recurrent, bias=bias)
    h = x.shape[-1]
    if h < LEAST_DIM or h & (h - 1) or recurrent.nbytes // recurrent.shape[0] > MATRIX_BYTES:
        raise NotImplementedError(
            f"pallas_gpu takes head dims of 16, 32, 64, ..., and {MATRIX_BYTES >> 10} KiB of recurrent matrices of a "
            f"head at most, not {h} with {recurrent.nbytes // recurrent.shape[0] / 2**10:.0f} KiB in {recurrent.dtype}."
        )
    if x.size // x.shape[3] * (x.shape[3] + 1) >= MAX_ELEMENTS:
        raise NotImplementedError(f"pallas_gpu takes gate inputs of fewer than 2^31 elements, not {list(x.shape)}.")
    return two_loops(TritonLoop(), cell, x, recurrent, bias, resets, initial)


@dataclass(frozen=True)
class TritonLoop:
    """Loops of a recurrent network by Triton kernels."""

    def forward(
        self, cell: str, x: Array, recurrent: Array, bias: Array, resets: Array, initial: States, *, save: bool
    ) -> tuple[Array, States, StatesBefore]:
        """Hidden states, last states, and the states before each token."""
        (b, s, n, gates, h), count = x.shape, len(initial)

        def body(x: Any, recurrent: Any, bias: Any, resets: Any, *refs: Any) -> None:
            first, out, last, before = (
                refs[:count], refs[count], refs[count + 1 : 2 * count + 1], refs[2 * count + 1 :]
            )  # fmt: skip
            head, rows, some, mask = _place(b, h)
            matrices, biases = _held(recurrent, bias, head, gates)

            def step(t: Any, states: States) -> States:
                states = _kept(resets, rows, t, some, states)
                for ref, one in zip(before, states, strict=False):
                    plgpu.store(ref.at[rows, t, head, :], one, mask=mask)
                after = CELLS[cell].forward(_inputs(x, rows, t, head, gates, mask), _terms(states[0], matrices, biases),
                                            states)  # fmt: skip
                plgpu.store(out.at[rows, t, head, :], after[0].astype(out.dtype), mask=mask)
                return after

            states = tuple(plgpu.load(ref.at[rows, head, :], mask=mask, other=0.0) for ref in first)
            states = jax.lax.fori_loop(jnp.int32(0), jnp.int32(s), step, states)
            for ref, one in zip(last, states, strict=True):
                plgpu.store(ref.at[rows, head, :], one, mask=mask)

        state, saved = result_like(x, (b, n, h), jnp.float32), result_like(x, (b, s, n, h), jnp.float32)
        made = [result_like(x, (b, s, n, h), x.dtype), *[state] * count, *[saved] * (count if save else 0)]
        estimate = cost(2 * x.size * h, bytes_of(x, recurrent, *made), x.size)
        out, *rest = _call(body, (x, recurrent, bias, resets, *initial), made, estimate, "recurrent_forward", (b, n))
        return out, tuple(rest[:count]), tuple(rest[count:])

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
        (b, s, n, gates, h), kind, apart = x.shape, CELLS[cell], int(cell == "gru")
        count, carried = len(before), kind.grads

        def body(x: Any, recurrent: Any, bias: Any, resets: Any, d_out: Any, *refs: Any) -> None:
            before, last = refs[:count], refs[count : count + carried]
            d_x, first = refs[count + carried], refs[count + carried + 1 :]
            head, rows, some, mask = _place(b, h)
            matrices, biases = _held(recurrent, bias, head, gates)

            def step(i: Any, grads: States) -> States:
                t = s - 1 - i
                states = tuple(plgpu.load(ref.at[rows, t, head, :], mask=mask, other=0.0) for ref in before)
                d_h = plgpu.load(d_out.at[rows, t, head, :], mask=mask, other=0.0).astype(jnp.float32)
                d_gates, d_terms, d_states = kind.backward(
                    _inputs(x, rows, t, head, gates, mask),
                    _terms(states[0], matrices, biases),
                    states,
                    (grads[0] + d_h, *grads[1:]),
                )
                rounded: list[Array] = [one.astype(d_x.dtype) for one in d_terms]
                made: list[Array] = [*d_gates, *(rounded[-1:] if apart else [])]
                # Read again, from the cache: there is no room on chip for the transposed ones too.
                back = sum(
                    dot(one, plgpu.load(recurrent.at[head, jnp.int32(g)]), (1, 1)) for g, one in enumerate(rounded)
                )
                for g, one in enumerate(made):
                    plgpu.store(d_x.at[rows, t, head, jnp.int32(g), :], one.astype(d_x.dtype), mask=mask)
                return _kept(resets, rows, t, some, (d_states[0] + back, *d_states[1:]))

            grads = tuple(plgpu.load(ref.at[rows, head, :], mask=mask, other=0.0) for ref in last)
            grads = jax.lax.fori_loop(jnp.int32(0), jnp.int32(s), step, grads)
            for ref, one in zip(first, grads, strict=True):
                plgpu.store(ref.at[rows, head, :], one, mask=mask)

        state = result_like(x, (b, n, h), jnp.float32)
        made = [result_like(x, (b, s, n, gates + apart, h), x.dtype), *[state] * carried]
        operands = (x, recurrent, bias, resets, d_out, *before, *(one.astype(jnp.float32) for one in d_last[:carried]))
        estimate = cost(4 * x.size * h, bytes_of(*operands, *made), x.size)
        d_x, *first = _call(body, operands, made, estimate, "recurrent_backward", (b, n))
        terms = jnp.concatenate([d_x[..., : gates - 1, :], d_x[..., gates:, :]], axis=3) if apart else None
        return StepGrads(d_x[..., :gates, :], terms, tuple(first))


def _place(b: int, h: int) -> tuple[Any, Any, Array, Array]:
    """Head and rows of a program, and which of the rows there are; the latter also for each element of a head."""
    start = pl.program_id(1) * ROWS
    some = start + jnp.arange(ROWS, dtype=jnp.int32) < b
    return pl.program_id(0), pl.ds(start, ROWS), some, jnp.broadcast_to(some[:, None], (ROWS, h))


def _held(recurrent: Any, bias: Any, head: Any, gates: int) -> tuple[list[Array], list[Array]]:
    """Matrices and biases of a head, loaded once."""
    return (
        [plgpu.load(recurrent.at[head, jnp.int32(g)]) for g in range(gates)],
        [plgpu.load(bias.at[head, jnp.int32(g)]).astype(jnp.float32) for g in range(gates)],
    )


def _inputs(x: Any, rows: Any, t: Any, head: Any, gates: int, mask: Array) -> tuple[Array, ...]:
    return tuple(
        plgpu.load(x.at[rows, t, head, jnp.int32(g), :], mask=mask, other=0.0).astype(jnp.float32) for g in range(gates)
    )


def _terms(h: Array, matrices: list[Array], biases: list[Array]) -> tuple[Array, ...]:
    """Recurrent terms of each gate of a block of rows."""
    rounded = h.astype(matrices[0].dtype)
    return tuple(dot(rounded, matrix, (1, 0)) + bias[None] for matrix, bias in zip(matrices, biases, strict=True))


def _kept(resets: Any, rows: Any, t: Any, some: Array, arrays: States) -> States:
    """Arrays of a token's rows, zero where the token's states before are."""
    reset = plgpu.load(resets.at[rows, t], mask=some, other=0)
    return tuple(jnp.where(reset[:, None] != 0, 0.0, one) for one in arrays)


def _call(
    body: Any, operands: tuple[Array, ...], made: list[Any], estimate: pl.CostEstimate, name: str, size: tuple[int, int]
) -> tuple[Array, ...]:
    b, n = size
    x, recurrent, bias, resets, *rest = operands

    def rows_of(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((round_up(b, ROWS), *shape[1:]), lambda *_: (0,) * len(shape))

    def whole(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    call = pl.pallas_call(
        body,
        grid=(n, pl.cdiv(b, ROWS)),
        in_specs=[
            rows_of(x.shape),
            whole(recurrent.shape),
            whole(bias.shape),
            *(rows_of(one.shape) for one in (resets, *rest)),
        ],
        out_specs=[rows_of(one.shape) for one in made],
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=is_interpreting(),
        cost_estimate=estimate,
        metadata=stated(estimate),
        name=name,
    )
    return tuple(call(x, recurrent, bias, resets.astype(jnp.int32), *rest))
