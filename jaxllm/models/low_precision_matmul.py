"""Low-precision matmul (INT8, FP8, FP4) of activations and weights, forward and backward.

A layer's output, the gradient of its input and the gradient of its weight are three matmuls of the same three operands:
x and w, dy and w, x and dy. Each operand is divided by a scale that maps its largest absolute value (amax) to the
largest of the format, rounded, multiplied in 8 bits, accumulated in at least 32 bits, and scaled back. Granularities:

    per vector  one scale for all values that one sum runs over, per token and per channel (INT8: arXiv:2208.07339,
                arXiv:2304.13013)
    per tensor  FP8 e4m3, and e5m2 for gradients of outputs (arXiv:2209.05433); the scale comes from the tensor's own
                amax ("current scaling"), or from the amax history of the last steps ("delayed scaling", Transformer
                Engine), which is training state
    per block   one scale for ``MX_BLOCK`` values along the sum (MX, arXiv:2310.10537; DeepSeek-V3, arXiv:2412.19437
                section 3.3). XLA has no such matmul on all devices, so the dequantised values are multiplied in compute
                dtype: the rounding is that of the format, the speed is not.

"mxfp4" rounds the operands to 4 bits, with rotations and stochastic rounding (``jaxllm.models.mxfp4_matmul``).

Legend: T token dimensions, C contracted dimensions, O output dimensions, P matmuls of a block, H steps of history,
L layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, UInt32

import sharding
from jaxllm.models.attention_context import LayerIndex
from jaxllm.models.batch_seed import current_batch_seed
from jaxllm.models.mxfp4_matmul import mxfp4_matmul
from jaxllm.models.operand_specs import gradient_spec, spec_of, without_reduced
from jaxllm.models.params import at_least_f32, gathered
from sharding import LogicalAxes

MatmulPrecision = Literal["plain", "int8", "fp8_current", "fp8_delayed", "fp8_block", "mxfp4"]
MX_BLOCK = 32
"""Values that share a scale in ``fp8_block``, as in MX formats; fewer where a sum is shorter or does not divide."""
AMAX_HISTORY_LENGTH = 16
"""Steps of the amax history of ``fp8_delayed``."""
OPERANDS = 3
"""Operands of a matmul that have an amax history: x, w and dy."""

Axes = tuple[int, ...]


@dataclass(frozen=True)
class QuantisationScheme:
    """Quantisation of matmul operands.

    Attributes:
        kind: precision, see the module's docstring.
    """

    kind: MatmulPrecision

    @property
    def multiplies_8bit(self) -> bool:
        """Whether the matmul itself takes 8-bit operands (not so for "plain", "fp8_block" and "mxfp4")."""
        return self.kind in ("int8", "fp8_current", "fp8_delayed")

    def format(self, gradient: bool) -> Any:
        """Dtype that an operand is rounded to; ``gradient``: the operand is dy."""
        if self.kind == "int8":
            return jnp.int8
        return jnp.float8_e5m2 if gradient and self.kind != "fp8_block" else jnp.float8_e4m3fn

    def amax(self, x: Array, over: Axes) -> Array:
        """Largest absolute value of the values that share a scale; ``over``: the contracted dimensions of x."""
        axes = over if self.kind == "int8" else None
        return jnp.maximum(jnp.max(x, axis=axes, keepdims=True), -jnp.min(x, axis=axes, keepdims=True))

    def quantise(self, x: Array, over: Axes, gradient: bool, amax: Array | None = None) -> tuple[Array, Array]:
        """Quantised values and their scales; a scale array has x's rank, with sizes of x or 1.

        Args:
            over: contracted dimensions of x.
            gradient: whether x is dy.
            amax: largest absolute values by history (delayed scaling); None computes them from x.
        """
        wide = x.astype(at_least_f32(x.dtype))
        if self.kind == "fp8_block":
            return _dequantised_blocks(wide, over[-1], self.format(gradient)).astype(x.dtype), jnp.ones(
                (1,) * x.ndim, wide.dtype
            )
        form = self.format(gradient)
        most = 127 if form == jnp.int8 else float(jnp.finfo(form).max)
        found = self.amax(wide, over) if amax is None else amax.astype(wide.dtype)
        scale = jnp.where(found > 0, found, 1) / most
        scaled = jnp.clip(wide / scale, -most, most)
        return (jnp.round(scaled) if form == jnp.int8 else scaled).astype(form), scale


def _dequantised_blocks(x: Array, axis: int, form: Any) -> Array:
    """Values after quantisation with one power-of-two scale per block along ``axis``, dequantised again."""
    size = x.shape[axis]
    length = next(n for n in range(min(MX_BLOCK, size), 0, -1) if size % n == 0)
    parts = x.reshape(*x.shape[:axis], size // length, length, *x.shape[axis + 1 :])
    found = jnp.max(jnp.abs(parts), axis=axis + 1, keepdims=True)
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.where(found > 0, found, 1) / float(jnp.finfo(form).max))))
    return ((parts / scale).astype(form).astype(x.dtype) * scale).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def quantised_matmul(
    scheme: QuantisationScheme,
    contract: int,
    there: PartitionSpec | None,
    x: Array,
    w: Array,
    seen: Float[Array, "3 H"] | None,
) -> Array:
    """Low-precision matmul ``x[*T, *C] @ w[*C, *O] -> [*T, *O]`` in x's dtype; its two gradients are so too.

    Args:
        contract: number of contracted dimensions, C.
        there: ``out_sharding`` of the result, as ``jax.lax.dot_general`` takes it.
        seen: amax history of x, w and dy for "fp8_delayed". Its "gradient" holds the amax of this step in the first
            column and zeros in the others. None: current scaling.
    """
    return _forward(scheme, contract, there, x, w, seen)[0]


def _forward(
    scheme: QuantisationScheme, contract: int, there: PartitionSpec | None, x: Array, w: Array, seen: Array | None
) -> tuple[Array, Any]:
    x_over, w_over = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    (qx, sx), (qw, sw) = (
        scheme.quantise(plain, over, False, _history_amax(seen, i, plain))
        for i, (plain, over) in enumerate(((without_reduced(x), x_over), (without_reduced(w), w_over)))
    )
    tokens, out = tuple(range(x.ndim - contract)), tuple(range(contract, w.ndim))
    y = _times(_dot(qx, qw, x_over, w_over, there), _spread(sx, tokens, len(out)))
    y = _times(y, _spread(sw, out, len(tokens), after=False))
    # x is saved unquantised: several matmuls share it, and the backward pass quantises along other sums (INT8, blocks).
    return y.astype(x.dtype), (x, w, seen)


def _backward(
    scheme: QuantisationScheme, contract: int, there: PartitionSpec | None, kept: Any, dy: Array
) -> tuple[Any, ...]:
    x, w, seen = kept
    tokens, x_in = tuple(range(x.ndim - contract)), tuple(range(x.ndim - contract, x.ndim))
    w_in, w_out = tuple(range(contract)), tuple(range(contract, w.ndim))
    dy_out = tuple(range(len(tokens), dy.ndim))
    plain = [without_reduced(value) for value in (x, w, dy)]
    amax = [_history_amax(seen, i, value) for i, value in enumerate(plain)]

    def quantised(i: int, over: Axes) -> tuple[Array, Array]:
        return scheme.quantise(plain[i], over, i == 2, amax[i])

    (qdy, sdy), (qw, sw) = quantised(2, dy_out), quantised(1, w_out)
    dx = _times(_dot(qdy, qw, dy_out, w_out, gradient_spec(spec_of(x))), _spread(sdy, tokens, contract))
    dx = _times(dx, _spread(sw, w_in, len(tokens), after=False))
    (qdy, sdy), (qx, sx) = quantised(2, tokens), quantised(0, tokens)
    dw = _times(_dot(qx, qdy, tokens, tokens, gradient_spec(spec_of(w))), _spread(sx, x_in, len(dy_out)))
    dw = _times(dw, _spread(sdy, dy_out, contract, after=False))
    if seen is None:
        return dx.astype(x.dtype), dw.astype(w.dtype), None
    now = jnp.stack([jnp.max(jnp.abs(value)).astype(seen.dtype) for value in plain])
    return dx.astype(x.dtype), dw.astype(w.dtype), jnp.zeros_like(seen).at[:, 0].set(now)


quantised_matmul.defvjp(_forward, _backward)


def _history_amax(seen: Array | None, operand: int, x: Array) -> Array | None:
    """Largest absolute value in the history of one operand; that of x itself while the history is empty."""
    if seen is None:
        return None
    before = jnp.max(seen[operand])
    return jnp.where(before > 0, before, jnp.max(jnp.abs(x)).astype(seen.dtype)).reshape((1,) * x.ndim)


def _dot(a: Array, b: Array, a_over: Axes, b_over: Axes, there: PartitionSpec | None) -> Array:
    sums = jnp.int32 if a.dtype == jnp.int8 else jnp.float32 if a.dtype.itemsize == 1 else at_least_f32(a.dtype)
    y = jax.lax.dot_general(a, b, ((a_over, b_over), ((), ())), preferred_element_type=sums, out_sharding=there)
    return y.astype(jnp.float32) if sums == jnp.int32 else y


def _spread(scale: Array, own: Axes, others: int, after: bool = True) -> Array:
    """Scales of dimensions ``own`` reshaped to broadcast: ``others`` dimensions of size 1 after (or before) them."""
    ones, kept = (1,) * others, tuple(scale.shape[i] for i in own)
    return scale.reshape(*kept, *ones) if after else scale.reshape(*ones, *kept)


def _times(y: Array, scale: Array) -> Array:
    """``y * scale``; where y is partial sums over devices, each device scales its own."""
    spec = spec_of(y)
    if spec is not None and spec.unreduced:
        scale = jax.sharding.reshard(scale, jax.P(*spec_of(scale).partitions, reduced=spec.unreduced))  # type: ignore[union-attr]
    return y * scale.astype(y.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "seen", "key"], meta_fields=["kind"])
@dataclass(frozen=True)
class LowPrecisionWeight:
    """Weight whose matmuls run in low precision, forward and backward; a ``jaxllm.models.linear.Weight``.

    Attributes:
        weight: the dense weight.
        kind: precision of its matmuls.
        seen: its amax history of "fp8_delayed" in training, [*layers, 3, H]; None: current scaling.
        key: data of the RNG key by which "mxfp4" rounds its gradients; None where there are none.
    """

    weight: Array
    kind: MatmulPrecision
    seen: Float[Array, "*layers 3 H"] | None = None
    key: UInt32[Array, " K"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.weight.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> LowPrecisionWeight:
        """The weight in compute dtype, all-gathered over its storage axes."""
        return replace(self, weight=gathered(self.weight, dtype, axes, unreduced_grad))

    def dense(self, dtype: jnp.dtype) -> Array:
        """The weight as it is stored, before any rounding of operands."""
        return self.weight

    def project(self, x: Array, out: LogicalAxes, contract: int) -> Array:
        """Low-precision matmul, see ``quantised_matmul`` and ``mxfp4_matmul``."""

        def multiply(x: Array, w: Array, contract: int, there: PartitionSpec | None) -> Array:
            if self.kind == "mxfp4":
                return mxfp4_matmul(contract, there, x, w, self.key)
            return quantised_matmul(QuantisationScheme(self.kind), contract, there, x, w, self.seen)

        return sharding.project(x, self.weight, out, contract=contract, multiply=multiply)

    def grouped_matmul(self, rows: Array, sizes: Array) -> Array:
        """Refuses: grouped matmuls of experts have no low-precision form."""
        raise NotImplementedError(f'matmul_precision = "{self.kind}" has no matmul of experts; choose "plain".')


def rounding_key(layer: LayerIndex, matmul: int) -> UInt32[Array, " K"] | None:
    """Data of the RNG key of a matmul's stochastic rounding in this batch; None where the batch is not known.

    Args:
        layer: index of its layer.
        matmul: index of it in the layer, below 256.
    """
    seed = current_batch_seed()
    if seed is None:
        return None
    return jax.random.key_data(jax.random.fold_in(jax.random.key(seed), layer * 256 + matmul))


def init_amax_history(matmuls: int, repeats: int) -> Float[Array, "L P 3 H"]:
    """Empty amax history of "fp8_delayed" for a block that comes ``repeats`` times, with so many matmuls."""
    return jnp.zeros((repeats, matmuls, OPERANDS, AMAX_HISTORY_LENGTH))


def update_amax_history(seen: Float[Array, "..."], now: Float[Array, "..."]) -> Float[Array, "..."]:
    """Amax history after a step whose "gradient" of it is ``now``; the oldest step is dropped."""
    return jnp.concatenate([now[..., :1], seen[..., :-1]], axis=-1)
