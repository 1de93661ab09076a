"""Matmul with ternary codes on NVIDIA GPUs: a Pallas kernel through Triton that decodes as it multiplies.

A program has one row and ``OUTPUTS`` outputs of its expert, each of which goes from codeword to codeword at its own
pace. A codeword's run is looked up in the dictionary, which fits the second-level cache, and the row's numbers are read
where a value is not 0: of the row at random, from the first-level cache.

Legend: M rows, K inputs, E experts, N outputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels._compat import is_interpreting, result_like
from pallas_kernels._pallas import bytes_of, check_supported, cost, round_up, stated
from pallas_kernels.ternary_matmul.codewords import LONGEST, TernaryCode, length_of, pairs_of, place_of, values_at

OUTPUTS = 32
"""Outputs of a program: a warp's threads."""
MAX_ELEMENTS = 2**31
"""Offsets in an array are 32-bit integers."""


def ternary_matmul_pallas_gpu(
    x: Float[Array, "M K"], code: TernaryCode, scales: Float[Array, "E N"], experts: Int32[Array, " M"]
) -> Float[Array, "M N"]:
    """Matmul with ternary codes on GPUs; see ``ternary_matmul``.

    Raises:
        NotImplementedError: an array has ``MAX_ELEMENTS`` or more elements, or see
            ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_gpu", x=x)
    (m, k), (count, n) = x.shape, scales.shape
    if max(x.size, code.words.size, scales.size, m * n) >= MAX_ELEMENTS:
        raise NotImplementedError(
            f"pallas_gpu takes fewer than 2^31 elements: x {[m, k]}, codewords {list(code.words.shape)}."
        )
    pairs = pairs_of(k)

    def body(x: Any, words: Any, runs: Any, scales: Any, experts: Any, out: Any) -> None:
        row, left = pl.program_id(0), pl.program_id(1) * OUTPUTS
        outputs = left + jnp.arange(OUTPUTS, dtype=jnp.int32)
        expert = experts[row]
        own = (outputs < n) & (expert < count)
        expert = jnp.minimum(expert, count - 1)
        load = lambda array, place, mask: plgpu.load(array.at[place], mask=mask, other=0)  # noqa: E731

        def unfinished(state: tuple[Array, Array, Array]) -> Array:
            return jnp.max(jnp.where(own & (state[1] < pairs), 1, 0)) > 0

        def more(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            at, place, acc = state
            here = own & (place < pairs)
            word = load(words, (expert, at), here).astype(jnp.int32)
            low, high = (load(runs, (half, word), here) for half in (0, 1))
            length = jnp.where(here, length_of(high), 0)
            for i in range(LONGEST):
                for j, value in enumerate(values_at(low, high, i)):
                    number = load(x, (row, 2 * (place + i) + j), (i < length) & (value != 0))
                    acc += number.astype(jnp.float32) * value.astype(jnp.float32)
            return at + 1, place + length, acc

        zeros = jnp.zeros((OUTPUTS,), jnp.int32)
        low, high = (load(words, (expert, 2 * outputs + i), own) for i in (0, 1))
        start = place_of(low, high, n), zeros, zeros.astype(jnp.float32)
        acc = jax.lax.while_loop(unfinished, more, start)[2] * load(scales, (expert, outputs), own)
        plgpu.store(out.at[row, pl.ds(left, OUTPUTS)], acc.astype(out.dtype), mask=outputs < n)

    made = result_like(x, (m, n), x.dtype)
    read = min(1, m / count) * bytes_of(code.words, scales)  # of the experts that rows have, at most
    estimate = cost(2 * m * k * n, bytes_of(x, code.runs, made) + read)
    wide = round_up(n, OUTPUTS)
    whole = lambda *shape: pl.BlockSpec(shape, lambda *_: (0,) * len(shape))  # noqa: E731
    call = pl.pallas_call(
        body,
        grid=(m, wide // OUTPUTS),
        in_specs=[whole(m, 2 * pairs), *(whole(*a.shape) for a in code), whole(count, n), whole(m)],
        out_specs=whole(m, wide),
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=is_interpreting(),
        cost_estimate=estimate,
        metadata=stated(estimate),
        name="ternary_matmul",
    )
    return call(jnp.pad(x, ((0, 0), (0, k % 2))), *code, scales.astype(jnp.float32), experts)
