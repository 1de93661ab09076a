"""Compressed activations: exact except for weight gradients, which are unbiased; and what is saved."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import MLAConfig, functional
from jaxllm.models.batch_seed import batch_seed
from jaxllm.models.compact_matmul import compact_matmul
from jaxllm.train import RunConfig, value_and_grad
from jaxllm.train.combinations import check_combinations
from jaxllm.train.model_flops import hardware_flops_per_token, train_flops_per_token
from tests import quick, tiny
from tests.models.jaxprs import equations

# No two widths alike: stream, heads together, kv heads together, feed-forward layer.
CONFIG = tiny.decoder(
    dtype="float32", embed_dim=16, heads=2, kv_heads=1, head_dim=10, mlp=24, vocab_size=30, layers=3, remat="none"
)


def arrays(draws: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=shape)) for shape in ((6, 12), (12, 5), (6, 5)))
    return x, w, dy, jnp.arange(2 * draws, dtype=jnp.uint32).reshape(draws, 2)


@pytest.mark.drawn(1)
def test_the_input_s_gradient_is_exact_and_the_weight_s_is_right_on_average():
    """Over independent projections the mean is off by what its standard error allows, and not by a fifth of that."""
    draws = 4000
    x, w, dy, keys = arrays(draws)

    def pulled(key: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: compact_matmul(0.25, 1, None, None, x, w, key), x, w)
        return y, *pull(dy)

    y, dx, dw = jax.jit(jax.vmap(pulled))(keys)
    np.testing.assert_allclose(y[0], x @ w, rtol=1e-5)
    np.testing.assert_allclose(dx[7], dy @ w.T, rtol=1e-5)
    want = np.asarray(x.T @ dy)
    error, deviation = np.asarray(dw).mean(0) - want, np.asarray(dw).std(0) / math.sqrt(draws)
    score = np.sqrt(np.mean((error / deviation) ** 2))
    assert 0.2 < score < 1.6
    # Of r = 3 of 12 numbers: the trace of the covariance, from the fourth moments of normal numbers.
    spread = np.asarray(dw).var(0).sum()
    assert spread == pytest.approx((12 + 1) / 3 * np.sum(want**2), rel=0.1)


@functools.cache
def kept(remat: str) -> list[tuple[int, ...]]:
    """Shapes of the float residuals that the forward loop over layers passes to the backward one, per layer."""
    model = functional(dataclasses.replace(CONFIG, remat=remat))
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 5, CONFIG.vocab_size, packed=False))
    program = jax.jit(value_and_grad(model)).trace(model.abstract(), batch).jaxpr
    forward = next(e for e in equations(program) if e.primitive.name == "scan" and e.params["length"] == 3)
    body = forward.params["jaxpr"].out_avals
    stacked = [v.aval for v, one in zip(forward.outvars, body, strict=True) if v.aval.shape == (3, *one.shape)]
    return [aval.shape[1:] for aval in stacked if jnp.issubdtype(aval.dtype, jnp.floating)]


def test_projections_are_kept_in_the_inputs_stead():
    """With 2 x 5 tokens: 4 numbers for 16 in five matmuls, 5 for 20 in one, 6 for 24 in one."""
    plain, small = kept("none"), kept("compact:0.25")
    new = [shape for shape in small if shape[-1] in (4, 5, 6) and math.prod(shape) // shape[-1] == 10]
    assert sorted(shape[-1] for shape in new) == [4, 4, 4, 4, 4, 5, 6]
    count = lambda shapes, width: sum(math.prod(s) == 10 * width for s in shapes)  # noqa: E731
    assert count(plain, 24) - count(small, 24) == 1
    assert count(plain, 16) - count(small, 16) >= 2


def test_its_products_are_counted():
    config = dataclasses.replace(CONFIG, remat="compact:0.25")
    more = hardware_flops_per_token(config, 8) - train_flops_per_token(config, 8)
    assert more == 3 * 4 * (5 * 16 * 4 + 20 * 5 + 24 * 6)


def test_every_batch_has_a_projection_of_its_own():
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 50, (4, 8)), jnp.int32)
    swapped = tokens.at[0, 0].set(tokens[0, 1]).at[0, 1].set(tokens[0, 0])
    seeds = {int(batch_seed(x)) for x in (tokens, swapped, tokens.at[2, 3].add(1))}
    assert len(seeds) == 3


@pytest.mark.drawn(3)
def test_the_loss_and_what_is_no_product_s_weight_are_as_without():
    config = dataclasses.replace(CONFIG, layers=1)
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 8, CONFIG.vocab_size, packed=True))
    params = jax.tree.map(jnp.asarray, quick.params(config))

    def result(remat: str) -> Any:
        return quick.jit(value_and_grad(functional(dataclasses.replace(config, remat=remat))))(params, batch)

    (sums, grads), (want, wanted) = result("compact:0.5"), result("none")
    assert float(sums.loss) == pytest.approx(float(want.loss), rel=1e-6)
    flat, others = (dict(jax.tree_util.tree_leaves_with_path(g)) for g in (grads, wanted))
    for path, grad in flat.items():
        name = jax.tree_util.keystr(path)
        exact = not any(part in name for part in ("'q'", "'k'", "'v'", "'o'", "'gate'", "'up'", "'down'"))
        assert (tiny.leaf_error(grad, others[path]) < 1e-5) == exact, name


@pytest.mark.parametrize("share", ["0", "1", "x", "-1"])
def test_shares_are_checked(share):
    with pytest.raises(ValueError, match=r'with the share of elements to keep \("compact:0.25"\)'):
        dataclasses.replace(CONFIG, remat=f"compact:{share}")


def test_a_share_is_asked_for():
    with pytest.raises(ValueError, match="with the share of elements to keep"):
        dataclasses.replace(CONFIG, remat="compact")


def test_latent_attention_is_refused():
    (block,) = CONFIG.pattern
    latent = dataclasses.replace(block, attention=MLAConfig())
    config = dataclasses.replace(CONFIG, pattern=(latent,), remat="compact:0.5")
    with pytest.raises(ConfigError, match="between latents and heads have no compact form"):
        check_combinations(RunConfig(model=config), {})
