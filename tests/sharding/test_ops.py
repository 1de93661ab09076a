"""Operations that name the sharding of their result."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sharding
from sharding import DEFAULT, MeshSpec, ShardingError
from sharding.isolate import run_isolated


@functools.cache
def mesh(text: str):
    spec = MeshSpec.parse(text)
    return spec.build(jax.devices()[: spec.abstract().size])


def put(x, on, *axes):
    return jax.device_put(x, NamedSharding(on, P(*axes)))


def test_outside_a_mesh_they_are_the_plain_operations(rng):
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3), (3, 5)))
    assert sharding.current_mesh() is None
    assert sharding.axis_names("batch") == ()
    assert sharding.axis_size("batch", "mlp") == 1
    assert sharding.constrain(x, "batch", "no such axis") is x
    assert sharding.gather_weight(w, "embed", "mlp") is w
    np.testing.assert_array_equal(
        sharding.einsum("bd,df->bf", x, w, out=("batch", "act_mlp")), jnp.einsum("bd,df", x, w)
    )
    np.testing.assert_array_equal(sharding.take(w, jnp.array([2, 0]), out=("batch", None)), w[jnp.array([2, 0])])
    fn = lambda a: a  # noqa: E731
    assert sharding.shard_map(fn, (("batch", None),), ("batch", None)) is fn


def test_a_mesh_of_one_device_is_no_mesh():
    with jax.set_mesh(mesh("data=1,tensor=1")):
        assert sharding.current_mesh() is None
        assert sharding.axis_size("mlp") == 1


def test_einsum_puts_the_sum_where_it_is_told(rng):
    x, w = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=(8, 6)).astype(np.float32)
    on = mesh("data=2,tensor=2")
    with jax.set_mesh(on):

        @jax.jit
        def both(x, w):
            # x is split over what is summed: partial sums, then everyone or a part of the batch has the total.
            h = sharding.constrain(x, "batch", "act_mlp")
            down = sharding.constrain(w, "mlp", None)
            return sharding.einsum("bf,fd->bd", h, down, out=("batch", "act_embed")), sharding.einsum(
                "bf,fd->bd", h, down, out=(None, "act_vocab")
            )

        whole, split = both(x, w)
    assert whole.sharding.spec == P("data", None)
    assert split.sharding.spec == P(None, "tensor")
    np.testing.assert_allclose(whole, x @ w, rtol=0, atol=1e-5)
    np.testing.assert_allclose(split, x @ w, rtol=0, atol=1e-5)


@pytest.mark.parametrize("on", [None, "data=2,tensor=2"])
def test_project_is_a_product_over_the_last_dimensions(on, rng):
    x, w = rng.normal(size=(2, 3, 4, 6)).astype(np.float32), rng.normal(size=(4, 6, 8)).astype(np.float32)
    up = rng.normal(size=(8, 4, 2)).astype(np.float32)

    def both(x, w, up):
        down = sharding.project(x, w, ("batch", "seq", "act_embed"), contract=2)
        return down, sharding.project(down, up, ("batch", "seq", "act_heads", None))

    with contextlib.nullcontext() if on is None else jax.set_mesh(mesh(on)):
        if on is not None:
            x = put(x, mesh(on), "data", None, "tensor", None)
        down, heads = jax.jit(both)(x, w, up)
    if on is not None:
        assert down.sharding.spec == P("data", None, None)
        assert heads.sharding.spec == P("data", None, "tensor", None)
    np.testing.assert_allclose(down, np.einsum("bsnh,nhd->bsd", x, w), rtol=0, atol=1e-4)
    np.testing.assert_allclose(heads, np.einsum("bsd,dnh->bsnh", down, up), rtol=0, atol=1e-4)


def test_take_from_a_table_split_over_its_rows(rng):
    table = rng.normal(size=(10, 4)).astype(np.float32)
    ids = rng.integers(0, 10, (4, 3))
    with jax.set_mesh(mesh("data=2,tensor=2")):
        got = jax.jit(lambda t, i: sharding.take(t, i, out=("batch", "seq", "act_embed")))(
            put(table, mesh("data=2,tensor=2"), "tensor", None), ids
        )
    assert got.sharding.spec == P("data", None, None)
    np.testing.assert_array_equal(got, table[ids])


@pytest.mark.parametrize(
    ("on", "manual"),
    [
        ("data=2,fsdp=2,tensor=2", ("data",)),
        ("data=2,context=2,tensor=2", ("data",)),
        ("fsdp=2,context=2,tensor=2", ("fsdp",)),
        ("data=2,fsdp=2,tensor=2", ("data", "fsdp")),
    ],
)
def test_take_in_a_partly_manual_program(rng, on, manual):
    """Value and gradient of lookups at which XLA of jax 0.12 aborted: tokens and table split over different axes."""
    table, ids = rng.normal(size=(16, 4)).astype(np.float32), rng.integers(0, 16, (8, 6))
    weights = rng.normal(size=(8, 6, 4)).astype(np.float32)

    def here(table, ids, weights):
        def weighted(table):
            found = sharding.take(table, ids, out=("batch", "seq", "act_embed"))
            return jnp.sum(found * jax.sharding.reshard(weights, jax.typeof(found).sharding.spec)), found

        (_, found), grad = jax.value_and_grad(weighted, has_aux=True)(jax.sharding.reshard(table, P("tensor", None)))
        assert jax.typeof(grad).sharding.spec == P("tensor", None)
        return jax.sharding.reshard(found, P()), jax.lax.psum(jax.sharding.reshard(grad, P()), manual)

    with jax.set_mesh(mesh(on)):
        rows = P(manual)
        run = jax.shard_map(
            here, in_specs=(P(), rows, rows), out_specs=(rows, P()), axis_names=set(manual), check_vma=False
        )
        found, grad = jax.jit(run)(put(table, mesh(on)), put(ids, mesh(on), manual), put(weights, mesh(on), manual))
    np.testing.assert_array_equal(found, table[ids])
    want = np.zeros_like(table)
    np.add.at(want, ids, weights)
    np.testing.assert_allclose(grad, want, rtol=0, atol=1e-5)


def test_constrain_checks_sizes_by_name():
    with (
        jax.set_mesh(mesh("tensor=4")),
        pytest.raises(ShardingError, match=r"logits: act_vocab = 6 cannot be split 4 ways \(tensor=4\)"),
    ):
        jax.eval_shape(lambda x: sharding.constrain(x, "batch", "act_vocab", what="logits"), jnp.zeros((2, 6)))


def test_gathered_weights_scatter_their_gradient(rng):
    on = mesh("fsdp=2,tensor=2")
    w = put(rng.normal(size=(4, 6)).astype(np.float32), on, "fsdp", "tensor")
    x = put(rng.normal(size=(2, 4)).astype(np.float32), on, "fsdp", None)
    seen = {}
    with jax.set_mesh(on):

        @jax.jit
        def loss(w):
            whole = sharding.gather_weight(w, "embed", "mlp")
            seen["used"] = jax.typeof(whole).sharding.spec
            y = sharding.einsum("bd,df->bf", x, whole, out=("batch", "act_mlp"))
            return jnp.sum(y**2)

        grad = jax.jit(jax.grad(loss))
        got = grad(w)
        text = str(jax.make_jaxpr(loss)(w))
    assert seen["used"] == P(None, "tensor")
    assert got.sharding.spec == P("fsdp", "tensor"), "the gradient lives where the weight is stored"
    assert sharding.GATHERED_WEIGHT in text, "remat policies find gathered weights by this name"
    host = np.asarray(w)
    np.testing.assert_allclose(got, 2 * np.asarray(x).T @ (np.asarray(x) @ host), rtol=0, atol=1e-4)


def test_shard_map_gives_each_device_its_part():
    on = mesh("data=2,tensor=2")
    x = jnp.arange(16.0).reshape(4, 4)
    with jax.set_mesh(on):

        def local(x, nothing, scale):
            assert nothing is None
            assert sharding.current_mesh() is None, "inside, there is nothing to say"
            assert sharding.constrain(x, "batch", "act_mlp") is x
            assert sharding.gather_weight(x, "embed", "mlp") is x
            return x * scale, jax.lax.psum(x.sum(), sharding_names)

        sharding_names = sharding.axis_names("batch", "act_mlp")
        assert sharding_names == ("data", "tensor")
        run = sharding.shard_map(local, (("batch", "act_mlp"), None, ()), (("batch", "act_mlp"), ()))
        shards, total = jax.jit(lambda x: run(x, None, jnp.float32(2)))(x)
    assert shards.sharding.spec == P("data", "tensor")
    np.testing.assert_array_equal(shards, 2 * x)
    assert total == x.sum()


def test_shard_map_of_one_result_and_of_a_scalar():
    with jax.set_mesh(mesh("data=2,tensor=2")):
        one = sharding.shard_map(lambda x: x + 1, (("batch", None),), ("batch", None))
        np.testing.assert_array_equal(jax.jit(one)(jnp.zeros((4, 3))), np.ones((4, 3)))
        scalar = sharding.shard_map(lambda x: jax.lax.psum(x.sum(), "data"), (("batch",),), ())
        assert jax.jit(scalar)(jnp.ones(4)) == 4


def test_shard_map_refuses_sizes_that_do_not_divide():
    with jax.set_mesh(mesh("tensor=4")), pytest.raises(ShardingError, match="act_heads = 6 cannot be split 4 ways"):
        sharding.shard_map(lambda x: x, (("act_heads",),), ("act_heads",))(jnp.zeros(6))


def test_rules_do_not_outlive_their_block():
    other = DEFAULT.override(batch=())
    with contextlib.suppress(RuntimeError), sharding.use_rules(other):
        assert sharding.current_rules() is other
        raise RuntimeError
    assert sharding.current_rules() is DEFAULT


def test_rules_are_not_leaked_through_jits_cache():
    """The same layer under other rules is another program, as ``use_rules`` is entered inside what is jitted."""

    def program(rules):
        def run(x):
            with sharding.use_rules(rules):
                return sharding.constrain(x, "batch", "act_mlp")

        return jax.jit(run)

    x = jnp.zeros((4, 4))
    with jax.set_mesh(mesh("data=2,tensor=2")):
        default, other = program(DEFAULT), program(DEFAULT.override(batch=(), act_mlp=("data",)))
        for _ in range(2):
            assert default(x).sharding.spec == P("data", "tensor")
            assert other(x).sharding.spec == P(None, "data")
    # The mesh, unlike the rules, is in jit's key: the same function serves another mesh.
    with jax.set_mesh(mesh("tensor=4")):
        assert default(x).sharding.spec == P(None, "tensor")
    assert default(x).sharding.is_fully_replicated


@pytest.mark.drawn(0.3)
def test_a_row_is_multiplied_by_the_matrix_unit_of_a_tpu():
    assert run_isolated("tests.sharding.targets:units_of_one_row", "v6e:1x1") == {"plain": False, "by_rows": True}


def test_a_row_is_multiplied_as_it_is_elsewhere(rng):
    x, w = rng.normal(size=(1, 1, 6)).astype(np.float32), rng.normal(size=(6, 2, 3)).astype(np.float32)

    def multiply(x):
        return jnp.einsum("bsd,dnh->bsnh", x, w)

    got = jax.jit(lambda x: sharding.multiply_rows(multiply, x, 2))(x)
    np.testing.assert_array_equal(got, jax.jit(multiply)(x))
    grads = [
        jax.grad(lambda x, f=f: f(x).sum())(x) for f in (multiply, lambda x: sharding.multiply_rows(multiply, x, 2))
    ]
    np.testing.assert_array_equal(*grads)
