"""Optimizers against their definitions, their bytes, and themselves on a mesh."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.models.param_subset import select, trainable_mask
from jaxllm.observe.config import ObserveConfig
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.optim.matrix_params import MatrixDims, matrix_dims
from jaxllm.optim.schedule_free import gradient_point
from jaxllm.optim.sophia import HessianEstimate
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig, TrainState, train_step
from jaxllm.train.run import fitting_mesh
from jaxllm.train.step.loss import value_and_grad
from jaxllm.train.step.step_builder import build_optimizer, build_step
from tests import quick, tiny
from tests.optim.kinds import KINDS, arrays_bytes, named, table_bytes

CONSTANT = ScheduleConfig("constant", peak=0.01, warmup=0.0)
AXES = {"w": ("layers", "embed", "heads", "head_dim"), "table": ("vocab", "vocab_embed"), "gain": ("layers", "embed")}
SHAPES = {"w": (2, 6, 2, 4), "table": (5, 6), "gain": (2, 6)}


PLAIN = {"schedule": CONSTANT, "weight_decay": 0.0, "clip_norm": None}


def plain(kind: str, **more: object) -> OptimConfig:
    return named(kind, **PLAIN, **more)


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


def test_adan(rng, float64):
    """arXiv:2208.06677, algorithm 1, with the betas of its paper; moments are corrected for their start at zero."""
    before, grads, after = stepped(plain("adan", eps=1e-8), rng)
    want = dict(before)
    m, v, n, last = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(4))
    for count, grad in enumerate(grads, 1):
        for name, g in grad.items():
            change = g - last[name] if count > 1 else 0 * g
            m[name] = 0.98 * m[name] + 0.02 * g
            v[name] = 0.92 * v[name] + 0.08 * change
            n[name] = 0.99 * n[name] + 0.01 * (g + 0.08 * change) ** 2
            last[name] = g
            first, second, third = (x[name] / (1 - b**count) for x, b in ((m, 0.98), (v, 0.92), (n, 0.99)))
            want[name] = want[name] - 0.01 * (first + 0.08 * second) / (np.sqrt(third) + 1e-8)
    close(after, want)


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
            many = 1 if name == "table" else len(g)
            for layer in range(many):
                own = g[layer].reshape(6, 8) if name == "w" else g[layer] if name == "gain" else g
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
                elif name == "gain":
                    want[name][layer] -= 0.01 * out
                else:
                    want[name] -= 0.01 * out
    close(after, want)


def test_adalomo_steps_by_the_parameters_size(rng, float64):
    """arXiv:2310.10195, equations 6 to 9: Adafactor's step times each layer's root mean square."""
    before, _, small = stepped(plain("adafactor", eps=1e-3), np.random.default_rng(0), steps=1)
    _, _, after = stepped(plain("adalomo", eps=1e-3), np.random.default_rng(0), steps=1)
    for name, value in before.items():
        own = range(2) if name != "table" else [slice(None)]
        for layer in own:
            size = math.sqrt((value[layer] ** 2).mean())
            step = (small[name] - value)[layer] * size
            np.testing.assert_allclose((after[name] - value)[layer], step, rtol=1e-9)


def test_lomo_is_descent(rng, float64):
    before, grads, after = stepped(plain("lomo"), rng)
    close(after, {name: value - 0.01 * sum(grad[name] for grad in grads) for name, value in before.items()})


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


def test_muon_has_nesterov_momentum(rng, float64):
    """G + 0.95 M of M <- 0.95 M + G, then five Newton-Schulz steps: Jordan et al., Moonlight's code."""
    before, grads, after = stepped(plain("muon"), rng)
    want = before["w"].copy()
    for layer in range(2):
        buffer = np.zeros((6, 8))
        for grad in grads:
            g = grad["w"][layer].reshape(6, 8)
            buffer = 0.95 * buffer + g
            x = 0.05 * (g + 0.95 * buffer)
            x = x / (np.linalg.norm(x) + 1e-8)
            for _ in range(5):
                square = x @ x.T
                x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
            want[layer] -= 0.01 * 0.2 * math.sqrt(8) * x.reshape(6, 2, 4)
    np.testing.assert_allclose(after["w"], want, rtol=1e-10, atol=1e-12)


def numpy_low_rank(kind, before, grads, refresh, b1, b2):
    """GaLore's algorithm 2 and APOLLO's algorithm 1 for "w" of two layers, 6 x 8, rank 3."""
    rank, want = 1 if kind == "apollo_mini" else 3, before.copy()
    for layer in range(2):
        p = np.empty(0)
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
    """One step: its singular vectors rotate a gradient, and Adam's sign of it is rotated back."""
    before, grads, after = stepped(plain("galore", rank=6), rng, steps=1)
    for layer in range(2):
        u, s, vt = np.linalg.svd(grads[0]["w"][layer].reshape(6, 8), full_matrices=False)
        turned = s[:, None] * vt
        want = 0.25 * u @ (turned / (np.abs(turned) + 1e-8))
        got = (after["w"] - before["w"])[layer].reshape(6, 8) / -0.01
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_state(kind):
    """Those of the table in the documentation."""
    model = functional(tiny.decoder(dtype="float32", embed_dim=64, mlp=96))
    axes, params = model.logical_axes(), model.abstract()
    state = jax.eval_shape(optimizer(named(kind), 10, axes).init, params)
    assert arrays_bytes(state) == table_bytes(kind, params, axes)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kind", ["lomo", "adalomo"])
def test_layer_by_layer_is_all_at_once(kind, float64):
    """The step that never has all gradients gives what the same rule makes of all of them."""
    config = tiny.decoder(dtype="float64", layers=3, remat="full", tied=False, qk_norm="head")
    model = functional(config)
    run = RunConfig(model=config, optim=named(kind, schedule=CONSTANT), steps=3, data=DataConfig(batch_size=4))
    transform, grads_of = optimizer(run.optim, run.steps, model.logical_axes()), value_and_grad(model)
    params = jax.tree.map(jnp.asarray, quick.params(config))
    state = TrainState(params, transform.init(params), jnp.zeros((), jnp.int32), jax.random.key(0))
    fused = quick.jit(build_step(run, model, grads_of, transform))
    plain = quick.jit(train_step(grads_of, transform, schedule(CONSTANT, 3)))
    one = other = state
    for number in range(2):
        batch = tiny.batch(number, 4, 8, config.vocab_size, packed=True)
        one, seen = fused(one, batch)
        other, want = plain(other, batch)
        for name in ("loss", "nll", "grad_norm", "update_norm", "param_norm"):
            assert float(seen[name]) == pytest.approx(float(want[name]), rel=1e-12), name
    assert tiny.leaf_error(one.params, other.params) < 1e-13
    for a, b in zip(*(jax.tree.leaves(end.opt_state) for end in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("trainable", [(), ("attention",)])
def test_mezo_moves_along_its_direction_by_the_slope(float64, trainable):
    """arXiv:2305.17333, algorithm 1: the slope is the gradient's product with the direction; frozen parameters stay."""
    config = tiny.decoder(dtype="float64", remat="full")
    model = functional(config)
    optim = named("mezo", schedule=CONSTANT, weight_decay=0.0)
    run = RunConfig(model=config, optim=optim, steps=3, data=DataConfig(batch_size=4), trainable=trainable)
    transform, grads_of = build_optimizer(run, model), value_and_grad(model)
    params = jax.tree.map(jnp.asarray, quick.params(config))
    state = TrainState(params, transform.init(params), jnp.zeros((), jnp.int32), jax.random.key(0))
    batch = tiny.batch(0, 4, 8, config.vocab_size, packed=True)
    after, metrics = quick.jit(build_step(run, model, grads_of, transform))(state, batch)
    sums, grads = quick.jit(grads_of)(params, batch)
    moved = jax.tree.map(lambda a, b: np.asarray(a - b) / -0.01, after.params, params)
    if trainable:
        mask = trainable_mask(model, trainable)
        jax.tree.map(lambda chosen, leaf: chosen == leaf.any() or pytest.fail("a frozen parameter moved"), mask, moved)
        params, grads, moved = (select(mask, tree) for tree in (params, grads, moved))
    length = math.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(moved)))
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, z: float((g * z).sum()), grads, moved))) / length
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    # The update is slope times a direction of about root(count): both follow from it.
    assert slope * math.sqrt(count) == pytest.approx(length / math.sqrt(count), rel=max(0.05, 4 / math.sqrt(count)))
    assert float(metrics["grad_norm"]) == pytest.approx(length, rel=1e-9)
    assert float(metrics["loss"]) == pytest.approx(float(sums.loss / sums.count), abs=1e-2)
    drawn = np.concatenate([(leaf / (length / math.sqrt(count))).ravel() for leaf in jax.tree.leaves(moved)])
    assert abs(drawn.mean()) < 5 / math.sqrt(count)
    assert drawn.std() == pytest.approx(1.0, rel=0.01)
    if trainable:
        return
    layers = jax.tree.leaves(moved["segments"])
    assert all(not np.allclose(leaf[0], leaf[1]) for leaf in layers)


def test_schedule_free(rng, float64):
    """arXiv:2405.15682, algorithm 1: x is the mean of the iterates, gradients are those of y."""
    config = named("schedule_free", schedule=ScheduleConfig("constant", 0.01, warmup=0.5), clip_norm=None, b1=0.8)
    transform = optimizer(config, 8, AXES)
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}
    state, pull = transform.init(params), {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    x = {name: np.asarray(value) for name, value in params.items()}
    z, v, weights = dict(x), dict.fromkeys(SHAPES, 0.0), 0.0
    for t in range(1, 7):
        at = gradient_point(0.8, params, state)
        updates, state = transform.update(jax.tree.map(lambda y, c: y - c, at, pull), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        rate = 0.01 * min(1.0, t / 4)
        weights += rate**2
        for name in SHAPES:
            y = 0.8 * x[name] + 0.2 * z[name]
            grad = y - pull[name]
            v[name] = 0.95 * v[name] + 0.05 * grad**2
            step = grad / (np.sqrt(v[name] / (1 - 0.95**t)) + 1e-8) + 0.1 * y * (name != "gain")
            z[name] = z[name] - rate * step
            x[name] = (1 - rate**2 / weights) * x[name] + rate**2 / weights * z[name]
    close(params, x)


def test_sophia(rng, float64):
    """arXiv:2305.14342, algorithm 3."""
    transform = optimizer(named("sophia", schedule=CONSTANT, weight_decay=0.0, clip_norm=None, b1=0.9, b2=0.8), 9, AXES)
    draw = lambda: {name: rng.normal(size=shape) for name, shape in SHAPES.items()}  # noqa: E731
    want = draw()
    params = jax.tree.map(jnp.asarray, want)
    state, m, h = transform.init(params), dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
    clipped = 0.0
    for t in range(5):
        grad, square = draw(), {name: 30 * value**2 for name, value in draw().items()}
        curvature = HessianEstimate(jnp.asarray(t % 2 == 0), square)
        updates, state = transform.update(grad, state, params, hessian=curvature)  # type: ignore[call-arg]
        params = jax.tree.map(jnp.add, params, updates)
        for name in SHAPES:
            m[name] = 0.9 * m[name] + 0.1 * grad[name]
            h[name] = 0.8 * h[name] + 0.2 * square[name] if t % 2 == 0 else h[name]
            step = m[name] / np.maximum(0.05 * h[name], 1e-8)
            clipped += (np.abs(step) > 1).mean() / 15
            want[name] = want[name] - 0.01 * np.clip(step, -1, 1)
    close(params, want)
    assert 0.05 < clipped < 0.95
    with pytest.raises(TypeError, match="needs a hessian estimate"):
        transform.update(grad, state, params)


def test_soap(rng, float64):
    """arXiv:2409.11321, algorithm 3, of each layer's own matrix; nothing moves in the first step."""
    before, grads, after = stepped(named("soap", **PLAIN, refresh=2), rng, steps=6)
    want = before["w"].copy()
    lifted = lambda x: x + 1e-3 * np.trace(x) / len(x) * np.diag(np.arange(1, len(x) + 1) / len(x))  # noqa: E731
    for layer in range(2):
        m = v = np.zeros((6, 8))
        means, bases = [np.zeros((6, 6)), np.zeros((8, 8))], [np.eye(6), np.eye(8)]
        for t, grad in enumerate(grads):
            g = grad["w"][layer].reshape(6, 8)
            if t:
                m, turned = 0.9 * m + 0.1 * g, bases[0].T @ g @ bases[1]
                v = 0.95 * v + 0.05 * turned**2
                adam = bases[0].T @ m @ bases[1] / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
                want[layer] -= 0.01 * (bases[0] @ adam @ bases[1].T).reshape(6, 2, 4)
            for side, square in enumerate((g @ g.T, g.T @ g)):
                means[side] = 0.95 * means[side] + 0.05 * square
                if t == 0:
                    bases[side] = np.linalg.eigh(lifted(means[side]))[1][:, ::-1]
                elif t % 2 == 0:
                    order = np.argsort(-np.diag(bases[side].T @ lifted(means[side]) @ bases[side]))
                    v = np.take(v, order, axis=side)
                    bases[side] = np.linalg.qr(lifted(means[side]) @ bases[side][:, order])[0]
    np.testing.assert_allclose(after["w"], want, rtol=1e-7, atol=1e-9)
    adam = stepped(plain("adamw"), np.random.default_rng(0), steps=2)
    again = stepped(named("soap", **PLAIN), np.random.default_rng(0), steps=2)
    for name in ("table", "gain"):
        np.testing.assert_array_equal(adam[2][name], again[2][name])


@pytest.mark.parametrize("kind", ["soap", "galore"])
def test_cpus_decompose_one_matrix_at_a_time(kind):
    """XLA's CPU decompositions of several large matrices wait for each other on several simulated devices."""
    transform = optimizer(plain(kind), 2, AXES)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    lower = jax.jit(transform.update).trace(params, jax.eval_shape(transform.init, params), params).lower
    stacks = {
        platform: set(
            re.findall(r"(?:syevd|geqrf|orgqr|Eigh|eigh|Qr)\w*\(.*?\(tensor<(\d+)x", lower(**where).as_text())
        )
        for platform, where in (("cpu", {}), ("tpu", {"lowering_platforms": ("tpu",)}))
    }
    assert stacks == {"cpu": {"1"}, "tpu": {"2"}}


def test_eight_bits_stay_near_float32(rng, float64):
    """A few steps: the difference is below the codes' resolution, and not zero."""
    for kind in ("adamw", "galore"):
        wide = stepped(plain(kind), np.random.default_rng(0), steps=4)[2]["w"]
        begun, _, narrow = stepped(named(f"{kind} 8bit", **PLAIN), np.random.default_rng(0), steps=4)
        apart = np.linalg.norm(narrow["w"] - wide) / np.linalg.norm(wide - begun["w"])
        assert 1e-5 < apart < 0.05, kind


def test_which_parameters_are_matrices():
    assert matrix_dims(("layers", "heads", "head_dim", "embed")) == MatrixDims((3,), (1, 2), False)
    assert matrix_dims(("layers", "experts", "expert_embed", "expert_mlp")) == MatrixDims((2,), (3,), False)
    assert matrix_dims(("vocab", "vocab_embed")) == MatrixDims((1,), (0,), True)
    assert matrix_dims(("layers", "embed", None)) == MatrixDims((1,), (2,), False)
    for none in (("embed",), ("layers", "embed"), ("layers", "experts", "expert_embed"), ("heads", "head_dim")):
        assert matrix_dims(none) is None


def test_numbers_of_other_rules_are_refused():
    with pytest.raises(ValueError, match='"lion" does not use eps; it uses b1, b2'):
        OptimConfig(kind="lion", eps=1e-6)
    with pytest.raises(ValueError, match='"sgd" does not use b2'):
        OptimConfig(kind="sgd", b2=0.5)
    with pytest.raises(ValueError, match='"muon" does not use moments'):
        OptimConfig(kind="muon", moments="8bit")
    with pytest.raises(ValueError, match=r'"lomo" never holds all gradients.*set clip_norm to None'):
        OptimConfig(kind="lomo")
    with pytest.raises(ValueError, match=r'"schedule_free" replaces.*give "constant"'):
        OptimConfig(kind="schedule_free")


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("sophia", {"mesh": "stage=2"}, r'"sophia" \(samples labels .* leave stage out'),
        ("lomo", {"mesh": "stage=2"}, r'"lomo" \(updates layer by layer.* leave stage out'),
        (
            "mezo",
            {"model": tiny.decoder(embed_grad=0.1)},
            '"mezo" .* there is no backward pass to scale',
        ),
        ("mezo", {"accumulate": 2}, '"mezo" .* set accumulate to 1'),
        ("adalomo", {"parallel": ParallelConfig(zero=1)}, '"adalomo" .* set parallel.zero to 3'),
        ("lomo", {"model": tiny.decoder(dtype="float32")}, 'model.remat = "elementwise": .* set model.remat to "full"'),
        (
            "lomo",
            {"model": tiny.decoder(dtype="float32", moe=(4, 2, 8, True))},
            "experts: their routing losses need all layers",
        ),
        ("mezo", {"observe": ObserveConfig(layers_every=5)}, "set observe.layers_every to 0"),
    ],
)
def test_what_a_step_cannot_do_is_refused(kind, changes, words):
    same = {"model": tiny.decoder(dtype="float32", remat="full"), "data": DataConfig(batch_size=4, seq_len=8)}
    run = RunConfig(**same | {"optim": named(kind)} | {"accumulate": 2 if "stage" in str(changes) else 1} | changes)
    with pytest.raises(ConfigError, match=words):
        fitting_mesh(run, functional(run.model, run.parallel.rules()), 2 if "mesh" in changes else 1)
