"""Compute dtypes: float64 end to end, bfloat16 matmuls around float32 islands."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import BlockConfig, DecoderConfig, MLAConfig, MlpConfig, Segments, functional
from jaxllm.train import loss_sums, value_and_grad
from tests import quick, tiny
from tests.models.jaxprs import dtypes, equations

CONFIG = tiny.decoder(vocab_size=32, qk_norm="head", bias="qkv", tied=False, remat="full")


def gradients(config: Any, accumulate: int = 1) -> Any:
    """Traced loss and gradients of a packed batch of two rows."""
    model = functional(config)
    batch = tiny.batch(0, 2, 5, config.vocab_size, packed=True)
    run = jax.jit(value_and_grad(model, z_loss=1e-2, accumulate=accumulate))
    return run.trace(model.abstract(), batch)


def test_float64_is_float64_in_every_step(float64):
    for accumulate in (1, 2):
        traced = gradients(CONFIG, accumulate)
        narrow = [e for e in equations(traced.jaxpr) if dtypes(e) & {"float32", "bfloat16", "float16"}]
        assert not narrow, narrow[0]
        assert any("float64" in dtypes(e) for e in equations(traced.jaxpr))
        floats = jax.tree.leaves(traced.out_info)
        assert {str(leaf.dtype) for leaf in floats} == {"float64"}


@pytest.mark.drawn(1)
def test_float64_results_carry_float64_digits(float64):
    """A detour through float32 anywhere would show as an error of 1e-7 against the same function run differently."""
    batch = tiny.batch(1, 2, 4, 32, packed=False)
    params = quick.params(CONFIG)
    loss = quick.jit(lambda params, batch: loss_sums(functional(CONFIG), params, batch).loss)
    direction = quick.params(CONFIG, seed=1)
    h = 1e-5
    ends = [loss(jax.tree.map(lambda p, d, s=sign: p + s * h * d, params, direction), batch) for sign in (-1, 1)]
    _, grads = quick.jit(value_and_grad(functional(CONFIG)))(params, batch)
    count = (batch.targets >= 0).sum()
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), grads, direction))) * count
    # Central difference: truncation h^2, rounding 1e-16 / h; in float32 rounding alone would be 1e-2.
    assert abs((ends[1] - ends[0]) / (2 * h) - slope) < 1e-6 * abs(slope)


def test_bfloat16_multiplies_in_bfloat16_and_is_delicate_in_float32():
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="float32")
    model = functional(config)

    def forward(params: Any, tokens: Any) -> Any:
        hidden, _ = model.forward(params, tokens, tokens, Segments())
        return hidden, model.head(params, hidden)

    traced = jax.jit(forward).trace(model.abstract(), jnp.zeros((2, 4), jnp.int32))
    hidden, logits = traced.out_info
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    found: dict[str, set[str]] = {}
    for equation in equations(traced.jaxpr):
        kinds = {d for d in dtypes(equation) if "float" in d}
        found.setdefault(equation.primitive.name, set()).update(kinds)
    for island in ("exp", "rsqrt", "cos", "sin"):
        assert found[island] == {"float32"}, (island, found[island])
    assert "bfloat16" in found["dot_general"]
    weights = [
        e for e in equations(traced.jaxpr) if e.primitive.name == "dot_general" and "float32" in str(e.invars[1].aval)
    ]
    shapes = [e.invars[1].aval.shape for e in weights]
    assert not any(shape in {(16, 4, 8), (16, 2, 8), (16, 32), (32, 16)} for shape in shapes), (
        "weights multiply in bf16"
    )


def test_bfloat16_gradients_have_the_parameters_dtype():
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="float32")
    sums, grads = gradients(config).out_info
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {np.dtype("float32")}


def test_bfloat16_is_near_float32():
    """Arithmetic in bfloat16 is off by rounding only: a mistake in the casts would be off by the values."""
    single = dataclasses.replace(CONFIG, dtype="float32", param_dtype="float32", remat="none")
    params, batch = quick.params(single), tiny.batch(2, 2, 8, 32, packed=True)
    losses = []
    for dtype in ("float32", "bfloat16"):
        model = functional(dataclasses.replace(single, dtype=dtype))
        sums = quick.jit(lambda params, batch, m=model: loss_sums(m, params, batch))(params, batch)
        losses.append(float(sums.nll / sums.count))
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.03 * losses[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["dense", "mixture", "latent"])
def test_parameters_in_compute_dtype_change_no_bit(kind: str):
    """Those that are used in float32 keep it: without routers and gains, a forward pass of these would differ."""
    if kind == "latent":
        block = BlockConfig(MLAConfig(heads=2, latent=12, nope_dim=4, rope_dim=4, value_dim=4), MlpConfig(8))
        config = DecoderConfig(32, 8, 2, pattern=(block,))
    else:
        moe = (4, 2, 16, True) if kind == "mixture" else None
        config = tiny.decoder(vocab_size=32, qk_norm="head", bias="qkv", tied=False, moe=moe)
    config = dataclasses.replace(config, dtype="bfloat16", param_dtype="float32")
    model, tokens = functional(config), jnp.arange(12).reshape(2, 6) % config.vocab_size
    params = quick.params(config)
    params = jax.tree.map(lambda x: x + 0.01 * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) / x.size, params)

    @jax.jit
    def logits(params: Any) -> Any:
        return model.head(params, model.forward(params, tokens, jnp.arange(6)[None] + 0 * tokens, Segments())[0])

    served = model.in_compute_dtype(params)
    kinds = {str(x.dtype) for x in jax.tree.leaves(served)}
    assert kinds == {"float32", "bfloat16"}
    assert sum(x.nbytes for x in jax.tree.leaves(served)) < 0.55 * sum(x.nbytes for x in jax.tree.leaves(params))
    assert (logits(served) == logits(params)).all()
    all_of_them = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert (logits(all_of_them) != logits(params)).any()
