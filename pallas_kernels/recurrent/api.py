"""Head-wise recurrent networks (FlashRNN, arXiv:2412.07752), and their implementations.

Legend: B batch, S sequence, N heads, G gates, H head dim, I the same as H: inputs of a recurrent matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.recurrent.cells import CELLS
from pallas_kernels.recurrent.reference import recurrent_reference
from pallas_kernels.recurrent.xla import recurrent_xla


def _pallas_tpu(*args: Any) -> Any:
    from pallas_kernels.recurrent.pallas_tpu import recurrent_pallas_tpu

    return recurrent_pallas_tpu(*args)


def _pallas_gpu(*args: Any) -> Any:
    from pallas_kernels.recurrent.pallas_gpu import recurrent_pallas_gpu

    return recurrent_pallas_gpu(*args)


IMPLEMENTATIONS = {
    "pallas_tpu": _pallas_tpu,
    "pallas_gpu": _pallas_gpu,
    "xla": recurrent_xla,
    "reference": recurrent_reference,
}

CellName = Literal["lstm", "gru", "slstm"]


def recurrent(
    x: Float[Array, "B S N G H"],
    matrices: Float[Array, "N G I H"],
    bias: Float[Array, "N G H"] | None = None,
    *,
    cell: CellName,
    resets: Bool[Array, "B S"] | None = None,
    initial: Sequence[Float[Array, "B N H"]] | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B S N H"], tuple[Float[Array, "B N H"], ...]]:
    """Head-wise recurrent network: hidden states of every token, and the last states.

    Each token's gates are ``x + R h + b`` with the hidden state h of the token before, per head and gate. The gates are

    - LSTM: i, f, z, o: ``c = sigmoid(f) c + sigmoid(i) tanh(z)``, ``h = sigmoid(o) tanh(c)``;
    - GRU: r, z, n: ``n = tanh(x_n + sigmoid(r) (R_n h + b_n))``, ``h = (1 - sigmoid(z)) n + sigmoid(z) h``;
    - sLSTM: i, f, z, o: ``c = f' c + i' tanh(z)``, ``n = f' n + i'``, ``h = sigmoid(o) c / n`` with the stabiliser
      ``m = max(logsigmoid(f) + m, i)``, ``i' = exp(i - m)`` and ``f' = exp(logsigmoid(f) + m_before - m)``; without a
      state before (n is 0), m is i.

    Args:
        x: gate inputs.
        matrices: recurrent matrices R, from I to H.
        bias: recurrent biases b; None for none. Those of the gate inputs are in ``x``.
        cell: "lstm", "gru" or "slstm".
        resets: tokens whose states before are zero, such as the first of each document in a packed row; None for none.
        initial: states before the first token: h and c of LSTM, h of GRU, h, c, n and m of sLSTM; None for zeros.
        implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; see ``pallas_kernels._dispatch``.

    Returns:
        Hidden states in ``x.dtype``, and the states after the last token, in at least float32. The stabiliser m counts
        as a constant in gradients: with it c and n are scaled alike, and no hidden state depends on it.

    Raises:
        ValueError: there is no such cell, or the shapes do not match.
        NotImplementedError: the implementation does not support these arguments.
    """
    if cell not in CELLS:
        raise ValueError(f"recurrent: no cell {cell!r}; there are {', '.join(CELLS)}.")
    (b, s, n, gates, h), kind = x.shape, CELLS[cell]
    wanted = {
        "x": (b, s, n, len(kind.gates), h),
        "matrices": (n, gates, h, h),
        "bias": (n, gates, h),
        "resets": (b, s),
        **{f"initial {name}": (b, n, h) for name in kind.states},
    }
    given: dict[str, Any] = {"x": x, "matrices": matrices, "bias": bias, "resets": resets}
    if initial is not None:
        if len(initial) != len(kind.states):
            raise ValueError(f"recurrent: {len(initial)} initial states; a cell {cell!r} has {', '.join(kind.states)}.")
        given |= {f"initial {name}": one for name, one in zip(kind.states, initial, strict=True)}
    for name, array in given.items():
        if array is not None and array.shape != wanted[name]:
            raise ValueError(
                f"recurrent: {name} {list(array.shape)} does not go with x {list(x.shape)} and the gates "
                f"{', '.join(kind.gates)} of a cell {cell!r}: it is {list(wanted[name])}."
            )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    bias = jnp.zeros((n, gates, h), x.dtype) if bias is None else bias.astype(x.dtype)
    resets = jnp.zeros((b, s), bool) if resets is None else resets
    states = [jnp.zeros((b, n, h), wide)] * len(kind.states) if initial is None else initial
    axes = varying_axes(x, matrices, bias, resets, *states)
    x, matrices, bias, resets = (vary_over(one, axes) for one in (x, matrices.astype(x.dtype), bias, resets))
    states = tuple(vary_over(one.astype(wide), axes) for one in states)
    return dispatch("recurrent", IMPLEMENTATIONS, implementation, cell, x, matrices, bias, resets, states)
