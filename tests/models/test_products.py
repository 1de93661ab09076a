"""Low-precision matmuls against the same rounding in numpy, on one device and on a mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sharding
from jaxllm.config import ConfigError, from_dict
from jaxllm.models import DecoderConfig
from jaxllm.models.low_precision_matmul import (
    AMAX_HISTORY_LENGTH,
    MX_BLOCK,
    LowPrecisionWeight,
    QuantisationScheme,
    quantised_matmul,
    update_amax_history,
)
from jaxllm.train import RunConfig
from jaxllm.train.combinations import check_combinations
from tests import quick, tiny

KINDS = ["int8", "fp8_current", "fp8_delayed", "fp8_block"]
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(x: np.ndarray, kind: str, over: tuple[int, ...], gradient: bool) -> np.ndarray:
    """Dequantised values of the rounded numbers, in float64, for a matmul that sums over the dimensions ``over``."""
    x = np.asarray(x, np.float32)
    if kind == "int8":
        scale = np.abs(x).max(axis=over, keepdims=True) / np.float32(127)
        return (np.round(x / scale).astype(np.int8) * scale.astype(np.float64)).astype(np.float64)
    if kind == "fp8_block":
        axis, length = over[-1], min(MX_BLOCK, x.shape[over[-1]])
        out = np.empty(x.shape, np.float64)
        moved, written = np.moveaxis(x, axis, -1), np.moveaxis(out, axis, -1)
        for start in range(0, x.shape[axis], length):
            part = moved[..., start : start + length]
            largest = np.abs(part).max(axis=-1, keepdims=True)
            scale = 2.0 ** np.ceil(np.log2(largest / 448))
            written[..., start : start + length] = (part / scale).astype(E4M3).astype(np.float64) * scale
        return out
    form = E5M2 if gradient else E4M3
    scale = np.abs(x).max() / np.float32(ml_dtypes.finfo(form).max)
    return (x / scale).astype(form).astype(np.float64) * scale


def arrays(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """x and w that share the contracted dimension, and the gradient of their matmul: rows of very different sizes."""
    x, w = rng.normal(size=(2, 64, 2, 32)), rng.normal(size=(2, 32, 24))
    dy = rng.normal(size=(2, 64, 24)) * 1e-3
    return tuple(np.asarray(v * 10 ** rng.uniform(-1, 1, (*v.shape[:-1], 1)), np.float32) for v in (x, w, dy))


@pytest.mark.parametrize("kind", KINDS)
def test_all_three_products_are_of_rounded_factors(kind, rng):
    x, w, dy = arrays(rng)
    seen = jnp.zeros((3, AMAX_HISTORY_LENGTH)) if kind == "fp8_delayed" else None

    def run(x: Any, w: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: quantised_matmul(QuantisationScheme(kind), 2, None, x, w, seen), x, w)
        return y, *pull(dy)

    q = lambda v, over, gradient=False: rounded(v, kind, over, gradient)  # noqa: E731
    flat = lambda v: v.reshape(-1, *v.shape[2:])  # noqa: E731
    # Blocks lie along the last dimension that is summed over, of tokens within a row.
    wanted = (
        np.einsum("bsij,ijo->bso", q(x, (2, 3)), q(w, (0, 1))),
        np.einsum("bso,ijo->bsij", q(dy, (2,), True), q(w, (2,))),
        np.einsum("tij,to->ijo", flat(q(x, (0, 1))), flat(q(dy, (0, 1), True))),
    )
    for got, want in zip(quick.jit(run)(x, w, dy), wanted, strict=True):
        assert got.dtype == jnp.float32
        # Sums are of float32 in another order; rounding the factors changes them by thousands of times as much. A
        # factor that lies between two values to float32's last bit may be rounded either way, and changes a few sums.
        far = np.abs(got - want) > 2e-5 * np.linalg.norm(want) / math.sqrt(want.size)
        assert far.mean() < 0.05
        assert np.linalg.norm((got - want)[~far]) < 3e-6 * np.linalg.norm(want)
        assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want)
    assert np.linalg.norm(wanted[0] - np.einsum("bsij,ijo->bso", x, w)) > 3e-3 * np.linalg.norm(wanted[0])


def test_delayed_scales_are_of_the_steps_before(rng):
    x, w, dy = arrays(rng)
    largest = [2 * float(np.abs(v).max()) for v in (x, w, dy)]
    seen = jnp.zeros((3, AMAX_HISTORY_LENGTH)).at[:, 3].set(jnp.asarray(largest)).at[:, 5].set(1e-6)

    def run(x: Any, w: Any, seen: Any) -> Any:
        return quantised_matmul(QuantisationScheme("fp8_delayed"), 2, None, x, w, seen)

    y, pull = jax.vjp(run, jnp.asarray(x), jnp.asarray(w), seen)
    *_, now = pull(jnp.asarray(dy))
    scales = [np.float32(most / 448) for most in largest]
    factors = [(v / s).astype(E4M3).astype(np.float64) * s for v, s in zip((x, w), scales, strict=False)]
    want = np.einsum("bsij,ijo->bso", *factors)
    assert np.linalg.norm(y - want) < 3e-6 * np.linalg.norm(want)
    # What was seen now comes as the gradient, and goes first into the history.
    np.testing.assert_allclose(now[:, 0], [np.abs(v).max() for v in (x, w, dy)], rtol=1e-6)
    assert not np.any(now[:, 1:])
    after = update_amax_history(seen, now)
    assert np.array_equal(after[:, 0], now[:, 0])
    assert np.array_equal(after[:, 1:], seen[:, :-1])


def test_a_number_larger_than_any_before_is_cut_and_not_infinite():
    seen = jnp.zeros((3, AMAX_HISTORY_LENGTH)).at[:, 0].set(1.0)
    y = quantised_matmul(QuantisationScheme("fp8_delayed"), 1, None, jnp.full((1, 1), 100.0), jnp.ones((1, 1)), seen)
    assert float(y[0, 0]) == pytest.approx(1.0)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind):
    x, w = jnp.zeros((4, 8)), jnp.zeros((8, 2))
    y, pull = jax.vjp(lambda x, w: quantised_matmul(QuantisationScheme(kind), 1, None, x, w, None), x, w)
    assert all(np.array_equal(v, np.zeros(v.shape)) for v in (y, *pull(jnp.zeros((4, 2)))))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_on_a_mesh(kind, rng):
    """Two matmuls whose weights are sharded over both axes; amax values are those of the whole arrays."""
    x = np.asarray(rng.normal(size=(4, 8, 32)), np.float32)
    up, down = (np.asarray(rng.normal(size=shape), np.float32) for shape in ((32, 64), (64, 32)))

    def loss(x: Any, up: Any, down: Any) -> Any:
        up, down = (
            LowPrecisionWeight(w, kind).gather(w.dtype, axes, True)  # type: ignore[arg-type]
            for w, axes in ((up, ("embed", "mlp")), (down, ("mlp", "embed")))
        )
        inner = up.project(
            sharding.fan_out(x, "batch", "seq", "act_embed", over="act_mlp"), ("batch", "seq", "act_mlp"), 1
        )
        y = down.project(inner, ("batch", "residual_seq", "act_embed"), 1)
        return jnp.mean(y * y)

    run = quick.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    want = run(x, up, down)
    mesh = sharding.MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(v, jax.NamedSharding(mesh, sharding.DEFAULT.spec(axes, mesh, v.shape)))
            for v, axes in ((x, ("batch", "seq", None)), (up, ("embed", "mlp")), (down, ("mlp", "embed")))
        ]
        got = run(*placed)
    # A sum in another order may round an int8 to its neighbour; float8 products are sums of float32 alone.
    assert tiny.leaf_error(got, want) < (2e-3 if kind in ("int8", "fp8_block") else 1e-5)


def test_experts_and_rings_are_refused():
    moe = tiny.decoder(moe=(4, 2, 8, True))
    run = RunConfig(model=dataclasses.replace(moe, matmul_precision="int8"))
    with pytest.raises(ConfigError, match="experts have no low-precision form"):
        check_combinations(run, {})
    assert DecoderConfig(matmul_precision="int8").matmul_precision == "int8"


def test_the_deprecated_name_of_the_field_is_taken_with_a_warning():
    with pytest.warns(FutureWarning, match="DecoderConfig.products is now matmul_precision"):
        config = DecoderConfig(products="int8")  # type: ignore[call-arg]
    assert config == DecoderConfig(matmul_precision="int8")
    assert from_dict(DecoderConfig, {"products": "int8"}) == config
