"""Activations in int8: exact against integers in numpy, outliers as their paper defines them, and on meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant.formats import int8_activations
from jaxllm.quant.formats.int8_activations import Int8Activations
from jaxllm.quant.formats.outlier_columns import MOST_GATHERED, OutlierColumns
from jaxllm.quant.grids import IntGrid
from jaxllm.quant.packing import pack_params
from pallas_kernels._compat import TargetDevice
from sharding import MeshSpec, abstract_params, shardings_of
from tests import tiny


def integer_reference(x, codes, scales, size):
    """Sums over groups in int64, times the token's and the group's scale, in float64."""
    token = np.abs(x).max(-1, keepdims=True) / 127
    token = np.where(token > 0, token, 1 / 127)
    rounded = np.round(x / token).astype(np.int64)
    total = np.zeros((*x.shape[:-1], codes.shape[-1]))
    for g, start in enumerate(range(0, x.shape[-1], size)):
        part = rounded[..., start : start + size] @ codes[start : start + size].astype(np.int64)
        total += part * scales[g]
    return total * token


def made(form, rng, heads=3, width=16, outputs=5):
    weight = jnp.asarray(rng.normal(size=(heads, width, outputs)))
    packed = PackedWeight(*form.pack(weight), form)
    codes = np.asarray(form.unpack_codes(packed.values)).reshape(heads * width, outputs).astype(np.int64)
    return packed, codes - 2 ** (form.grid.bits - 1), np.asarray(packed.scales, np.float64)[0]


@pytest.fixture(params=["plain JAX", "kernel"])
def operands(request, monkeypatch):
    """The operands that a kernel of TPUs would have, multiplied by the same operation in plain JAX; or none."""
    calls = []
    if request.param == "kernel":
        monkeypatch.setattr(int8_activations, "target_device", lambda: TargetDevice("tpu", "TPU v6 lite"))
        run = int8_activations.packed_matmul
        monkeypatch.setattr(int8_activations, "packed_matmul", lambda *args: calls.append(args[0].shape) or run(*args))
    return request.param, calls


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, None), (4, 8), (8, 12), (4, 20)])
def test_products_are_those_of_integers(bits, group, operands, rng, float64):
    """Groups that are shorter too, and a token of zeros."""
    form = Int8Activations(IntGrid(bits), group, -2, 2)
    packed, codes, scales = made(form, rng)
    x = rng.normal(size=(2, 4, 48)) * 10.0 ** rng.integers(-3, 3, (2, 4, 1))
    x[1, 2] = 0
    got = jax.jit(lambda x: packed.project(x.reshape(2, 4, 3, 16), (None, None, None), 2))(jnp.asarray(x))
    want = integer_reference(x, codes, scales, group or 48)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13 * np.abs(want).max())
    assert operands[1] == ([(8, 48)] if operands[0] == "kernel" and (bits, group) in ((4, None), (4, 8)) else [])
    rounded = np.asarray(form.round_activations(jnp.asarray(x)))
    dense = np.asarray(packed.dense(jnp.float64)).reshape(48, 5)
    np.testing.assert_allclose(rounded @ dense, want, rtol=0, atol=1e-13 * np.abs(want).max())
    assert 1e-4 < np.abs(got - x @ dense).max() / np.abs(want).max() < 0.05


@pytest.mark.parametrize("count", [0, 3, MOST_GATHERED, MOST_GATHERED + 1])
def test_outliers_are_multiplied_apart(count, operands, rng, float64):
    """The decomposition in numpy; more outliers than are gathered too. Plain int8 is far worse."""
    form = OutlierColumns(IntGrid(8), None, -2, 1)
    packed, codes, scales = made(form, rng, heads=1, width=48, outputs=64)
    packed = PackedWeight(packed.values[0], packed.scales[:, 0], form)
    scales = np.asarray(packed.scales, np.float64)[0]
    x = rng.uniform(-2, 2, size=(2, 4, 48))
    places = rng.choice(48, count, replace=False)
    x[0, 1, places] = rng.choice([-1, 1], count) * rng.uniform(30, 60, count)
    outliers = np.zeros(48, bool)
    outliers[places] = True
    got = np.asarray(jax.jit(lambda x: packed.project(x, (None, None, None), 1))(jnp.asarray(x)))
    dense = codes * scales
    want = integer_reference(np.where(outliers, 0, x), codes, scales, 48) + np.where(outliers, x, 0) @ dense
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13 * np.abs(want).max())
    assert operands[1] == ([(16, 48)] if operands[0] == "kernel" else [])
    plain = integer_reference(x, codes, scales, 48)
    exact = x @ dense
    if count:
        assert np.linalg.norm(got[0, 1] - exact[0, 1]) < 0.3 * np.linalg.norm(plain[0, 1] - exact[0, 1])
    rounded = np.asarray(form.round_activations(jnp.asarray(x)))
    np.testing.assert_allclose(rounded @ dense, want, rtol=0, atol=1e-13 * np.abs(want).max())


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("name", ["w8a8", "w4a8", "llm_int8", "int4", "lut4"])
def test_meshes_give_the_logits_of_one_device(name, rng, float64):
    """Tokens, inputs and outputs split over devices, packed by shard: the same packed weights on one device."""
    config = tiny.decoder(embed_dim=128, heads=4, kv_heads=2, head_dim=16, mlp=128, layers=1)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (4, 8)))
    model = functional(config)

    def logits(params, tokens):
        hidden, _ = model.forward(params, tokens, jnp.broadcast_to(jnp.arange(8), tokens.shape), Segments())
        return model.head(params, hidden)

    built = MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    with jax.set_mesh(built):
        abstract = abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
        params = model.init(jax.random.key(1), shardings_of(abstract))
        packed = pack_params(model, params, name)
        placed = jax.device_put(tokens, jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built)))
        got = np.asarray(jax.jit(logits)(packed, placed))
    params, packed = (jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree) for tree in (params, packed))
    want, plain = jax.jit(logits)(packed, tokens), jax.jit(logits)(params, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)
    assert np.abs(got - plain).max() > 1e-4


def test_scales_of_tokens_are_those_of_all_their_inputs(rng, float64):
    """Inputs split over devices: one scale for a token, found over all devices, and partial sums added."""
    built = MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    form = OutlierColumns(IntGrid(8), None, -2, 1, threshold=3.0)
    weight = rng.normal(size=(32, 6))
    values, scales = form.pack(jnp.asarray(weight))
    x = jnp.asarray(rng.normal(size=(4, 2, 32)) * 2)
    want = PackedWeight(values, scales, form).project(x, (None, None, None), 1)
    with jax.set_mesh(built):
        place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(built, jax.P(*spec)))  # noqa: E731
        # A scale for the inputs of each device, here the same.
        split = PackedWeight(
            place(values, "tensor", None), place(jnp.repeat(scales, 2, axis=1), None, "tensor", None), form
        )
        got = jax.jit(lambda x: split.project(x, ("batch", "seq", None), 1))(place(x, "fsdp", None, "tensor"))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=2"])
def test_gradients_go_straight_through(mesh, rng, float64):
    """Those of the dequantised weight, on one device and with tokens and inputs split over several."""
    form = Int8Activations(IntGrid(4), 8, -2)
    values, scales = form.pack(jnp.asarray(rng.normal(size=(32, 6))))
    dense = np.asarray(form.unpack(values, scales, jnp.float64))
    x, cotangent = jnp.asarray(rng.normal(size=(4, 2, 32))), jnp.asarray(rng.normal(size=(4, 2, 6)))
    built = MeshSpec.parse(mesh or "data=1").build(jax.devices()[: 4 if mesh else 1])
    with jax.set_mesh(built):
        if mesh:
            place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(built, jax.P(*spec)))  # noqa: E731
            values, scales = place(values, "tensor", None), place(scales, None, "tensor", None)
            x = place(x, "fsdp", None, "tensor")
        packed = PackedWeight(values, scales, form)
        y, back = jax.vjp(jax.jit(lambda x: packed.project(x, ("batch", None, None), 1)), x)
        (dx,) = back(jax.device_put(cotangent, y.sharding))
    np.testing.assert_allclose(dx, np.asarray(cotangent) @ dense.T, rtol=0, atol=1e-12)


def test_what_has_no_int8_product_is_refused():
    with pytest.raises(ValueError, match="symmetric int8 or int4, not int4 with zero points"):
        Int8Activations(IntGrid(4, False))
    with pytest.raises(ValueError, match="one scale for each output"):
        OutlierColumns(IntGrid(8), 32)
    form = Int8Activations(IntGrid(4), 3)
    packed = PackedWeight(*form.pack(jnp.ones((6, 2))), form)
    with pytest.raises(ValueError, match="groups of 3 inputs cut bytes of 2 codes; choose a multiple of 2"):
        packed.project(jnp.ones((1, 1, 6)), (None, None, None), 1)
