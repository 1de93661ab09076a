"""Integer codes in groups: nearest values, the bytes of compressed-tensors, and shards packed by themselves."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from jaxllm.hub.stored_codes import pack_bits, unpack_bits
from jaxllm.models import functional, packed_weight
from jaxllm.models.attention_context import Segments
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant.codebooks import CODEBOOKS, CodebookGrid
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import IntGrid, MinimumGrid
from jaxllm.quant.packing import pack_params
from pallas_kernels._compat import TargetDevice, interpreting
from pallas_kernels.packed_matmul import PackedCodes, packed_matmul
from sharding import MeshSpec, abstract_params, shardings_of
from tests import tiny


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group", "contract"), [(2, 8, 1), (3, 16, 2), (4, 24, 2), (8, None, 1), (4, 5, 1), (5, 8, 2), (7, 16, 1)]
)
def test_every_value_is_the_nearest_of_its_group(bits, group, contract, symmetric, rng):
    """A value is at most half a step from the weight, and the bytes are as many as the formula says."""
    weight = rng.normal(size=(3, 4, 16, 5)[2 - contract :]).astype(np.float32) + 0.3
    form = CodeGroups(IntGrid(bits, symmetric), group, -2, contract)
    values, scales = form.pack(jnp.asarray(weight))
    back = np.asarray(form.unpack(values, scales, jnp.float32))
    assert form.shape(values.shape) == weight.shape
    assert values.nbytes + scales.nbytes == form.nbytes(weight.shape)
    lead = weight.shape[: weight.ndim - 1 - contract]
    flat, got = (x.reshape(*lead, -1, 5) for x in (weight, back))
    size = group or flat.shape[-2]
    for start in range(0, flat.shape[-2], size):
        part, near = flat[..., start : start + size, :], got[..., start : start + size, :]
        low, high = np.minimum(part.min(-2, keepdims=True), 0), np.maximum(part.max(-2, keepdims=True), 0)
        step = 2 * np.maximum(-low, high) / (2**bits - 1) if symmetric else (high - low) / (2**bits - 1)
        # The largest value of a symmetric grid is half a step below the largest weight.
        assert (np.abs(near - part) <= step * 0.5001).all()
        assert (np.abs(near - part) > 0).any()


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_are_those_of_compressed_tensors(bits, rng):
    codes = rng.integers(0, 2**bits, size=(3, 37), dtype=np.uint8)
    words = pack_bits(codes, bits)
    want = pack_to_int32(torch.from_numpy(codes.astype(np.int16) - 2 ** (bits - 1)).to(torch.int8), bits)
    np.testing.assert_array_equal(words, want.numpy())
    np.testing.assert_array_equal(unpack_bits(words, bits, 37), codes)
    form = CodeGroups(IntGrid(bits))
    whole = rng.integers(0, 2**bits, size=(32, 3), dtype=np.uint8)
    packed = np.asarray(form.pack_codes(jnp.asarray(whole), whole.shape))
    np.testing.assert_array_equal(packed.T, pack_bits(whole.T.copy(), bits).view(np.uint8))
    np.testing.assert_array_equal(form.unpack_codes(jnp.asarray(packed)), whole)


@pytest.mark.drawn(1)
def test_a_sharded_model_is_that_of_one_device(rng, float64):
    """Packed by shard, and multiplied by shard: the logits of one device."""
    config = tiny.decoder(embed_dim=64, heads=4, kv_heads=2, head_dim=8, mlp=64, layers=1)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (4, 8)))
    outs = []
    for name, count in (("data=1", 1), ("fsdp=2,tensor=2", 4)):
        built = MeshSpec.parse(name).build(jax.devices()[:count])
        model = functional(config)
        with jax.set_mesh(built):
            abstract = abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
            params = model.init(jax.random.key(1), shardings_of(abstract))
            packed = pack_params(model, params, "int4")
            leaves = jax.tree.leaves(packed, is_leaf=lambda x: isinstance(x, PackedWeight))
            assert sum(isinstance(leaf, PackedWeight) for leaf in leaves) == (8 if config.tied else 9)
            placed = jax.device_put(tokens, jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built)))

            def logits(params, tokens, model=model):
                hidden, _ = model.forward(params, tokens, jnp.broadcast_to(jnp.arange(8), tokens.shape), Segments())
                return model.head(params, hidden)

            outs.append(np.asarray(jax.jit(logits)(packed, placed)))
    np.testing.assert_allclose(outs[1], outs[0], rtol=0, atol=1e-10)


def test_gradients_of_activations_on_a_mesh_are_those_of_the_dense_weight(rng, float64):
    """Inputs split over devices, and a result that is split over the same ones: partial sums are reduce-scattered."""
    built = MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    form = CodeGroups(IntGrid(4), 8, -2)
    values, scales = form.pack(jnp.asarray(rng.normal(size=(32, 6))))
    dense = np.asarray(form.unpack(values, scales, jnp.float64))
    x, cotangent = rng.normal(size=(4, 2, 32)), rng.normal(size=(4, 2, 6))
    with jax.set_mesh(built):
        place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(built, jax.P(*spec)))  # noqa: E731
        split = PackedWeight(place(values, "tensor", None), place(scales, None, "tensor", None), form)
        for out in (("batch", None, None), ("batch", "residual_seq", None)):
            y, back = jax.vjp(
                jax.jit(lambda x, out=out: split.project(x, out, 1)), place(jnp.asarray(x), "fsdp", None, "tensor")
            )
            np.testing.assert_allclose(y, x @ dense, rtol=0, atol=1e-12)
            (dx,) = back(jax.device_put(jnp.asarray(cotangent), y.sharding))
            np.testing.assert_allclose(dx, cotangent @ dense.T, rtol=0, atol=1e-12)


def test_errors_name_what_would_be_legal():
    with pytest.raises(ValueError, match="int4: 2 codes share bytes, and 7 is no multiple of 2"):
        CodeGroups(IntGrid(4)).pack(jnp.zeros((7, 3)))
    with pytest.raises(ValueError, match="bits = 9: integer codes have 2 to 8 bits"):
        IntGrid(9)
    form = CodeGroups(IntGrid(4), 8)
    values, scales = form.pack(jnp.ones((16, 3)))
    with pytest.raises(ValueError, match="8 inputs in groups of 8 have 1 scales, not 2: the mesh splits a group"):
        form.unpack(values[:4], scales, jnp.float32)
    assert dataclasses.replace(form, group=None).scale_axes(("embed", "mlp")) == (None, "embed", "mlp")


GRIDS = [IntGrid(4), IntGrid(3), IntGrid(5, False), IntGrid(8), MinimumGrid(4), CodebookGrid("nf4"),
         CodebookGrid("nf3"), CodebookGrid("mxfp4"), CodebookGrid("fp8")]  # fmt: skip


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
@pytest.mark.parametrize(("group", "contract"), [(16, 2), (None, 1), (12, 2)])
def test_a_matmul_with_packed_codes_is_that_of_the_dense_weight(grid, group, contract, rng, float64):
    """Lanes, and the sums of groups times the values of code 0; groups that are shorter or cut a tuple too."""
    weight = jnp.asarray(rng.normal(size=(3, 16, 5)) + 0.2)
    form = CodeGroups(grid, group, -2, contract)
    packed = PackedWeight(*form.pack(weight), form)
    x = jnp.asarray(rng.normal(size=(2, 4, 3, 16)))
    want = np.einsum("bsnh,nho->bso", x, np.asarray(packed.dense(jnp.float64)))
    np.testing.assert_allclose(jax.jit(lambda x: packed.project(x, ("batch", "seq", "embed"), 2))(x), want, atol=1e-12)
    assert np.abs(want - np.einsum("bsnh,nho->bso", x, weight)).max() > 1e-3


@pytest.mark.drawn(2)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
@pytest.mark.parametrize(("group", "contract"), [(16, 2), (8, 1), (None, 2), (12, 2)])
def test_kernels_have_the_operands_of_the_matmul(grid, group, contract, rng, float64, monkeypatch):
    """On devices with a kernel, whose plain implementation stands in here; what it does not take goes as before."""
    weight = jnp.asarray(rng.normal(size=(3, 16, 5)) + 0.2)
    form = CodeGroups(grid, group, -2, contract)
    packed = PackedWeight(*form.pack(weight), form)
    x = jnp.asarray(rng.normal(size=(2, 4, 3, 16)))
    found = form.kernel_terms(x.reshape(2, 4, 48), packed.values, packed.scales)
    whole = grid.bits in (4, 8) or (grid.bits == 3 and group != 12)  # which cuts tuples of eight codes
    assert (found is not None) == (whole and grid.name != "fp8")
    want = packed.project(x, ("batch", "seq", "embed"), 2)
    used = []
    monkeypatch.setattr(packed_weight, "target_device", lambda: TargetDevice("tpu", "TPU Test"))
    monkeypatch.setattr(packed_weight, "packed_matmul", lambda *args: used.append(1) or packed_matmul(*args))
    np.testing.assert_allclose(packed.project(x, ("batch", "seq", "embed"), 2), want, rtol=0, atol=1e-6)
    assert bool(used) == (found is not None)


@pytest.mark.parametrize(("bits", "group"), [(5, 16), (4, 6)])
def test_formats_that_the_device_s_kernel_lacks_are_plain_jax(bits, group, rng, monkeypatch):
    """5 bits, and groups that the TPU's kernel refuses by name, are multiplied all the same where nobody named it."""
    form = CodeGroups(IntGrid(bits), group, -2)
    packed = PackedWeight(*form.pack(jnp.asarray(rng.normal(size=(48, 8)), jnp.float32)), form)
    x = jnp.asarray(rng.normal(size=(1, 2, 48)), jnp.float32)
    want = packed.project(x, (None, None, None), 1)
    monkeypatch.setattr(packed_weight, "target_device", lambda: TargetDevice("tpu", "TPU Test"))
    np.testing.assert_allclose(packed.project(x, (None, None, None), 1), want, rtol=0, atol=1e-5)
    if found := form.kernel_terms(x, packed.values, packed.scales):
        with interpreting(), pytest.raises(NotImplementedError, match="24 tuples in groups of 3 have none"):
            packed_matmul(x[0], *found[:3], implementation="pallas_tpu")
    else:
        with pytest.raises(ValueError, match="5 bits; codes have 2, 3, 4, 6 or 8 bits"):
            packed_matmul(x[0], packed.values, packed.scales[0], PackedCodes(bits))


def test_terms_are_summed_before_they_are_rounded(rng, monkeypatch):
    """In bfloat16 the error is that of one rounding of the result, 2^-8, and not of one for each lane."""
    monkeypatch.setattr(packed_weight, "may_be_default", lambda *_: False)
    form = CodeGroups(IntGrid(3), 16, -2)
    packed = PackedWeight(*form.pack(jnp.asarray(rng.normal(size=(256, 32)))), form)
    x = jnp.asarray(rng.normal(size=(1, 8, 256)), jnp.bfloat16)
    got = np.asarray(packed.project(x, (None, None, None), 1).astype(jnp.float32))
    want = np.asarray(x, np.float32) @ np.asarray(packed.dense(jnp.bfloat16).astype(jnp.float32))
    assert (np.abs(got - want) <= 1.01 * 2**-8 * np.abs(want) + 1e-4).all()


@pytest.mark.parametrize("grid", GRIDS[5:], ids=lambda grid: grid.name)
def test_levels_are_decoded_and_encoded_to_the_nearest(grid, rng):
    """Decoding is exact for every finite code, and no level is nearer than the chosen one."""
    levels = CODEBOOKS[grid.name]
    codes = np.arange(levels.size, dtype=np.uint8)
    got = np.asarray(grid.decode(jnp.asarray(codes), grid.params([jnp.ones(())])))
    finite = np.isfinite(levels)
    np.testing.assert_array_equal(got[finite], levels[finite])
    x = rng.normal(size=200).astype(np.float32) * levels[finite].max() * 0.6
    back = np.asarray(
        grid.decode(grid.encode(jnp.asarray(x), grid.params([jnp.ones(())])), grid.params([jnp.ones(())]))
    )
    best = np.abs(x[:, None] - levels[finite]).min(axis=1)
    np.testing.assert_allclose(np.abs(x - back), best, rtol=1e-6, atol=1e-7)
