"""Parameters: declared once, initialised by seed and name alone."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from jaxllm.models import BlockConfig, DecoderConfig, MlpConfig, functional, param_count
from jaxllm.models.params import draw, normal
from tests import tiny

CONFIG = tiny.decoder(
    dtype="float32",
    embed_dim=48,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=96,
    vocab_size=512,
    layers=3,
    bias="qkv",
    qk_norm="head",
)


@functools.cache
def drawn(seed: int = 0) -> Any:
    return jax.device_get(functional(CONFIG).init(jax.random.key(seed)))


def flat(tree: Any) -> dict[str, Any]:
    is_axes = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    found = jax.tree.leaves_with_path(tree, is_leaf=is_axes)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def test_the_tree_has_every_weight_its_shape_and_its_axes():
    model = functional(CONFIG)
    block = "segments/0/0"
    expected = {
        "embedding/table": ((512, 48), ("vocab", "vocab_embed")),
        f"{block}/attention/q": ((3, 48, 4, 16), ("layers", "embed", "heads", "head_dim")),
        f"{block}/attention/k": ((3, 48, 2, 16), ("layers", "embed", "kv_heads", "head_dim")),
        f"{block}/attention/v": ((3, 48, 2, 16), ("layers", "embed", "kv_heads", "head_dim")),
        f"{block}/attention/o": ((3, 4, 16, 48), ("layers", "heads", "head_dim", "embed")),
        f"{block}/attention/q_bias": ((3, 4, 16), ("layers", "heads", "head_dim")),
        f"{block}/attention/k_bias": ((3, 2, 16), ("layers", "kv_heads", "head_dim")),
        f"{block}/attention/v_bias": ((3, 2, 16), ("layers", "kv_heads", "head_dim")),
        f"{block}/attention/q_norm/gain": ((3, 16), ("layers", "head_dim")),
        f"{block}/attention/k_norm/gain": ((3, 16), ("layers", "head_dim")),
        f"{block}/attention_norm/gain": ((3, 48), ("layers", "embed")),
        f"{block}/mlp/gate": ((3, 48, 96), ("layers", "embed", "mlp")),
        f"{block}/mlp/up": ((3, 48, 96), ("layers", "embed", "mlp")),
        f"{block}/mlp/down": ((3, 96, 48), ("layers", "mlp", "embed")),
        f"{block}/mlp_norm/gain": ((3, 48), ("layers", "embed")),
        "head/norm/gain": ((48,), ("embed",)),
    }
    shapes, axes, arrays = flat(model.abstract()), flat(model.logical_axes()), flat(drawn())
    assert {name: (leaf.shape, axes[name]) for name, leaf in shapes.items()} == expected
    assert axes.keys() == shapes.keys()
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == {
        n: (s.shape, s.dtype) for n, s in shapes.items()
    }
    assert param_count(model.abstract()) == sum(np.prod(shape) for shape, _ in expected.values())
    assert all(model.rules.mesh_axes(a) is not None for names in axes.values() for a in names), "every axis has a rule"


def test_untied_adds_a_head_and_groups_stack_on_their_own():
    blocks = (BlockConfig(mlp=MlpConfig(8)), BlockConfig(mlp=MlpConfig(16)))
    config = DecoderConfig(vocab_size=32, embed_dim=8, layers=6, prefix=blocks[:1], pattern=blocks, tied=False)
    shapes = {name: leaf.shape for name, leaf in flat(functional(config).abstract()).items()}
    assert shapes["head/weight"] == (32, 8)
    gates = {name: shape for name, shape in shapes.items() if name.endswith("mlp/gate")}
    assert gates == {
        "segments/0/0/mlp/gate": (1, 8, 8),
        "segments/1/0/mlp/gate": (2, 8, 8),
        "segments/1/1/mlp/gate": (2, 8, 16),
        "segments/2/0/mlp/gate": (1, 8, 8),
    }


def test_standard_deviations():
    """Inputs of variance one stay so: 1 / sqrt(fan in); branches into the stream are 1 / sqrt(2 layers) of that."""
    out = 1 / np.sqrt(2 * 3)
    expected = {
        "embedding/table": 48**-0.5,
        "attention/q": 48**-0.5,
        "attention/k": 48**-0.5,
        "attention/v": 48**-0.5,
        "attention/o": (4 * 16) ** -0.5 * out,
        "mlp/gate": 48**-0.5,
        "mlp/up": 48**-0.5,
        "mlp/down": 96**-0.5 * out,
    }
    arrays = flat(drawn())
    for name, std in expected.items():
        found = next(a for path, a in arrays.items() if path.endswith(name))
        sigma = std / np.sqrt(2 * found.size)  # standard error of a standard deviation
        assert abs(found.std() - std) < 5 * sigma, name
        assert abs(found.mean()) < 5 * std / np.sqrt(found.size), name
        # The tails of a normal: a uniform draw of the same deviation ends at 1.73.
        assert 3 < np.abs(found).max() / std < 6.5, name
    for name, array in arrays.items():
        if name.endswith("gain"):
            np.testing.assert_array_equal(array, 1)
        if name.endswith("bias"):
            np.testing.assert_array_equal(array, 0)


def test_every_weight_draws_with_a_key_of_its_own(monkeypatch):
    module = sys.modules["jaxllm.models.functional"]  # as an attribute, that name is the function
    monkeypatch.setattr(module, "draw", lambda param, key, stack, out: jax.random.key_data(key))

    def keys(**fields: Any) -> dict[str, tuple[int, ...]]:
        init = functional(dataclasses.replace(CONFIG, **fields)).init(jax.random.key(0))
        return {name: tuple(np.asarray(key).tolist()) for name, key in flat(init).items()}

    other = BlockConfig(mlp=MlpConfig(8))
    many = keys(prefix=(other,), pattern=(CONFIG.pattern[0], other), layers=4, tied=False)
    assert len(set(many.values())) == len(many) == 4 * 9 + 2 * 5 + 3
    # The same weight of another model has the same key: nothing but the seed and its name counts.
    for name, key in keys().items():
        assert many.get(name, key) == key


def test_no_two_weights_nor_layers_are_drawn_alike():
    seen = {}
    for name, array in flat(drawn()).items():
        if array.std() > 0:
            for layer in array if name.startswith("segments") else [array]:
                key = tuple(layer.flatten()[:4])
                assert key not in seen, (name, seen[key])
                seen[key] = name
    assert len(seen) == 1 + 7 * 3
    assert (drawn()["embedding"]["table"] == drawn(1)["embedding"]["table"]).mean() < 0.01


def test_values_do_not_depend_on_the_sharding():
    model, mesh = functional(CONFIG), sharding.MeshSpec.parse("fsdp_tp").build()
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    with jax.set_mesh(mesh):
        params = model.init(jax.random.key(0), sharding.shardings_of(abstract))
    placed = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), params, abstract)
    assert all(jax.tree.leaves(placed)), "born in its shard"
    assert params["segments"]["0"]["0"]["mlp"]["up"].addressable_shards[0].data.size == 3 * 48 * 96 // 8
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), drawn())  # to the last bit


def test_values_do_not_depend_on_what_else_there_is():
    attention = dataclasses.replace(CONFIG.pattern[0].attention, bias="none", qk_norm="none")
    block = dataclasses.replace(CONFIG.pattern[0], attention=attention)
    other = flat(
        jax.device_get(functional(dataclasses.replace(CONFIG, pattern=(block,), tied=False)).init(jax.random.key(0)))
    )
    shared = flat(drawn()).keys() & other.keys()
    assert "segments/0/0/attention/q" in shared
    assert "head/weight" in other.keys() - shared
    for name in shared:
        np.testing.assert_array_equal(other[name], flat(drawn())[name], err_msg=name)


def test_float64_parameters_are_drawn_in_float64(float64):
    weight = normal((5, 7), ("embed", "mlp"), jnp.dtype("float64"), role="matrix", fan_in=5)
    array = np.asarray(draw(weight, jax.random.key(0), (3,), None))
    assert (array.shape, array.dtype) == ((3, 5, 7), np.float64)
    assert (array != array.astype(np.float32)).mean() > 0.9, "not float32 numbers in float64"
