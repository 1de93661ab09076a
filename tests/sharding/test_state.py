"""Shardings of a state, from its declared parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from sharding import DEFAULT, MeshSpec, ShardingError, abstract_params, derived_abstract, shardings_of

SHAPES = {
    "w": jax.ShapeDtypeStruct((3, 8, 4), jnp.bfloat16),
    "norm": {"gain": jax.ShapeDtypeStruct((8,), jnp.float32)},
}
AXES = {"w": ("layers", "embed", "mlp"), "norm": {"gain": ("embed",)}}


def mesh(text: str):
    spec = MeshSpec.parse(text)
    return spec.build(jax.devices()[: spec.abstract().size])


def test_every_leaf_gets_the_sharding_of_its_axes():
    on = mesh("fsdp=4,tensor=2")
    abstract = abstract_params(SHAPES, AXES, on, DEFAULT)
    assert abstract["w"].sharding.spec == P(None, "fsdp", "tensor")
    assert abstract["norm"]["gain"].sharding.spec == P("fsdp")
    assert (abstract["w"].shape, abstract["w"].dtype) == ((3, 8, 4), jnp.bfloat16)
    assert shardings_of(abstract)["w"] is abstract["w"].sharding
    assert abstract["w"].sharding.mesh == on


def test_an_error_names_the_leaf_by_its_path():
    with pytest.raises(ShardingError, match=r"^norm/gain: embed = 8 cannot be split 3 ways"):
        abstract_params(SHAPES, AXES | {"w": (None, None, None)}, mesh("fsdp=3"), DEFAULT)


def test_derived_shardings_are_those_jit_produces():
    """Optimizer state is sharded like its parameters, without running the initialisation first."""
    on = mesh("fsdp=2,tensor=2")
    abstract = abstract_params(SHAPES, AXES, on, DEFAULT)
    init = optax.adam(1e-3).init
    derived = derived_abstract(init, abstract, on)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), abstract)
    with jax.set_mesh(on):
        made = jax.jit(init)(params)
    assert jax.tree.structure(derived) == jax.tree.structure(made)
    for want, got in zip(jax.tree.leaves(derived), jax.tree.leaves(made), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    assert derived[0].mu["w"].sharding.spec == P(None, "fsdp", "tensor")
    assert derived[0].count.sharding.spec == P()
    # It can be given to a program as the place of its result.
    again = jax.jit(init, out_shardings=shardings_of(derived))(params)
    np.testing.assert_array_equal(again[0].count, 0)
