"""Reference matmul with ternary codes: decodes one matrix after another; defines the operation.

Legend: M rows, K inputs, E experts, W numbers of a matrix, N outputs, V codewords of the dictionary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt16, UInt32

from pallas_kernels.ternary_matmul.codewords import LONGEST, TernaryCode, length_of, pairs_of, place_of, values_at


def decoded(words: UInt16[Array, " W"], runs: UInt32[Array, "2 V"], outputs: int, inputs: int) -> Int32[Array, "N K"]:
    """Values of one matrix: its outputs go from codeword to codeword side by side, each at its own pace."""
    pairs, rows = pairs_of(inputs), jnp.arange(outputs)

    def more(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at, place, out = state
        low, high = runs[:, words[at]]
        for i in range(LONGEST):
            for j, value in enumerate(values_at(low, high, i)):
                column = jnp.where(i < length_of(high), 2 * (place + i) + j, inputs)
                out = out.at[rows, column].set(value, mode="drop")
        return at + 1, place + length_of(high), out

    first = place_of(words[2 * rows], words[2 * rows + 1], outputs)
    start = (first, jnp.zeros_like(first), jnp.zeros((outputs, inputs), jnp.int32))
    return jax.lax.while_loop(lambda state: jnp.any(state[1] < pairs), more, start)[2]


def ternary_matmul_reference(
    x: Float[Array, "M K"], code: TernaryCode, scales: Float[Array, "E N"], experts: Int32[Array, " M"]
) -> Float[Array, "M N"]:
    """Reference matmul with ternary codes; see ``ternary_matmul``."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def more(e: Array, out: Array) -> Array:
        matrix = decoded(code.words[e], code.runs, scales.shape[1], x.shape[1]).astype(wide)
        y = jnp.matmul(x.astype(wide), matrix.T, precision="highest") * scales[e].astype(wide)
        return jnp.where((experts == e)[:, None], y, out)

    out = jnp.zeros((x.shape[0], scales.shape[1]), wide)
    return jax.lax.fori_loop(0, scales.shape[0], more, out).astype(x.dtype)
