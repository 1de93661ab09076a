"""L-GreCo: ranks of PowerSGD by layer, chosen from measured errors for the fewest bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compiler.replica_groups import Placement
from jaxllm.config import ConfigError
from jaxllm.train.outer.adaptive_step import AdaptiveStep, Layers, best_row
from jaxllm.train.outer.compressed_gradients import NAME, GradsConfig, compressed_bytes
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.lgreco import (
    WHOLE,
    LayerRanks,
    LayerwiseRanks,
    candidates,
    fewest_bytes,
    layer_bytes,
    rank_errors,
    steps_of,
)
from jaxllm.train.outer.power_sgd import PowerSgd
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.run_sharding import sharding_table
from jaxllm.train.step.step_builder import build_error_measure, build_step, init_run_state
from jaxllm.train.step.training_step import jit_step
from sharding import MeshSpec, shardings_of
from tests import environment, quick, tiny
from tests.train.outer_runs import batch_at, float32, parts_of, run_of
from tests.train.replica_traffic import traffic_between

MESH = "data=2,fsdp=2"


def draws(seed: int) -> tuple[list[np.ndarray], list[tuple[int, ...]], float]:
    """Errors and bytes of a few layers' candidates, as of matrices with falling singular values, and a budget."""
    rng = np.random.default_rng(seed)
    errors, sizes = [], []
    for _ in range(rng.integers(1, 6)):
        count = int(rng.integers(2, 6))
        falling = np.sort(rng.exponential(size=count - 1))[::-1] * 10.0 ** rng.integers(-2, 2)
        errors.append(np.append(falling, 0.0))
        sizes.append(tuple(int(size) for size in np.sort(rng.integers(1, 50, count))))
    return errors, sizes, float(rng.uniform(0, 1.2)) * sum(one[0] for one in errors)


def solver_error(seed: int, steps: int = 64) -> float:
    """Bytes of the solver's choice less those of the best of all choices, for errors that are rounded as its are."""
    errors, sizes, budget = draws(seed)
    units = [steps_of(one, budget, steps) for one in errors]
    legal = (
        sum(cost[at] for cost, at in zip(sizes, choice, strict=True))
        for choice in itertools.product(*(range(len(one)) for one in errors))
        if sum(unit[at] for unit, at in zip(units, choice, strict=True)) <= steps
    )
    found = fewest_bytes(errors, sizes, budget, steps)
    assert sum(one[at] for one, at in zip(errors, found, strict=True)) <= budget * (1 + 1e-12), "within the budget"
    return float(sum(cost[at] for cost, at in zip(sizes, found, strict=True)) - min(legal))


def test_the_solver_is_brute_force():
    assert [solver_error(seed) for seed in range(60)] == [0.0] * 60
    with pytest.raises(ValueError, match="layer 0 has no candidate without an error"):
        fewest_bytes([np.array([1.0, 0.5])], [(1, 2)], 1.0)


def test_errors_are_those_of_the_best_approximations(float64, rng):
    x = rng.normal(size=(3, 12, 4, 5)) * np.array([1, 10, 0.1])[:, None, None, None]
    found = np.asarray(rank_errors(jnp.asarray(x)))
    assert candidates(x.shape) == (1, 2, 4, WHOLE)
    for layer, matrix in enumerate(x.reshape(3, 12, 20)):
        values = np.linalg.svd(matrix, compute_uv=False)
        want = [np.sum(values[rank:] ** 2) for rank in (1, 2, 4)] + [0.0]
        np.testing.assert_allclose(found[layer], want, atol=1e-10 * np.sum(values**2))
    assert candidates((100,)) == candidates((1, 100)) == ()


def test_every_layer_has_its_rank(float64, rng):
    """Layers of ranks one and two, and one that is sent whole, are averaged exactly where their rank is as large."""
    mesh = MeshSpec.parse(MESH).build(jax.devices()[:4])
    shared = rng.normal(size=(4, 12, 2)) @ rng.normal(size=(4, 2, 16))
    shared[0] = np.outer(*rng.normal(size=(2, 20))[:, :16])[:12]
    rows = np.stack([shared * 1.5, shared * 0.5])
    exchange = LayerRanks((1, 2, WHOLE, 1))
    with jax.set_mesh(mesh):
        placed = jax.device_put(rows, jax.NamedSharding(mesh, jax.P("data", None, "fsdp")))
        basis = exchange.basis(shared.shape, 1)
        assert basis is not None
        specs = {"in_specs": (jax.P("data"), jax.P()), "out_specs": jax.P()}
        mean = lambda rows, basis: exchange.mean(rows[0], basis, "data")  # noqa: E731
        found, after = jax.jit(jax.shard_map(mean, **specs, axis_names={"data"}, check_vma=False))(placed, basis)
    errors = [
        np.linalg.norm(one - want) / np.linalg.norm(want) for one, want in zip(np.asarray(found), shared, strict=True)
    ]
    assert max(errors[:3]) < 1e-10
    assert errors[3] > 1e-3
    changed = np.any(np.asarray(after) != np.asarray(basis), axis=1).sum(1)
    assert changed.tolist() == [1, 2, 0, 1], "columns of the basis"


@pytest.mark.parametrize("uniform", [1, 2, 4])
def test_fewer_bytes_than_one_rank_for_all_at_no_greater_error(uniform, rng):
    """Singular values of five layers fall fast, those of the sixth slowly: its larger rank pays for their smaller."""
    mesh = MeshSpec.parse("data=4").abstract()
    shape = (6, 48, 64)
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P()))
    layers = Layers((leaf,), ("w",))
    left, right = np.linalg.qr(rng.normal(size=(6, 48, 48)))[0], np.linalg.qr(rng.normal(size=(6, 64, 64)))[0]
    rates = np.array([[1.0]] * 5 + [[0.05]]) * rng.uniform(0.9, 1.1, (6, 1))
    values = np.exp(-np.arange(48) * rates) * rng.uniform(0.9, 1.1, (6, 1))
    x = np.einsum("lmk,lk,lnk->lmn", left, values, right[:, :, :48])
    table = np.asarray(rank_errors(jnp.asarray(x, jnp.float32)))
    at = candidates(shape).index(uniform)
    error, energy = float(table[:, at].sum()), float(np.sum(x**2))
    row = best_row(layers, {"0": table, "energy": np.float32(energy)}, (error / energy) ** 0.5, [], 4)
    places = [candidates(shape).index(rank) for rank in row]
    sizes = layer_bytes(leaf)
    assert sum(table[layer, place] for layer, place in enumerate(places)) <= error * (1 + 1e-5)
    sent = sum(sizes[place] for place in places)
    if uniform == 1:
        assert sent == 6 * sizes[at], "there is no cheaper choice"
    else:
        assert sent < 6 * sizes[at]
        assert len(set(row)) > 1


def test_no_more_programs_than_the_bound():
    """Of the programs that there are: the cheapest within the budget, or the most exact."""
    mesh = MeshSpec.parse("data=2").abstract()
    leaf = jax.ShapeDtypeStruct((2, 16, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P()))
    layers = Layers((leaf,), ("w",))
    table = np.array([[8.0, 4.0, 2.0, 0.0], [1.0, 0.5, 0.2, 0.0]])
    errors = {"0": table, "energy": np.float64(20.0)}
    assert candidates((2, 16, 16)) == (1, 2, 4, WHOLE)
    free = best_row(layers, errors, (3.1 / 20) ** 0.5, [], 2)
    assert free == (4, 1)
    assert best_row(layers, errors, (3.1 / 20) ** 0.5, [(1, 1), (4, 4)], 2) == (4, 4)
    assert best_row(layers, errors, (3.1 / 20) ** 0.5, [(1, 1), (2, 2)], 2) == (2, 2)
    assert best_row(layers, errors, (3.1 / 20) ** 0.5, [(4, 1), (4, 4)], 2) == (4, 1)
    assert best_row(layers, errors, (3.1 / 20) ** 0.5, [(4, 4)], 2) == (4, 1)


@pytest.mark.drawn(0.5)
def test_a_resumed_step_goes_on_with_its_choices():
    """States after six steps with two programs, in one go and from a copy of the state after three: bit for bit."""
    run = float32(run_of("data=2,fsdp=2", OuterConfig(), grads=GradsConfig("lgreco:0.6", every=2, programs=2)))
    model, transform, mesh, abstract, _ = parts_of(run)
    take = build_value_and_grad(run, model, mesh)
    programs = {}

    def compiled(choice):
        if choice not in programs:
            step = build_step(run, model, take, transform, choice=choice)
            programs[choice] = quick.jit(step, out_shardings=(shardings_of(abstract), None))
        return programs[choice]

    measure, told = quick.jit(build_error_measure(run, model, take)), []

    def fresh():
        layers = Layers.of(abstract.params)
        return AdaptiveStep(layers, compiled, measure, NAME, 0.6, 2, lambda *said: told.append(said))

    def steps(state, first, last):
        step, sent = fresh(), []
        for number in range(first, last):
            state, metrics = step(state, jax.device_put(batch_at(number), there))
            sent.append(float(metrics["sent_bytes"]))
        return state, sent

    with jax.set_mesh(mesh):
        params = jax.device_put(quick.params(run.model), shardings_of(abstract.params))
        start = init_run_state(run, model, transform, mesh, abstract, params)
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        whole, sent = steps(start, 0, 6)
        listed = list(told)
        half, before = steps(start, 0, 3)
        copied = jax.tree.map(lambda x: jax.device_put(jax.device_get(x), x.sharding), replace(half, rng=None))
        again, after = steps(replace(copied, rng=half.rng), 3, 6)
    assert before + after == sent
    assert told == 2 * listed, "the same choices at the same steps"
    assert len(programs) <= 2
    assert np.asarray(whole.extras[NAME]["choices"]).shape == (2, sum(map(len, listed[0][1].values())))
    ends = [jax.device_get(replace(state, rng=None)) for state in (whole, again)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_bytes_by_formula_before_the_first_choice():
    wide = tiny.decoder(kv_heads=4, layers=2, embed_dim=128, mlp=256, head_dim=32)
    run = float32(run_of("data=2,fsdp=2", OuterConfig(), grads=GradsConfig("lgreco:0.3"), model=wide))
    params = parts_of(run)[3].params
    widest = compressed_bytes(LayerwiseRanks(0.3), params, 2)
    leaves = jax.tree.leaves(params)
    narrow = tuple((1,) * (leaf.shape[0] if leaf.ndim > 2 else 1) if candidates(leaf.shape) else () for leaf in leaves)
    one = compressed_bytes(LayerwiseRanks(0.3, narrow), params, 2)
    assert one == compressed_bytes(PowerSgd(1), params, 2) < widest
    assert "lgreco:0.3" in sharding_table(run, 4).remark


@pytest.mark.drawn(0.3)
def test_a_program_sends_the_bytes_of_its_choice():
    """Layers of different ranks, and one that is sent whole."""
    wide = tiny.decoder(kv_heads=4, layers=2, embed_dim=64, mlp=64, head_dim=16)
    run = float32(run_of(MESH, OuterConfig(), grads=GradsConfig("lgreco:0.3"), model=wide))
    model, transform, mesh, abstract, _ = parts_of(run)
    leaves = jax.tree.leaves(abstract.params)
    ranks = [(candidates(leaf.shape), leaf.shape[0] if leaf.ndim > 2 else 1) for leaf in leaves]
    choice = tuple(
        tuple(found[(layer + number) % len(found)] for layer in range(count)) if found else ()
        for number, (found, count) in enumerate(ranks)
    )
    assert {0, 1, 2, 4} <= {rank for layers in choice for rank in layers}
    step = build_step(run, model, build_value_and_grad(run, model, mesh), transform, choice=choice)
    there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), batch_at(0))
    with jax.set_mesh(mesh):
        text = jit_step(step, abstract).lower(abstract, batch).compile(environment.AS_EVER).as_text()
    _, sent, _ = traffic_between(text, Placement.of(mesh), "data")
    want = compressed_bytes(LayerwiseRanks(0.3, choice), abstract.params, 2)  # of two devices: its arrays
    scalars = 256
    assert want <= sent < want + scalars


def test_what_is_no_budget_is_refused():
    for text in ("lgreco", "lgreco:0", "lgreco:1", "lgreco:x"):
        with pytest.raises(ConfigError, match=r"relative error above 0 and below 1"):
            GradsConfig(text).exchange  # noqa: B018
    for fields in ({"every": 10}, {"programs": 2}):
        with pytest.raises(ValueError, match=r'with grads\.compress = "lgreco:ERROR"'):
            GradsConfig("powersgd:4", **fields)
    found = GradsConfig("lgreco:0.2")
    assert (found.error_feedback, found.steps_between_choices, found.most_programs) == (1.0, 100, 4)


def test_cpu_programs_decompose_one_matrix_at_a_time():
    """A batch would wait for threads of the pool it runs in: on eight simulated devices the measure never ended."""
    x = jax.ShapeDtypeStruct((4, 32, 16), jnp.float32)
    text = jax.jit(rank_errors).lower(x).compile().as_text()
    found = [line.split("custom-call")[0] for line in text.splitlines() if "syevd" in line and "custom-call(" in line]
    assert found
    assert all("[1,16" in line or "[16" in line for line in found), found
