"""Fused mixture of experts on TPUs: one Pallas kernel through Mosaic for few tokens.

All tokens and the sums of their experts stay in VMEM while the matrices of one expert after the other pass, a part of
the expert's width at a time. Prefetched scalars are the experts that any token chose; the steps after those ask for the
last block again, which is not fetched twice, and compute nothing.

Legend: T tokens, A experts per token, E experts, D embed, F width of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import result_like
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, interpret_tpu
from pallas_kernels.fused_moe import config
from pallas_kernels.fused_moe.reference import fused_moe_reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def fused_moe_pallas_tpu(
    x: Float[Array, "T D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    activation: Callable[[Array], Array],
) -> Float[Array, "T D"]:
    """Fused mixture of experts on TPUs; see ``fused_moe``.

    Raises:
        NotImplementedError: see ``config.refusal`` and ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_tpu", x=x, gate=gate, up=up, down=down)
    (t, d), (count, _, f), item = x.shape, gate.shape, x.dtype.itemsize
    if why := config.refusal(t, d, f, item):
        raise NotImplementedError(why)
    part = config.part_of_width(d, f, item)
    parts = f // part
    chosen = jnp.zeros(count, jnp.int32).at[experts.reshape(-1)].set(1, mode="drop")
    visits = jnp.argsort(1 - chosen, stable=True).astype(jnp.int32)
    last = jnp.maximum(jnp.sum(chosen) - 1, 0)
    visits = visits[jnp.minimum(jnp.arange(count), last)]

    def whole(*_: Any) -> tuple[int, int]:
        return 0, 0

    def part_at(i: Any, j: Any, number: Any) -> Any:
        return jnp.where(i < number[0], j, parts - 1)

    def inwards(i: Any, j: Any, visits: Any, number: Any) -> tuple[Any, ...]:
        return visits[i], 0, part_at(i, j, number)

    def outwards(i: Any, j: Any, visits: Any, number: Any) -> tuple[Any, ...]:
        return visits[i], part_at(i, j, number), 0

    def body(
        visits: Any, number: Any, experts: Any, weights: Any, x: Any, gate: Any, up: Any, down: Any, out: Any, acc: Any
    ) -> None:
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when((i == 0) & (j == 0))
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        @pl.when(i < number[0])
        def _() -> None:
            own = experts[...] == visits[i]
            scale = jnp.sum(jnp.where(own, weights[...], 0.0), axis=1, keepdims=True)
            inner = activation(dot(x[...], gate[...], (1, 0))) * dot(x[...], up[...], (1, 0))
            acc[...] += dot((inner * scale).astype(x.dtype), down[...], (1, 0))

        @pl.when((i == count - 1) & (j == parts - 1))
        def _() -> None:
            out[...] = acc[...].astype(out.dtype)

    call = pl.pallas_call(
        body,
        out_shape=result_like(x, (t, d), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(count, parts),
            in_specs=[
                pl.BlockSpec(experts.shape, whole),
                pl.BlockSpec(weights.shape, whole),
                pl.BlockSpec((t, d), whole),
                pl.BlockSpec((None, d, part), inwards),
                pl.BlockSpec((None, d, part), inwards),
                pl.BlockSpec((None, part, d), outwards),
            ],
            out_specs=pl.BlockSpec((t, d), whole),
            scratch_shapes=[pltpu.VMEM((t, d), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=config.VMEM_BYTES
        ),
        interpret=interpret_tpu(),
        # The most: as many experts as tokens choose.
        cost_estimate=cost(
            6 * t * d * f * min(count, experts.size),
            bytes_of(x, gate, up, down) * min(count, experts.size) / count + t * d * item,
            t * f * min(count, experts.size),
        ),
        name="fused_moe",
    )
    scalars = visits, jnp.sum(chosen, keepdims=True, dtype=jnp.int32)
    return call(*scalars, experts.astype(jnp.int32), weights.astype(jnp.float32), x, gate, up, down)


def _forward(*args: Any) -> tuple[Array, tuple[Array, ...]]:
    return fused_moe_pallas_tpu(*args), args[:6]


def _backward(activation: Callable[[Array], Array], saved: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
    x, gate, up, down, experts, weights = saved

    def run(x: Array, gate: Array, up: Array, down: Array, weights: Array) -> Array:
        return fused_moe_reference(x, gate, up, down, experts, weights, activation)

    *grads, d_weights = jax.vjp(run, x, gate, up, down, weights)[1](d_out)
    return *grads, None, d_weights


fused_moe_pallas_tpu.defvjp(_forward, _backward)
