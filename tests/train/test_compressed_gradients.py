"""Compressed gradients over the mesh axis data: packed integers, top-k with error feedback, PowerSGD."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.train import train
from jaxllm.train.outer.compressed_gradients import GradsConfig, compressed_gradients
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.power_sgd import PowerSgd
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.step.train_state import TrainState
from jaxllm.train.step.training_step import gradients_at_parameters
from sharding import MeshSpec
from tests import quick, tiny
from tests.train import outer_runs, runs
from tests.train.outer_runs import ADAMW, CONFIG, compiled_traffic, float32, parts_of, run_of, trained

MESH = "data=2,fsdp=2"


def masked_batch(step: int):
    """Rows with different numbers of targets."""
    return tiny.batch(step, outer_runs.ROWS, outer_runs.LENGTH, CONFIG.vocab_size, packed=True)


def error_of(compress: str, mesh: str = MESH, feedback: float | None = None, steps: int = 3) -> float:
    """Error of the parameters' movement with compressed gradients, against the same run without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer_runs, "batch_at", masked_batch)
        plain = trained(run_of(mesh, OuterConfig(), ADAMW, steps))
        packed = trained(run_of(mesh, OuterConfig(), ADAMW, steps, grads=GradsConfig(compress, feedback)))
    assert [float(one["tokens"]) for one in packed.metrics] == [float(one["tokens"]) for one in plain.metrics]
    start = quick.params(CONFIG)
    moved = [jax.tree.map(lambda x, y: x - y, jax.device_get(one.state.params), start) for one in (packed, plain)]
    return tiny.leaf_error(*moved)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("mesh", [MESH, "data=2,tensor=2", "data=4"])
def test_all_values_sent_is_data_parallelism(mesh, float64):
    assert error_of("topk:1", mesh) < 1e-10


@pytest.mark.drawn(0.5)
def test_bytes_are_close_to_exact_gradients(float64):
    error = error_of("int8")
    assert 1e-6 < error < 0.3


def test_low_rank_matrices_are_averaged_exactly(float64, rng):
    """Two devices' matrices of rank two have a mean of rank four."""
    mesh = MeshSpec.parse(MESH).build(jax.devices()[:4])
    left, right = rng.normal(size=(2, 3, 12, 2)), rng.normal(size=(2, 3, 2, 16))
    rows = left @ right
    exchange = PowerSgd(4)
    with jax.set_mesh(mesh):
        placed = jax.device_put(rows.reshape(2, 3, 12, 4, 4), jax.NamedSharding(mesh, jax.P("data", None, "fsdp")))
        basis = exchange.basis((3, 12, 4, 4), 1)

        def mean(rows, basis):
            return exchange.mean(rows[0], basis, "data")

        specs = {"in_specs": (jax.P("data"), jax.P()), "out_specs": jax.P()}
        run = jax.shard_map(mean, **specs, axis_names={"data"}, check_vma=False)
        found, after = jax.jit(run)(placed, basis)
    assert found.sharding.spec[1] == "fsdp"
    want = rows.mean(0)
    np.testing.assert_allclose(np.asarray(found).reshape(3, 12, 16), want, atol=1e-10 * np.abs(want).max())
    product = want @ np.asarray(basis)
    for one, (q, full) in enumerate(zip(np.asarray(after), want, strict=True)):
        basis_of = np.linalg.qr(product[one])[0]
        np.testing.assert_allclose(np.abs(q), np.abs(full.T @ basis_of), atol=1e-9 * np.abs(full).max() * 10)


def test_what_is_not_smaller_as_factors_is_averaged_whole():
    exchange = PowerSgd(4)
    assert exchange.shape((100,)) is None
    assert exchange.shape((3, 100)) is None
    assert exchange.shape((16, 16)) == (1, 16, 16)
    assert exchange.shape((2, 16, 4, 4)) == (2, 16, 16)


@pytest.mark.drawn(0.5)
def test_error_feedback_keeps_what_a_low_rank_does_not_send(float64):
    """Sent and kept add up to the gradients: the rows' mean plus kept errors is that of the plain gradients."""
    run = run_of(MESH, OuterConfig(), ADAMW, 1, grads=GradsConfig("powersgd:1"))
    model, _, mesh, _, _ = parts_of(run)
    link = compressed_gradients(run.grads)
    assert link is not None
    assert link.init is not None
    assert link.gradients is not None
    take = gradients_at_parameters(build_value_and_grad(run, model, mesh))
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(
            lambda leaf, axes: model.rules.sharding(axes, mesh, leaf.shape, "parameter"),
            model.abstract(),
            model.logical_axes(),
        )
        params = jax.device_put(quick.params(run.model), shardings)
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        batch = jax.device_put(masked_batch(1), there)
        state = TrainState(params, None, jnp.zeros((), jnp.int32), None, {link.name: quick.jit(link.init)(params)})
        _, grads, kept = quick.jit(link.gradients(take))(state, batch)
        _, plain = quick.jit(lambda p, b: take(TrainState(p, None, None, None), b))(params, batch)
    both = jax.tree.map(lambda g, e: np.asarray(g) + np.asarray(e).mean(0), grads, kept["feedback"])
    assert tiny.leaf_error(both, jax.device_get(plain)) < 1e-10
    assert tiny.leaf_error(jax.device_get(grads), jax.device_get(plain)) > 1e-3


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("compress", ["int8", "powersgd:2"])
def test_fewer_bytes_go_over_data_by_the_formula(compress):
    wide = tiny.decoder(kv_heads=4, layers=1, embed_dim=128, mlp=256, head_dim=32, tied=True)
    run = float32(run_of(MESH, OuterConfig(), grads=GradsConfig(compress), model=wide))
    _, sent, _ = compiled_traffic(run, "data")
    params = jax.tree.leaves(parts_of(run)[3].params)
    exchange = run.grads.exchange
    if isinstance(exchange, PowerSgd):
        want = sum(exchange.sent(leaf) for leaf in params)
    else:
        # Arrays as a device sees them whole, of which it sends half to the other.
        want = sum(
            2 * exchange.sent(math.prod(leaf.sharding.shard_shape(leaf.shape)), leaf.dtype, 2) for leaf in params
        )
    scalars = 256
    assert want <= sent < want + scalars
    plain = sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in params)
    assert sent < 0.6 * plain


@pytest.mark.drawn(0.5)
def test_a_run_resumes_bitwise_with_its_bases_and_errors(tmp_path):
    fields = {"mesh": "data=2,fsdp=4", "grads": GradsConfig("powersgd:2")}
    with runs.shared_programs():
        whole = train(runs.run_config(tmp_path, name="whole", **fields))
        directory = runs.stopped_at(tmp_path, 5, name="stopped", **fields)
        again = train(runs.run_config(tmp_path, name="stopped", **fields))
    assert runs.losses(directory) == runs.losses(whole.directory)
    assert again.evaluation == whole.evaluation


def test_what_compresses_nothing_is_refused():
    for text in ("powersgd", "powersgd:0", "powersgd:x", "int9", "plain"):
        with pytest.raises(ConfigError, match=r"grads\.compress"):
            GradsConfig(text)
    with pytest.raises(ValueError, match="without compression"):
        GradsConfig(feedback=1.0)
    assert [GradsConfig(text).error_feedback for text in ("int8", "topk:0.1", "powersgd:2")] == [0.0, 1.0, 1.0]
    assert dataclasses.replace(GradsConfig("int8"), feedback=0.5).error_feedback == 0.5
