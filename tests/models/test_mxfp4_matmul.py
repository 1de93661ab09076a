"""MXFP4 matmul: its forward rounding against numpy and ml_dtypes bit for bit, and its gradients' mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sharding
from jaxllm.models import functional, mxfp4_matmul
from jaxllm.models.batch_seed import with_batch_seed
from jaxllm.models.fp4_arithmetic import block_length, hadamard, rotate_blocks
from jaxllm.models.low_precision_matmul import LowPrecisionWeight, rounding_key
from jaxllm.train import value_and_grad
from tests import quick, tiny

ALARM = 6.5
"""Standard errors beyond which a mean is called biased: of 1,000 normal means, one is beyond them in 1e-7 of trials."""


def reference(x: np.ndarray, axis: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Values in MXFP4 after a block Hadamard rotation, as 4-bit and 8-bit numbers of ml_dtypes; and the trust mask."""
    moved = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    turned = (moved.reshape(-1, length) @ hadamard(length)).astype(np.float32) * np.float32(length**-0.5)
    wanted = np.log2(turned.astype(np.float64).std(axis=1, keepdims=True) * 2.92247856 / 6)
    assert np.all(np.abs(wanted - np.floor(wanted) - 0.5) > 1e-5), "the nearest power of two is not in doubt"
    scale = (2.0 ** np.round(wanted)).astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    values = np.clip(turned / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    back = lambda v: np.moveaxis(v.reshape(moved.shape), -1, axis)  # noqa: E731
    return back(values), back(np.abs(turned / scale) <= 6)


def whole_numbers(rng: np.random.Generator, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """Whole numbers times powers of two, with outliers: sums of 32 of them are exact in float32 in any order."""
    found = rng.integers(-(2**11), 2**11, shape) * np.where(rng.random(shape) < 0.02, 16, 1)
    ranges = list(shape)
    ranges[axis] = 1
    return np.asarray(found * 2.0 ** rng.integers(-9, 5, ranges), np.float32)


@pytest.mark.parametrize(("shape", "axis"), [((6, 96), 1), ((64, 7), 0), ((3, 2, 40), 2), ((5, 6, 3), 1)])
def test_the_forward_rounding_is_the_references_bit_for_bit(shape, axis, rng):
    x, length = whole_numbers(rng, shape, axis), block_length(shape[axis])
    values, trusted = jax.jit(mxfp4_matmul.project_to_mxfp4, static_argnums=(1, 2))(x, axis, length)
    want, mask = reference(x, axis, length)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint32), want.view(np.uint32))
    np.testing.assert_array_equal(trusted, mask)
    assert length == {96: 32, 64: 32, 40: 8, 6: 2}[shape[axis]]


def test_the_rotation_is_its_own_inverse_and_keeps_matmuls(rng):
    x, w = rng.normal(size=(3, 64)), rng.normal(size=(64, 5))
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    signs = jnp.asarray(rng.choice([-1.0, 1.0], 32), jnp.float32)
    np.testing.assert_allclose(rotate_blocks(rotate_blocks(x, 1, 32), 1, 32), x, atol=2e-6)
    both = rotate_blocks(x, 1, 32, signs) @ rotate_blocks(w, 0, 32, signs)
    np.testing.assert_allclose(both, x @ w, atol=2e-5)


def expected(x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the matmul of rounded operands, straight through the rounding where the mask trusts it."""
    (qx, mx), (qw, mw) = reference(x, 1, 32), reference(w, 0, 32)
    h = np.kron(np.eye(x.shape[1] // 32), hadamard(32)) / 32**0.5
    return ((dy @ qw.T) * mx) @ h, h @ ((qx.T @ dy) * mw)


def drawn(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of both operands in many draws, which are the first dimension."""

    def one(key: Any, x: Any, w: Any, dy: Any) -> Any:
        return jax.vjp(lambda x, w: mxfp4_matmul.mxfp4_matmul(1, None, x, w, jax.random.key_data(key)), x, w)[1](dy)

    keys = jax.random.split(jax.random.key(seed), draws)
    dx, dw = quick.jit(jax.vmap(one, (0, None, None, None)))(keys, x, w, dy)
    return np.asarray(dx, np.float64), np.asarray(dw, np.float64)


def standard_errors(samples: np.ndarray, mean: Any) -> float:
    """How far the means over draws are from the right ones: the largest over elements."""
    spread = samples.std(axis=0, ddof=1) / len(samples) ** 0.5 + 1e-9
    return float(np.max(np.abs(samples.mean(axis=0) - mean) / spread))


def deviations(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draws: int = 256, seed: int = 0) -> tuple[float, float]:
    """How far the mean gradients of many draws are from the expected ones, in standard errors.

    Returns:
        the largest over elements, and that of the length along the expected gradient.
    """
    found = np.concatenate([g.reshape(draws, -1) for g in drawn(x, w, dy, draws, seed)], axis=1)
    want = np.concatenate([g.ravel() for g in expected(x, w, dy)])
    return standard_errors(found, want), standard_errors(found @ want / (want @ want), 1.0)


def operands(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Activations and weights of whole numbers, and gradients of very different sizes; 32 rows, for a whole block."""
    x, w = whole_numbers(rng, (32, 32), 1) / 2048, whole_numbers(rng, (32, 32), 0) / 2048
    return x, w, np.asarray(rng.normal(size=(32, 32)) * np.exp(rng.normal(size=(32, 1))), np.float32)


def nearest(x: Any, bits: Any) -> Any:
    """Biased rounding in place of the stochastic one."""
    return jnp.sign(x) * mxfp4_matmul.round_to_e2m1(jnp.minimum(jnp.abs(x), 6.0))


def test_gradients_are_unbiased(rng):
    """``tests.proofs.policies.fp4`` holds that biased ones are beyond the alarm."""
    assert max(deviations(*operands(rng))) < ALARM


@pytest.mark.parametrize("of", ["activations", "weights"])
def test_the_two_roundings_of_a_matmul_are_independent(of, rng):
    """Where the gradient is the other operand, errors that went together would add up in the sums of squares, which
    are the diagonal of the result before it is rotated back.
    """
    x, w, _ = operands(rng)
    h = hadamard(32) / 32**0.5
    if of == "activations":
        dy, which, traces = reference(w, 0, 32)[0], 0, lambda dx: np.trace(dx @ h, axis1=-2, axis2=-1)
    else:
        dy, which, traces = reference(x, 1, 32)[0], 1, lambda dw: np.trace(h @ dw, axis1=-2, axis2=-1)
    assert standard_errors(traces(drawn(x, w, dy, 256, 0)[which]), traces(expected(x, w, dy)[which])) < ALARM


@pytest.mark.drawn(3)
def test_the_same_on_a_mesh(rng):
    """Weights sharded over both axes, sums over devices of gradients included: the same random numbers everywhere."""
    x, up, down = (np.asarray(rng.normal(size=shape), np.float32) for shape in ((4, 64, 64), (64, 128), (128, 64)))

    def loss(x: Any, up: Any, down: Any) -> Any:
        key = jax.random.key_data(jax.random.key(3))
        up, down = (
            LowPrecisionWeight(w, "mxfp4", key=key).gather(w.dtype, axes, True)
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
    # Sums in another order may round a value to its neighbour, which is a third or half of it away.
    assert tiny.leaf_error(got, want) < 2e-2


@pytest.mark.drawn(0.3)
def test_a_step_draws_from_its_batch_and_the_backward_pass_needs_one():
    config = dataclasses.replace(tiny.decoder(dtype="float32", layers=1), matmul_precision="mxfp4")
    model, params = functional(config), quick.params(config, scale=0.1)
    batches = [jax.tree.map(jnp.asarray, tiny.batch(seed, 2, 32, config.vocab_size, packed=False)) for seed in (0, 1)]
    loss, grads = quick.jit(value_and_grad(model))(params, batches[0])
    assert jax.tree.all(jax.tree.map(lambda g: np.isfinite(g).all(), (loss, grads)))
    keys = []
    for batch in batches:
        with with_batch_seed(batch.tokens):
            keys += [np.asarray(rounding_key(jnp.int32(layer), m)) for layer in (0, 1) for m in (0, 1)]
    assert len({tuple(key) for key in keys}) == 8
    assert rounding_key(jnp.int32(0), 0) is None
    pull = jax.vjp(lambda x: mxfp4_matmul.mxfp4_matmul(1, None, x, jnp.ones((4, 2)), None), jnp.ones((3, 4)))[1]
    with pytest.raises(ValueError, match="gradients are rounded stochastically, seeded by the tokens"):
        pull(jnp.ones((3, 2)))
