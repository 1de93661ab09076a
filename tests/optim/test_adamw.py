"""AdamW against its definition in numpy; weight decay; clipping."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, decay_mask, optimizer, schedule
from tests import quick, tiny

AXES = {"w": ("layers", "embed", "mlp"), "gain": ("layers", "embed"), "bias": ("heads", "head_dim")}
SHAPES = {"w": (2, 3, 4), "gain": (2, 3), "bias": (2, 5)}


def numpy_adamw(config, params, grads, total):
    """Decoupled weight decay (arXiv:1711.05101, algorithm 2), after scaling all gradients to a global norm."""
    rate = schedule(config.schedule, total)
    m = {k: np.zeros_like(p) for k, p in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    params = {k: p.copy() for k, p in params.items()}
    for t, grad in enumerate(grads, 1):
        norm = math.sqrt(sum((g**2).sum() for g in grad.values()))
        scale = 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / norm)
        lr = float(rate(jnp.int32(t - 1)))
        for k in params:
            g = grad[k] * scale
            m[k] = config.b1 * m[k] + (1 - config.b1) * g
            v[k] = config.b2 * v[k] + (1 - config.b2) * g**2
            update = m[k] / (1 - config.b1**t) / (np.sqrt(v[k] / (1 - config.b2**t)) + config.eps)
            if k == "w":
                update = update + config.weight_decay * params[k]
            params[k] = params[k] - lr * update
    return params


@pytest.mark.parametrize(
    "config",
    [
        OptimConfig(),
        OptimConfig(b1=0.8, b2=0.99, eps=0.1, weight_decay=0.5, clip_norm=None),
        OptimConfig(ScheduleConfig("wsd", peak=0.1, warmup=0.4, decay=0.4), weight_decay=0.0, clip_norm=1e-3),
    ],
    ids=["default", "no clipping, large eps", "wsd, tight clipping"],
)
def test_equals_numpy_over_several_steps(config, rng, float64):
    draw = lambda scale: {k: scale * rng.normal(size=s) for k, s in SHAPES.items()}  # noqa: E731
    params, total = draw(1.0), 6
    # Gradients below and above the clipping norm.
    grads = [draw(scale) for scale in (0.01, 10.0, 0.1, 1.0, 1e-4, 3.0)]
    transform = optimizer(config, total, AXES)
    state, got = transform.init(params), params

    @quick.jit
    def step(params, state, grad):
        updates, state = transform.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        got, state = step(got, state, grad)
    want = numpy_adamw(config, params, grads, total)
    # Global norms are summed in another order, the learning rate is one float32 number in both.
    assert tiny.leaf_error(got, want) < 1e-13
    assert tiny.leaf_error(got, params) > 1e-3


def test_matrices_and_embeddings_decay_and_nothing_else():
    config = tiny.decoder(qk_norm="head", bias="qkv", tied=False)
    mask = decay_mask(functional(config).logical_axes())
    decays = {
        jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("segments/0/0/"): value
        for path, value in jax.tree.leaves_with_path(mask)
    }
    assert {name for name, value in decays.items() if value} == {
        "embedding/table",
        "head/weight",
        "attention/q",
        "attention/k",
        "attention/v",
        "attention/o",
        "mlp/gate",
        "mlp/up",
        "mlp/down",
    }
    assert {name.split("/")[-1] for name, value in decays.items() if not value} == {
        "gain",
        "q_bias",
        "k_bias",
        "v_bias",
    }


def test_decay_alone_shrinks_by_the_learning_rate():
    config = OptimConfig(ScheduleConfig("constant", peak=0.5, warmup=0.0), weight_decay=0.25)
    params = {k: jnp.ones(s) for k, s in SHAPES.items()}
    transform = optimizer(config, 10, AXES)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = transform.update(zero, transform.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.5 * 0.25)
    np.testing.assert_array_equal(updates["gain"], 0)
    np.testing.assert_array_equal(updates["bias"], 0)


def test_state_is_eight_bytes_a_parameter():
    params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
    state = optimizer(OptimConfig(), 10, AXES).init(params)
    count = sum(p.size for p in params.values())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim) == 8 * count


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"b1": 1.0}, "b1 = 1.0"),
        ({"b2": -0.1}, "b2 = -0.1"),
        ({"eps": 0.0}, "eps = 0.0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
        ({"clip_norm": 0.0}, "clip_norm = 0.0"),
    ],
)
def test_impossible_settings_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        OptimConfig(**fields)
