"""Every optimizer against its definition, its bytes, and itself on a mesh."""

from __future__ import annotations

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer
from jaxllm.optim.config import Kind
from jaxllm.optim.matrices import Matrix, matrix_of
from tests import quick, tiny

CONSTANT = ScheduleConfig("constant", peak=0.01, warmup=0.0)
AXES = {"w": ("layers", "embed", "heads", "head_dim"), "table": ("vocab", "vocab_embed"), "gain": ("layers", "embed")}
SHAPES = {"w": (2, 6, 2, 4), "table": (5, 6), "gain": (2, 6)}


def plain(kind: str, **more: object) -> OptimConfig:
    return OptimConfig(CONSTANT, kind=kind, weight_decay=0.0, clip_norm=None, **more)  # type: ignore[arg-type]


def stepped(config, rng, steps: int = 3):
    """(parameters before, gradients, parameters after) of a few steps."""
    draw = lambda: {name: rng.normal(size=shape) for name, shape in SHAPES.items()}  # noqa: E731
    before, grads = draw(), [draw() for _ in range(steps)]
    transform = optimizer(config, steps, AXES)
    params, state = before, transform.init(jax.tree.map(jnp.asarray, before))

    @quick.jit
    def step(params, state, grad):
        updates, state = transform.update(grad, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return before, grads, jax.tree.map(np.asarray, params)


def close(got, want) -> None:
    for name in SHAPES:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-10, atol=1e-12, err_msg=name)


def test_lion(rng, float64):
    """arXiv:2302.06675, algorithm 2."""
    before, grads, after = stepped(plain("lion", b1=0.9, b2=0.99), rng)
    want, kept = dict(before), dict.fromkeys(SHAPES, 0.0)
    for grad in grads:
        for name, g in grad.items():
            want[name] = want[name] - 0.01 * np.sign(0.9 * kept[name] + 0.1 * g)
            kept[name] = 0.99 * kept[name] + 0.01 * g
    close(after, want)


def test_sgd(rng, float64):
    before, grads, after = stepped(plain("sgd", b1=0.8), rng)
    want, kept = dict(before), dict.fromkeys(SHAPES, 0.0)
    for grad in grads:
        for name, g in grad.items():
            kept[name] = 0.8 * kept[name] + g
            want[name] = want[name] - 0.01 * kept[name]
    close(after, want)


def test_adafactor(rng, float64):
    """arXiv:1804.04235, algorithms 4 and 5, of each layer's own matrix."""
    before, grads, after = stepped(plain("adafactor", eps=1e-3), rng)
    want = {name: value.copy() for name, value in before.items()}
    moments: dict[tuple, list] = {}
    for t, grad in enumerate(grads, 1):
        decay = 1 - t**-0.8
        for name, g in grad.items():
            many = len(g) if name == "w" else 1
            for layer in range(many):
                own = g[layer].reshape(6, 8) if name == "w" else g
                square = own**2 + 1e-3
                # A table's rows are its stream, as everywhere: one of 5 words and 6 dimensions has 6.
                kept = moments.setdefault((name, layer), [0.0, 0.0])
                if name == "gain":
                    kept[0] = decay * kept[0] + (1 - decay) * square
                    out = own / np.sqrt(kept[0])
                else:
                    for side in (0, 1):
                        kept[side] = decay * kept[side] + (1 - decay) * square.mean(1 - side, keepdims=True)
                    out = own / np.sqrt(kept[0] * kept[1] / kept[0].mean())
                out = out / max(1.0, math.sqrt((out**2).mean()))
                if name == "w":
                    want[name][layer] -= 0.01 * out.reshape(6, 2, 4)
                else:
                    want[name] -= 0.01 * out
    close(after, want)


def test_muon_makes_each_layers_matrix_orthogonal(rng, float64):
    """arXiv:2502.16982: singular values near 0.2 root(max side); embeddings and gains are AdamW's."""
    config = plain("muon")
    before, grads, after = stepped(config, rng, steps=1)
    for layer in range(2):
        update = (after["w"] - before["w"])[layer].reshape(6, 8) / -0.01
        values = np.linalg.svd(update)[1] / (0.2 * math.sqrt(8))
        assert values.min() > 0.6
        assert values.max() < 1.3
        left, _, right = np.linalg.svd(grads[0]["w"][layer].reshape(6, 8), full_matrices=False)
        # The same directions: what turns one into the other is near a multiple of the identity.
        turned = left.T @ update @ right.T
        assert np.abs(turned - np.diag(np.diag(turned))).max() < 1e-8 * np.abs(turned).max()
    adam = stepped(plain("adamw"), np.random.default_rng(0), steps=1)
    again = stepped(config, np.random.default_rng(0), steps=1)
    for name in ("table", "gain"):
        np.testing.assert_array_equal(adam[2][name], again[2][name])
    assert not np.allclose(adam[2]["w"], again[2]["w"])


def numpy_low_rank(kind, before, grads, refresh, b1, b2):
    """GaLore's algorithm 2 and APOLLO's algorithm 1 for "w" of two layers, 6 x 8, rank 3."""
    rank, want = 1 if kind == "apollo_mini" else 3, before.copy()
    for layer in range(2):
        m = v = last = 0.0
        for t, grad in enumerate(grads):
            g = grad[layer].reshape(6, 8)
            if kind == "galore":
                p = np.linalg.svd(g)[0][:, :rank].T if t % refresh == 0 else p
            else:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), t // refresh)
                p = np.asarray(jax.random.normal(key, (2, rank, 6), "float64"))[layer] / math.sqrt(rank)
            r = p @ g
            m, v = b1 * m + (1 - b1) * r, b2 * v + (1 - b2) * r**2
            adam = m / (1 - b1 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + 1e-8)
            if kind == "galore":
                out = 0.25 * p.T @ adam
            else:
                axis = 0 if kind == "apollo" else None
                scale = np.linalg.norm(adam, axis=axis) / (np.linalg.norm(r, axis=axis) + 1e-8)
                out = g * scale * (math.sqrt(128) if kind == "apollo_mini" else 1)
                norm = np.linalg.norm(out)
                out *= min(1, 1.01 * last / norm) if last else 1
                last = np.linalg.norm(out)
            want[layer] -= 0.01 * out.reshape(6, 2, 4)
    return want


@pytest.mark.parametrize(
    ("kind", "refresh", "b1", "b2"),
    [
        ("galore", 9, 0.9, 0.95),
        ("galore", 2, 0.0, 0.0),  # singular vectors have no sign, so moments must not outlive them to be compared
        ("apollo", 2, 0.9, 0.95),
        ("apollo_mini", 2, 0.9, 0.95),
    ],
)
def test_low_rank(kind, refresh, b1, b2, rng, float64):
    more = {} if kind == "apollo_mini" else {"rank": 3}
    before, grads, after = stepped(plain(kind, refresh=refresh, b1=b1, b2=b2, **more), rng, steps=5)
    want = numpy_low_rank(kind, before["w"], [grad["w"] for grad in grads], refresh, b1, b2)
    np.testing.assert_allclose(after["w"], want, rtol=1e-7, atol=1e-9)


def test_galore_of_full_rank_is_adam_in_other_axes(rng, float64):
    """One step: its singular vectors turn a gradient, Adam's sign of it is turned back."""
    before, grads, after = stepped(plain("galore", rank=6), rng, steps=1)
    for layer in range(2):
        u, s, vt = np.linalg.svd(grads[0]["w"][layer].reshape(6, 8), full_matrices=False)
        turned = s[:, None] * vt
        want = 0.25 * u @ (turned / (np.abs(turned) + 1e-8))
        got = (after["w"] - before["w"])[layer].reshape(6, 8) / -0.01
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_bytes_of_the_state(kind):
    model = functional(tiny.decoder(dtype="float32"))
    axes, params = model.logical_axes(), model.abstract()
    state = jax.eval_shape(optimizer(OptimConfig(kind=kind), 10, axes).init, params)
    # Counts, and Muon's fifteen coefficients, are no parameter's.
    have = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.shape != (3,))
    flat = jax.tree.leaves(params)
    found = [matrix_of(one) for one in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))]
    want = 0
    for leaf, one in zip(flat, found, strict=True):
        each, size = {"lion": 4, "sgd": 4, "adafactor": 4}.get(kind, 8), leaf.size
        if one is not None and (kind == "adafactor" or not one.vocabulary):
            small, large = sorted(math.prod(leaf.shape[i] for i in side) for side in (one.rows, one.columns))
            stack = leaf.size // (small * large)
            if kind == "adafactor":
                size = stack * (small + large)
            elif kind == "muon":
                each = 4
            elif kind == "galore":
                each, size = 4, stack * (small // 4) * (2 * large + small)
            elif kind == "apollo":
                each, size = 4, stack * (2 * (small // 4) * large + 1)
            elif kind == "apollo_mini":
                each, size = 4, stack * (2 * large + 1)
        want += each * size
    assert have == want


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_mesh_changes_nothing(kind, float64):
    config = tiny.decoder(dtype="float64")
    model = functional(config)
    axes = model.logical_axes()
    transform = optimizer(OptimConfig(CONSTANT, kind=kind), 3, axes)
    params = jax.tree.map(jnp.asarray, quick.params(config))
    grads = jax.tree.map(jnp.asarray, quick.params(config, seed=5))

    def run(params, grads):
        state = transform.init(params)
        for scale in (1.0, -0.5):
            updates, state = transform.update(jax.tree.map(lambda g: scale * g, grads), state, params)  # noqa: B023
            params = jax.tree.map(jnp.add, params, updates)
        return params

    want = quick.jit(run)(params, grads)
    mesh = sharding.MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    with jax.set_mesh(mesh):
        places = sharding.shardings_of(sharding.abstract_params(model.abstract(), axes, mesh, model.rules))
        got = quick.jit(run)(jax.device_put(params, places), jax.device_put(grads, places))
        assert jax.tree.all(jax.tree.map(lambda x, place: x.sharding.is_equivalent_to(place, x.ndim), got, places))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        gap = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
        assert gap < 1e-13, (jax.tree_util.keystr(path), gap)


def test_which_parameters_are_matrices():
    assert matrix_of(("layers", "heads", "head_dim", "embed")) == Matrix((3,), (1, 2), False)
    assert matrix_of(("layers", "experts", "expert_embed", "expert_mlp")) == Matrix((2,), (3,), False)
    assert matrix_of(("vocab", "vocab_embed")) == Matrix((1,), (0,), True)
    assert matrix_of(("layers", "embed", None)) == Matrix((1,), (2,), False)
    for none in (("embed",), ("layers", "embed"), ("layers", "experts", "expert_embed"), ("heads", "head_dim")):
        assert matrix_of(none) is None


def test_numbers_of_other_rules_are_refused():
    with pytest.raises(ValueError, match='"lion" has no eps; it has b1, b2'):
        OptimConfig(kind="lion", eps=1e-6)
    with pytest.raises(ValueError, match='"sgd" has no b2'):
        OptimConfig(kind="sgd", b2=0.5)
