"""Tasks of three functions: trained on meshes as on one device, predictions in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.config import ConfigError
from jaxllm.train.custom_task import CustomTask, predict_task, train_task


def collate(examples):
    return {name: np.array([one[name] for one in examples]) for name in examples[0]}


def predict(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["in"] + params["bias"])
    return jnp.argmax(hidden @ params["out"], -1)


def loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["in"] + params["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], batch["y"]).mean()


TASK = CustomTask(collate, loss, predict)


def task_data(rng: np.random.Generator, count: int = 64):
    """Examples of three classes, and first parameters."""
    centers = rng.normal(size=(4, 8)) * 2
    labels = rng.integers(0, 4, count)
    examples = [{"x": centers[y] + rng.normal(size=8) / 4, "y": int(y)} for y in labels]
    params = {"in": rng.normal(size=(8, 16)) / 3, "bias": np.zeros(16), "out": rng.normal(size=(16, 4)) / 4}
    return examples, params


@pytest.mark.parametrize("mesh", ["data=8", "tensor=4,data=2", "tensor=2"])
def test_training_on_a_mesh_is_that_on_one_device(mesh, float64, rng):
    examples, params = task_data(rng)
    losses = {"": [], mesh: []}
    found = {
        name: train_task(
            TASK, params, examples, optax.adam(0.02), mesh=name or "data=1", epochs=3, seed=1,
            report=lambda number, value, own=losses[name]: own.append((number, value)),
        )
        for name in losses
    }  # fmt: skip
    np.testing.assert_allclose(losses[mesh], losses[""], rtol=1e-10)
    assert [number for number, _ in losses[mesh]] == list(range(1, 25))
    assert losses[""][-1][1] < losses[""][0][1] / 2, "it learns"
    for one, other in zip(jax.tree.leaves(found[mesh]), jax.tree.leaves(found[""]), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-8, atol=1e-10)
    if "tensor" in mesh:
        size = int(mesh.partition("tensor=")[2][0])
        assert found[mesh]["in"].addressable_shards[0].data.shape == (8, 16 // size)
        assert found[mesh]["out"].addressable_shards[0].data.shape == (16 // size, 4)
    answers = predict_task(TASK, found[mesh], examples[:13], mesh=mesh)
    assert answers.shape == (13,)
    assert (answers == predict(params | jax.device_get(found[""]), collate(examples[:13]))).all()
    assert (answers == [one["y"] for one in examples[:13]]).mean() > 0.7


def test_what_is_refused(rng):
    examples, params = task_data(rng)
    for options, match in (
        ({"mesh": "fsdp=4"}, "has the axes data and tensor; name only these"),
        ({"mesh": "data=8", "batch_size": 12}, "batch_size = 12 does not divide over data = 8"),
        ({"mesh": "data=1", "batch_size": 99}, "64 examples do not fill a batch of batch_size = 99"),
    ):
        with pytest.raises(ConfigError, match=match):
            train_task(TASK, params, examples, optax.sgd(0.1), **options)
    with pytest.raises(ConfigError, match="no examples to predict"):
        predict_task(TASK, params, [], mesh="data=1")
