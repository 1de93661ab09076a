"""Checkpoint round trips: a saved state is restored bit for bit, on any mesh."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from tests.checkpoint.states import abstract_on, assert_same, make_state

BLOCKING = CheckpointConfig(saving="blocking")
META = {"cursor": 3, "config": {"lr": 1e-3, "names": ["a", "b"]}, "none": None}


@pytest.fixture
def fsdp():
    return jax.make_mesh((8,), ("fsdp",))


def roundtrip(directory, state, target):
    with Checkpointer(directory, BLOCKING) as checkpointer:
        assert checkpointer.save(1, state, META)
        restored, meta = checkpointer.restore(target)
    assert meta == META
    return restored


def test_same_mesh(tmp_path, fsdp):
    state = make_state(0, 5, fsdp)
    restored = roundtrip(tmp_path, state, state)
    assert_same(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 1), (8, 1)])
def test_other_meshes(tmp_path, fsdp, shape):
    """8-way fsdp -> other layouts, inside another mesh's context, as a train step would be."""
    state = make_state(1, 5, fsdp)
    mesh = jax.make_mesh(shape, ("fsdp", "tensor"))
    with jax.set_mesh(mesh):
        restored = roundtrip(tmp_path, state, abstract_on(state, mesh))
    assert_same(restored, state)
    wq = restored["params"]["blocks"]["wq"]
    assert wq.sharding == NamedSharding(mesh, P(None, "fsdp", "tensor"))
    assert len(wq.addressable_shards) == shape[0] * shape[1]


def test_without_sharding_and_to_numpy(tmp_path, fsdp):
    state = make_state(2, 5, fsdp)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored = roundtrip(tmp_path, state, plain)
    assert_same(restored, state)
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(restored))
    with Checkpointer(tmp_path, read_only=True) as reader:
        host, _ = reader.restore_params(jax.tree.map(np.asarray, state["params"]))
        assert all(type(x) is np.ndarray for x in jax.tree.leaves(host))
        assert_same(host, jax.tree.map(np.asarray, state["params"]))


def test_restored_state_can_be_donated(tmp_path):
    state = {name: leaf for name, leaf in make_state(3, 1).items() if name != "rng"}
    restored = roundtrip(tmp_path, state, state)
    double = lambda s: jax.tree.map(lambda x: x * 2, s)  # noqa: E731
    assert_same(jax.jit(double, donate_argnums=0)(restored), double(state))


def test_saved_values_are_those_of_the_call(tmp_path):
    """Donating or overwriting right after an asynchronous save does not reach the checkpoint."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x, host = jnp.zeros((256, 256)), np.zeros(4)
    with Checkpointer(tmp_path, CheckpointConfig(keep_last=9)) as checkpointer:
        for n in range(5):
            checkpointer.save(n, {"x": x, "host": host}, {})
            x, host[:] = step(x), n + 1
    with Checkpointer(tmp_path, read_only=True) as reader:
        for n in range(5):
            saved, _ = reader.restore(step=n)
            assert (saved["x"] == n).all()
            assert (saved["host"] == n).all()


def test_float64(tmp_path, fsdp, float64):
    state = {"w": jax.device_put(np.linspace(0, 1, 16), NamedSharding(fsdp, P("fsdp"))), "n": jnp.arange(3)}
    assert state["w"].dtype == np.float64
    assert state["n"].dtype == np.int64
    assert_same(roundtrip(tmp_path, state, state), state)


def test_float64_without_x64_is_refused(tmp_path):
    state = {"w": np.linspace(0, 1, 16)}
    with Checkpointer(tmp_path, BLOCKING) as checkpointer:
        checkpointer.save(1, state, {})
        with pytest.raises(CheckpointError, match=r"leaf w is float64.*jax_enable_x64"):
            checkpointer.restore({"w": jax.ShapeDtypeStruct((16,), np.float64)})
        assert_same(checkpointer.restore(state)[0], state)


def test_keys(tmp_path, fsdp):
    keys = jax.device_put(jax.random.split(jax.random.key(3), 8), NamedSharding(fsdp, P("fsdp")))
    state = {"one": jax.random.key(1), "many": keys, "rbg": jax.random.key(2, impl="rbg"), "raw": jax.random.PRNGKey(7)}
    restored = roundtrip(tmp_path, state, state)
    assert_same(restored, state)
    assert restored["many"].sharding == keys.sharding
    draw = jax.random.normal(restored["rbg"], (3,))
    np.testing.assert_array_equal(draw, jax.random.normal(state["rbg"], (3,)))


DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4", "int2"),
]


def test_every_dtype_and_shape(tmp_path):
    state = {}
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        for shape in [(), (0,), (3, 0, 2), (1,), (2, 3, 1)]:
            state[f"{name}{shape}"] = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    state["big endian"] = np.arange(3, dtype=">i4")
    state["strided"] = np.arange(12.0).reshape(3, 4).T
    restored = roundtrip(tmp_path, state, {**state, "big endian": np.arange(3, dtype="i4")})
    assert_same(restored, {**state, "big endian": np.arange(3, dtype="i4")})


@pytest.mark.drawn(0.3)
@given(
    st.dictionaries(st.text(max_size=6), hnp.arrays(np.float32, hnp.array_shapes(max_dims=2)), min_size=1, max_size=5)
)
def test_any_key(tmp_path_factory, tree):
    """Keys with dots, slashes, percent signs, nothing at all: they name files, and come back as they were."""
    state = {"params": tree, "list": [np.float32(1), {"x": np.int32(2)}]}
    directory = tmp_path_factory.mktemp("keys")
    assert_same(roundtrip(directory, state, state), jax.tree.map(np.asarray, state))
    with Checkpointer(directory, read_only=True) as reader:
        loose, _ = reader.restore()
        assert_same(loose["params"], tree)
        assert loose["list"]["1"]["x"] == 2


def test_bare_array_and_optimizer_trees(tmp_path):
    x = jnp.arange(4.0)
    assert_same(roundtrip(tmp_path / "a", x, x), x)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask={"a": True, "b": False}))
    state = chain.init({"a": x, "b": x * 2})
    assert_same(roundtrip(tmp_path / "b", state, jax.eval_shape(lambda: state)), state)


def test_plain_orbax_reads_the_arrays(tmp_path):
    """The format is Orbax's: nobody needs this package to get at the weights."""
    state = make_state(4, 1)
    roundtrip(tmp_path, state, state)
    handler = orbax.checkpoint.PyTreeCheckpointHandler(use_ocdbt=False)
    raw = handler.restore(tmp_path / "step_00000001" / "state")
    np.testing.assert_array_equal(raw["params"]["blocks"]["wq"], state["params"]["blocks"]["wq"])


def test_params_only_touches_no_other_file(tmp_path, fsdp):
    state = make_state(5, 1, fsdp)
    roundtrip(tmp_path, state, state)
    for file in (tmp_path / "step_00000001" / "state").glob("opt_state*/*"):
        file.unlink()
    mesh = jax.make_mesh((2,), ("tensor",))
    with Checkpointer(tmp_path, read_only=True) as reader:
        params, meta = reader.restore_params(abstract_on(state["params"], mesh))
        assert_same(params, state["params"])
        assert meta == META
        embed, _ = reader.restore_params(state["params"]["embed"], prefix="params/embed")
        assert_same(embed, state["params"]["embed"])
        loose, _ = reader.restore_params(prefix="params/blocks")
        assert set(loose) == {"wq", "wo", "norm"}
        with pytest.raises(CheckpointError, match="it has opt_state, params, rng, step"):
            reader.restore_params(prefix="weights")
