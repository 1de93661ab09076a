"""Packed weights multiplied by the kernel for CPUs: layers within their stacks, gradients, shards, what it leaves."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import functional, packed_weight
from jaxllm.models.attention_context import Segments
from jaxllm.models.packed_weight import PackedWeight, StackedLayer, within_stack
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import IntGrid, MinimumGrid
from jaxllm.quant.packing import pack_params
from pallas_kernels.packed_matmul import native
from sharding import MeshSpec
from tests import environment, tiny


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[str]:
    """Calls of the kernel that were traced; skips where it is no default."""
    if why := native.not_by_default():
        pytest.skip(f"the kernel {why}")
    made: list[str] = []

    def seen(name, function):
        return lambda *args: made.append(name) or function(*args)

    for name in ("stored_matmul", "stored_row_matmul"):
        monkeypatch.setattr(packed_weight, name, seen(name, getattr(native, name)))
    return made


def without_kernel(monkeypatch):
    monkeypatch.setattr(packed_weight, "may_be_default", lambda *_: False)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("weights", ["int4", "mxfp4", "w8a8", "int8"])
def test_a_scan_reads_layers_within_their_stack(weights, calls, monkeypatch, rng):
    """Logits of plain JAX to float32's rounding, whose sums have another order; layers are not sliced."""
    config = tiny.decoder(dtype="float32", embed_dim=64, heads=4, kv_heads=2, head_dim=32, mlp=96, layers=3, tied=False)
    model = functional(config)
    params = pack_params(model, model.init(jax.random.key(1)), weights)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (2, 5)))

    def logits(params):
        hidden, _ = model.forward(params, tokens, jnp.broadcast_to(jnp.arange(5), tokens.shape), Segments())
        return model.head(params, hidden)

    got = np.asarray(jax.jit(logits)(params))
    assert calls.count("stored_matmul") == (0 if weights == "w8a8" else 7)
    assert calls.count("stored_row_matmul") == 1
    _, join = within_stack(params["segments"]["0"])
    whole = join(jax.tree.map(lambda x: x[0], params["segments"]["0"]), jnp.int32(0))
    leaves = jax.tree.leaves(whole, is_leaf=lambda x: isinstance(x, StackedLayer))
    assert any(isinstance(leaf, StackedLayer) for leaf in leaves) == (weights != "w8a8")
    calls.clear()
    without_kernel(monkeypatch)
    want = np.asarray(jax.jit(lambda params: logits(params))(params))
    assert calls == []
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.drawn(0.5)
def test_gradients_are_those_of_the_dense_weight(calls, rng):
    form = CodeGroups(MinimumGrid(4), 32, -2, 2)
    values, scales = (jnp.stack(2 * [a]) for a in form.pack(jnp.asarray(rng.normal(size=(2, 32, 24)), jnp.float32)))
    layer = StackedLayer(values, scales, form, jnp.int32(1))
    dense = np.asarray(layer.dense(jnp.float32)).reshape(64, 24)
    assert layer.shape == (2, 32, 24)
    x, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 2, 2, 32), (3, 2, 24)))
    y, back = jax.vjp(lambda x: layer.project(x, (None, None, None), 2), x)
    assert calls == ["stored_matmul"]
    np.testing.assert_allclose(y, np.asarray(x).reshape(3, 2, 64) @ dense, rtol=0, atol=1e-4)
    np.testing.assert_allclose(back(cotangent)[0].reshape(3, 2, 64), cotangent @ dense.T, rtol=0, atol=1e-4)


@pytest.mark.drawn(0.5)
def test_every_device_multiplies_its_shard(calls, rng):
    form = CodeGroups(IntGrid(4), 8, -2)
    dense = form.unpack(*form.pack(jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)), jnp.float32)
    values, scales = form.pack(dense)
    x = jnp.asarray(rng.normal(size=(4, 2, 32)), jnp.float32)
    built = MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    with jax.set_mesh(built):
        place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(built, jax.P(*spec)))  # noqa: E731
        split = PackedWeight(place(values, "tensor", None), place(scales, None, "tensor", None), form)
        run = jax.jit(lambda x: split.project(x, ("batch", None, None), 1))
        got = run(place(x, "fsdp", None, "tensor"))
    assert calls == ["stored_matmul"]
    np.testing.assert_allclose(got, np.asarray(x) @ np.asarray(split.dense(jnp.float32)), rtol=0, atol=1e-4)


@pytest.mark.drawn(1)
def test_many_rows_and_few_outputs_are_left_to_xla(calls, rng):
    form = CodeGroups(IntGrid(4), 16, -2)
    wide, narrow = (
        PackedWeight(*form.pack(jnp.asarray(rng.normal(size=(32, n)), jnp.float32)), form) for n in (16, 15)
    )
    x = jnp.asarray(rng.normal(size=(1, native.MOST_ROWS + 1, 32)), jnp.float32)
    for weight, tokens in ((wide, x), (narrow, x[:, :1])):
        want = np.asarray(tokens) @ np.asarray(weight.dense(jnp.float32))
        np.testing.assert_allclose(weight.project(tokens, (None, None, None), 1), want, rtol=0, atol=1e-4)
    assert calls == []
    wide.project(x[:, 1:], (None, None, None), 1)
    assert calls == ["stored_matmul"]


PROGRAM = """
import pickle, sys
import jax, jax.numpy as jnp
from jax.experimental import serialize_executable
from jaxllm.models.packed_weight import PackedWeight, native_vectors
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import IntGrid

form = CodeGroups(IntGrid(4), 16, -2)
weight = PackedWeight(*form.pack(jnp.ones((32, 16))), form)
x = jnp.ones((1, 1, 32))
if sys.argv[2] == "write":
    made = jax.jit(lambda x, weight: weight.project(x, (None, None, None), 1)).lower(x, weight).compile()
    pickle.dump(serialize_executable.serialize(made)[0], open(sys.argv[1], "wb"))
else:
    shapes = jax.eval_shape(lambda: {"weight": weight})
    assert native_vectors(shapes) and not native_vectors({"weight": x})
    trees = jax.tree.structure(((x, weight), {})), jax.tree.structure(x)
    found = serialize_executable.deserialize_and_load(pickle.load(open(sys.argv[1], "rb")), *trees)
    print(abs(found(x, weight) - x @ weight.dense(jnp.float32)).max())
"""


@pytest.mark.drawn(1)
def test_a_program_of_another_process_is_loaded(tmp_path):
    """Stored programs call the kernel by its name, under which it has to be registered before."""
    for what in ("write", "read"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "program"), what]
        done = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-4
