"""Shardings inferred from forward passes: rules, values on a mesh, bytes of each device."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import ShardingError
from sharding.infer import infer_shardings, infer_specs
from tests.sharding.foreign_models import FAMILIES, D, F


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_of_other_libraries_models(family, rng):
    model = FAMILIES[family](rng)
    for one in infer_shardings(model.loss, model.params, *model.batch, size=4):
        name = re.findall(r"\w+", one.path)[-1]
        if name in model.rules:
            assert one.rule == model.rules[name], one
        assert one.dimension is None or one.shape[one.dimension] % 4 == 0
    names = {re.findall(r"\w+", path)[-1] for path in paths(model.params)}
    assert model.rules.keys() <= names


def paths(params):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_loss_is_that_of_one_device(family, float64, rng):
    """And its gradients; a device has a quarter of the matrices' bytes, and little else."""
    assert inference_error(FAMILIES[family](rng)) < 1e-12


def inference_error(model, size: int = 4) -> float:
    """Error of loss and gradients on a mesh of so many devices, in units of the largest gradient."""
    run = jax.value_and_grad(model.loss)
    want, grads = jax.jit(run)(model.params, *model.batch)
    specs = infer_specs(model.loss, model.params, *model.batch, axis="tensor", size=size)
    mesh = jax.make_mesh((size,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])
    there = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, jax.P))
    placed = jax.tree.map(jax.device_put, model.params, there)
    matrices = [leaf for leaf in jax.tree.leaves(placed) if leaf.size >= D * D]
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in matrices)
    assert own == pytest.approx(sum(leaf.nbytes for leaf in matrices) / size, rel=0.05)
    loss, found = jax.jit(run)(placed, *model.batch)
    largest = max(float(np.abs(one).max()) for one in jax.tree.leaves(grads))
    apart = jax.tree.map(lambda one, other: float(np.abs(np.asarray(one) - other).max()), found, grads)
    return max(abs(float(loss / want) - 1), max(jax.tree.leaves(apart)) / largest)


@pytest.mark.drawn(1)
def test_the_program_sums_once_after_each_fan_in(rng):
    """Two sums a layer, as Megatron's tensor parallelism has them, and those of the vocabulary."""
    from jaxllm.compiler import collectives

    model = FAMILIES["llama"](rng)
    specs = infer_specs(model.loss, model.params, *model.batch, axis="tensor", size=4)
    mesh = jax.make_mesh((4,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    shapes = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec)),
        model.params, specs,
    )  # fmt: skip
    found = collectives.read(jax.jit(model.loss).lower(shapes, *model.batch).compile().as_text()).collectives
    features = math.prod(model.batch[0].shape) * D * 4
    assert sum(one.count for one in found if one.kind == "all-reduce" and one.bytes == features) in (4, 5)
    assert not [one for one in found if one.kind != "all-reduce" and one.bytes >= features]


def test_what_does_not_divide_is_copied_and_says_why(rng):
    params = {"a": np.ones((D, 6)), "b": np.ones((6, D)), "c": np.ones((D, F))}
    found = infer_shardings(lambda p, x: (x @ p["a"]) @ p["b"] @ p["c"], params, np.ones((2, D)), size=4)
    assert [one.rule for one in found] == ["copied", "fan-out", "fan-in"]
    assert found[0].why == "fan-out: 6 does not divide over 4"
    assert found[0].spec("tensor") == jax.P()


def test_a_forward_pass_that_cannot_be_traced():
    with pytest.raises(ShardingError, match="cannot be traced with these parameters and inputs"):
        infer_shardings(lambda p, x: x @ p, np.ones((3, 4)), np.ones((2, 5)), size=2)
