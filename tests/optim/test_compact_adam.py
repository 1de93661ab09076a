"""CompAct's Adam: projected gradients, state of r rows, lifted updates, against numpy and the plain gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer
from jaxllm.optim.compact import input_dims, projected_gradients
from jaxllm.train import RunConfig, TrainState
from jaxllm.train.combinations import check_combinations
from jaxllm.train.step.loss import value_and_grad
from tests import quick, tiny

CONSTANT = ScheduleConfig("constant", peak=0.01, warmup=0.0)
AXES = {
    "q": ("layers", "embed", "heads", "head_dim"),
    "o": ("layers", "heads", "head_dim", "embed"),
    "gain": ("layers", "embed"),
}
SHAPES = {"q": (2, 6, 2, 4), "o": (2, 2, 4, 6), "gain": (2, 6)}


def projection(layer: int, inner: int, kept: int, number: int) -> np.ndarray:
    """P by its definition: normal values of variance 1 / r, drawn for a width, a number and a layer."""
    key = jax.random.key(0)
    for part in (inner, number, layer):
        key = jax.random.fold_in(key, part)
    return np.asarray(jax.random.normal(key, (inner, kept), jnp.float32), np.float64) / np.sqrt(kept)


def test_inputs_are_told_by_logical_axes():
    assert input_dims(AXES["q"]) == (1,)
    assert input_dims(AXES["o"]) == (1, 2)
    for whole in (AXES["gain"], ("vocab", "vocab_embed"), ("layers", "experts", "expert_embed", "expert_mlp")):
        assert input_dims(whole) == ()


def test_updates_are_the_paper_s(rng, float64):
    """Algorithm 2 in numpy: moments of P^T G, which outlive a projection; the update is P times Adam's."""
    config = OptimConfig(CONSTANT, "compact", rank=3, refresh=2, weight_decay=0.0, clip_norm=None)
    transform = optimizer(config, 5, AXES)
    before = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    wide = {"q": (6, 8), "o": (8, 6)}
    grads = [{name: rng.normal(size=SHAPES[name]) for name in SHAPES} for _ in range(5)]
    params = jax.tree.map(jnp.asarray, before)
    state = transform.init(params)
    step = quick.jit(transform.update)
    want = {name: value.copy() for name, value in before.items()}
    kept: dict[Any, list[Any]] = {}
    for t, grad in enumerate(grads):
        given = dict(grad)
        for name, (c, o) in wide.items():
            ps = [projection(layer, c, 3, t // 2) for layer in range(2)]
            small = np.stack([p.T @ g.reshape(c, o) for p, g in zip(ps, grad[name], strict=True)])
            given[name] = small.reshape(2, 3, 2, 4) if name == "q" else small.reshape(2, 3, 1, 6)
            for layer, p in enumerate(ps):
                m, v = kept.setdefault((name, layer), [0.0, 0.0])
                m, v = 0.9 * m + 0.1 * small[layer], 0.95 * v + 0.05 * small[layer] ** 2
                kept[name, layer] = [m, v]
                adam = m / (1 - 0.9 ** (t + 1)) / (np.sqrt(v / (1 - 0.95 ** (t + 1))) + 1e-8)
                want[name][layer] -= 0.01 * 0.25 * (p @ adam).reshape(SHAPES[name][1:])
        updates, state = step(given, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for name in wide:
        np.testing.assert_allclose(params[name], want[name], rtol=1e-10, atol=1e-12)
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sum(leaf.size for leaf in arrays) == 2 * (2 * 3 * 8 + 2 * 3 * 6 + 12)


@pytest.mark.drawn(1)
def test_gradients_are_projections_of_the_whole_ones(float64):
    """Of every matrix of a block P^T G, computed by hand from the plain gradients; all others are equal."""
    config = tiny.decoder(layers=3, qk_norm="head", bias="all", tied=False, remat="elementwise")
    model = functional(config)
    params = jax.tree.map(jnp.asarray, quick.params(config))
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 4, 8, config.vocab_size, packed=True))
    opt_state = optimizer(OptimConfig(CONSTANT, "compact", rank=5, refresh=2), 9, model.logical_axes()).init(params)
    opt_state = jax.tree.map(lambda x: x + 4 if x.ndim == 0 else x, opt_state)  # the third projection
    state = TrainState(params, opt_state, jnp.int32(7), jax.random.key(0))
    plain = value_and_grad(model, accumulate=2)
    whole_sums, whole = quick.jit(plain)(params, batch)
    sums, grads = quick.jit(projected_gradients(model.logical_axes(), 5, 2)(plain))(state, batch)
    np.testing.assert_allclose(sums.loss, whole_sums.loss, rtol=1e-12)
    axes = dict(jax.tree.leaves_with_path(model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple)))
    wanted, projected = dict(jax.tree.leaves_with_path(whole)), 0
    for path, grad in jax.tree.leaves_with_path(grads):
        want = np.asarray(wanted[path])
        if dims := input_dims(axes[path]):
            c, projected = int(np.prod([want.shape[i] for i in dims])), projected + 1
            flat = want.reshape(3, c, -1)
            want = np.stack([projection(layer, c, 5, 2).T @ flat[layer] for layer in range(3)]).reshape(grad.shape)
        assert grad.shape == want.shape
        assert tiny.leaf_error(grad, want) < 1e-10, path
    assert projected == 7


def test_refusals():
    run = RunConfig(model=tiny.decoder(remat="compact:0.5"), optim=OptimConfig(kind="compact"))
    with pytest.raises(ConfigError, match="the optimizer keeps projections of the inputs of matmuls itself"):
        check_combinations(run, {})
    staged = dataclasses.replace(run, model=tiny.decoder())
    with pytest.raises(ConfigError, match="projects gradients where they are computed"):
        check_combinations(staged, {"stage": 2})
    with pytest.raises(ValueError, match='"compact" does not use moments'):
        OptimConfig(kind="compact", moments="8bit")
