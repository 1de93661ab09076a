"""Cells of recurrent networks: one step of LSTM, GRU and sLSTM, forward and backward, for every implementation.

The arrays of a step are of one shape, such as [B, N, H] or, inside a kernel, [block of B, H]. A cell reads gate inputs
``x`` and recurrent terms ``a = R h + b``, one array per gate each.

Sources: LSTM and GRU as in FlashRNN (arXiv:2412.07752); sLSTM of xLSTM (arXiv:2405.04517) with its stabiliser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

Arrays = tuple[Array, ...]


class Cell(NamedTuple):
    """Cell of a recurrent network.

    Attributes:
        gates: names of the gate inputs, in order.
        states: names of the states, in order; the first is the hidden state.
        grads: number of states, the first ones, that carry a gradient: the stabiliser of sLSTM does not change results.
        forward: (gate inputs, recurrent terms, states before) -> states after.
        backward: (gate inputs, recurrent terms, states before, gradients of the first ``grads`` states after) ->
            (gradients of the gate inputs, of the recurrent terms, and of the states before, without what the hidden
            state before receives through the recurrent terms).
    """

    gates: tuple[str, ...]
    states: tuple[str, ...]
    grads: int
    forward: Callable[[Arrays, Arrays, Arrays], Arrays]
    backward: Callable[[Arrays, Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]]


def _lstm_gates(x: Arrays, a: Arrays) -> Arrays:
    i, f, z, o = (one + rec for one, rec in zip(x, a, strict=True))
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(z), jax.nn.sigmoid(o)


def _lstm(x: Arrays, a: Arrays, states: Arrays) -> Arrays:
    i, f, z, o = _lstm_gates(x, a)
    c = f * states[1] + i * z
    return o * jnp.tanh(c), c


def _lstm_backward(x: Arrays, a: Arrays, states: Arrays, grads: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    i, f, z, o = _lstm_gates(x, a)
    dh, dc = grads
    t = jnp.tanh(f * states[1] + i * z)
    dc = dc + dh * o * (1 - t * t)
    d = dc * z * i * (1 - i), dc * states[1] * f * (1 - f), dc * i * (1 - z * z), dh * t * o * (1 - o)
    return d, d, (jnp.zeros_like(dh), dc * f)


def _gru_gates(x: Arrays, a: Arrays) -> Arrays:
    r, z = jax.nn.sigmoid(x[0] + a[0]), jax.nn.sigmoid(x[1] + a[1])
    return r, z, jnp.tanh(x[2] + r * a[2])


def _gru(x: Arrays, a: Arrays, states: Arrays) -> Arrays:
    _, z, n = _gru_gates(x, a)
    return (n + z * (states[0] - n),)


def _gru_backward(x: Arrays, a: Arrays, states: Arrays, grads: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    r, z, n = _gru_gates(x, a)
    (dh,) = grads
    dn = dh * (1 - z) * (1 - n * n)
    dr, dz = dn * a[2] * r * (1 - r), dh * (states[0] - n) * z * (1 - z)
    return (dr, dz, dn), (dr, dz, dn * r), (dh * z,)


def _slstm_parts(x: Arrays, a: Arrays, states: Arrays) -> Arrays:
    """Scaled input and forget gates, the cell input, the output gate, the sigmoid of the forget gate; c, n and m."""
    i, f, z, o = (one + rec for one, rec in zip(x, a, strict=True))
    _, c, n, m = states
    kept = jnp.minimum(f, 0) - jnp.log(1 + jnp.exp(-jnp.abs(f))) + m  # log-sigmoid, plus the stabiliser before
    first = n == 0
    top = jnp.where(first, i, jnp.maximum(kept, i))
    i = jnp.exp(i - top)
    # Without a state before, its stabiliser says nothing and its exponential may be infinite.
    forget = jnp.where(first, 0, jnp.exp(jnp.where(first, 0, kept - top)))
    z = jnp.tanh(z)
    return i, forget, z, jax.nn.sigmoid(o), jax.nn.sigmoid(f), forget * c + i * z, forget * n + i, top


def _slstm(x: Arrays, a: Arrays, states: Arrays) -> Arrays:
    _, _, _, o, _, c, n, m = _slstm_parts(x, a, states)
    return o * c / n, c, n, m


def _slstm_backward(x: Arrays, a: Arrays, states: Arrays, grads: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    i, forget, z, o, open_, c, n, _ = _slstm_parts(x, a, states)
    dh, dc, dn = grads
    ratio = c / n
    dc, dn = dc + dh * o / n, dn - dh * o * ratio / n
    df = (dc * states[1] + dn * states[2]) * forget * (1 - open_)
    d = (dc * z + dn) * i, df, dc * i * (1 - z * z), dh * ratio * o * (1 - o)
    return d, d, (jnp.zeros_like(dh), dc * forget, dn * forget)


CELLS: dict[str, Cell] = {
    "lstm": Cell(("i", "f", "z", "o"), ("h", "c"), 2, _lstm, _lstm_backward),
    "gru": Cell(("r", "z", "n"), ("h",), 1, _gru, _gru_backward),
    "slstm": Cell(("i", "f", "z", "o"), ("h", "c", "n", "m"), 3, _slstm, _slstm_backward),
}
"""Cells by name."""
