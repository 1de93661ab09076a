"""Codes of other libraries' files that stay packed: GGUF's blocks, GPTQ and AWQ."""

from __future__ import annotations

import mmap

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme

from jaxllm.hub import HubError
from jaxllm.hub.bitsandbytes import int8_entry, int8_rows, int8_tensors
from jaxllm.hub.compressed_tensors import IntScheme, config_entry, packed_matrices
from jaxllm.hub.float_codes import value_tensors
from jaxllm.hub.gguf import ggml_formats
from jaxllm.hub.gguf.gguf_codes import CODE_KINDS, GgufCodes
from jaxllm.hub.gguf.gguf_file import GgufTensor
from jaxllm.hub.gguf.gguf_model import unpermute
from jaxllm.hub.gptq_awq import ColumnCodes, awq_tensors, column_codes, gptq_tensors
from jaxllm.hub.stored_codes import StoredCodes, in_one_format, pack_rows
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant.codebooks import CodebookGrid
from jaxllm.quant.methods.nearest import round_to_nearest

KINDS = {kind.name: kind for kind in ggml_formats.KINDS.values()}


def gguf_tensor(name: str, rng: np.random.Generator, rows: int, columns: int) -> tuple[GgufTensor, np.ndarray]:
    """A tensor of random blocks, and its values by the decoders of whole blocks."""
    kind = KINDS[name]
    blocks = rng.integers(0, 256, (rows * columns // kind.values, kind.layout.itemsize), dtype=np.uint8)
    blocks = blocks.view(kind.layout).reshape(-1)
    for field in {"d", "m"} & set(kind.layout.names or ()):
        blocks[field] = rng.uniform(-2, 2, blocks.size)
    values = np.empty(rows * columns, np.float32)
    ggml_formats.dequantize(kind, blocks.view(np.uint8), values)
    data = mmap.mmap(-1, blocks.nbytes)
    data.write(blocks.tobytes())
    return GgufTensor("t", (rows, columns), kind, data, 0), values.reshape(rows, columns)


def packed(stored: StoredCodes) -> PackedWeight:
    """The matrix [I, O] as it is placed."""
    form = stored.form(-2, 1)
    values = pack_rows(stored.codes(slice(None)), form.grid.bits).T
    scales = np.stack([x.T for x in stored.params(slice(None))])
    return PackedWeight(jnp.asarray(values), jnp.asarray(scales), form)


def test_int8_rows_of_bitsandbytes(rng):
    """Values are int8 times the row's largest magnitude over 127; what is not read is named."""
    values, largest = rng.integers(-127, 128, (5, 24)).astype(np.int8), rng.uniform(0.1, 2, 5).astype(np.float32)
    tensors = {"l.weight": values, "l.SCB": largest, "l.weight_format": np.zeros((), np.uint8), "l.bias": largest}
    given = int8_entry(["lm_head"])
    found = int8_rows(given, tensors)
    assert set(found) == {"l.weight", "l.bias"}
    one = found["l.weight"]
    want = values * (largest[:, None] / 127)
    np.testing.assert_allclose(one.dense(slice(1, 4), slice(2, None)), want[1:4, 2:], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(packed(one).dense(jnp.float32)).T, want, rtol=1e-6)
    again = int8_tensors("l", one.codes(slice(None)), one.params(slice(None))[0])
    np.testing.assert_array_equal(again["l.weight"], values)
    np.testing.assert_allclose(again["l.SCB"], largest, rtol=1e-6)
    assert str(int8_rows(given | {"llm_int8_threshold": 0.0}, tensors)["l.weight"].form(-2, 1)).endswith("from inf on")
    with pytest.raises(HubError, match="4-bit codes are not read here"):
        int8_rows({"load_in_4bit": True}, tensors)
    with pytest.raises(HubError, match=r"wants l\.SCB of its rows; there is none"):
        int8_rows(given, {"l.weight": values})
    with pytest.raises(HubError, match=r"wants l\.SCB of its rows; it is \[4\]"):
        int8_rows(given, {"l.weight": values, "l.SCB": largest[1:]})
    with pytest.raises(HubError, match=r"l\.weight_format is not 0"):
        int8_rows(given, tensors | {"l.weight_format": np.ones((), np.uint8)})
    with pytest.raises(HubError, match="llm_int8_threshold = -1; legal: 0 or a positive number"):
        int8_rows(given | {"llm_int8_threshold": -1}, tensors)


@pytest.mark.parametrize("name", CODE_KINDS)
def test_blocks_of_gguf_stay_packed(name, rng):
    """Dequantised and multiplied, they are the values that GGML makes of the blocks; rows may be reordered."""
    tensor, want = gguf_tensor(name, rng, 8, 512)
    stored = tensor.stored
    assert isinstance(stored, StoredCodes)
    weight, most = packed(stored), np.abs(want).max()
    np.testing.assert_allclose(np.asarray(weight.dense(jnp.float32)).T, want, rtol=0, atol=2e-6 * most)
    x = rng.normal(size=(1, 3, 512)).astype(np.float32)
    got = weight.project(jnp.asarray(x), (None, None, None), 1)
    np.testing.assert_allclose(got, x @ want.T, rtol=0, atol=3e-5 * most * np.abs(x).sum(-1).max())
    whole = want.astype(np.float64)
    scale, minimum = (np.repeat(x, stored.form(-2, 1).group, axis=1) for x in stored.affine(slice(None)))
    np.testing.assert_allclose(stored.codes(slice(None)) * scale + minimum, whole, rtol=0, atol=2e-6 * most)
    turned = GgufCodes(tensor, lambda rows: unpermute(rows, 4))
    np.testing.assert_allclose(
        np.asarray(packed(turned).dense(jnp.float32)).T, unpermute(want, 4), rtol=0, atol=2e-6 * most
    )
    assert weight.nbytes <= 1.2 * tensor.nbytes


def test_layers_of_several_kinds_are_widened_to_one(rng):
    """Q4_K_M has layers of Q4_K and of Q6_K, which one array holds."""
    made = [gguf_tensor(name, rng, 4, 256) for name in ("Q4_K", "Q6_K", "Q5_0")]
    whole = in_one_format([tensor.stored for tensor, _ in made])
    assert whole is not None
    assert {(one.form(-2, 1).grid.bits, one.form(-2, 1).group) for one in whole} == {(6, 16)}
    for one, (_, want) in zip(whole, made, strict=True):
        np.testing.assert_allclose(
            np.asarray(packed(one).dense(jnp.float32)).T, want, rtol=0, atol=4e-6 * np.abs(want).max()
        )


@pytest.mark.parametrize(("bits", "layout"), [(2, "gptq"), (3, "gptq_v2"), (4, "gptq"), (8, "gptq"), (4, "awq")])
def test_files_of_gptq_and_awq(bits, layout, rng):
    """Written and read, codes and parameters are the same; the arrays are read by the libraries' own formulas too."""
    outputs, inputs, group = 32, 64, 32
    codes = rng.integers(0, 2**bits, (outputs, inputs), dtype=np.uint8)
    scale = rng.uniform(0.1, 1, (outputs, 2)).astype(np.float16)
    zero = rng.integers(0, 2**bits, (outputs, 2)).astype(np.float32)
    if layout == "awq":
        tensors = awq_tensors("l", codes, scale, zero)
        given = {"quant_method": "awq", "bits": 4, "version": "gemm"}
        words = tensors["l.qweight"].view(np.uint32)
        nibbles = np.stack([words >> 4 * i & 15 for i in (0, 4, 1, 5, 2, 6, 3, 7)], axis=-1).reshape(inputs, outputs)
        np.testing.assert_array_equal(nibbles.T, codes)
    else:
        tensors = gptq_tensors("l", codes, scale, zero, bits)
        given = {"quant_method": "gptq", "bits": bits, "checkpoint_format": layout}
        if bits != 3:
            shifts = np.arange(0, 32, bits)
            words = tensors["l.qweight"].view(np.uint32)[:, None] >> shifts[None, :, None].astype(np.uint32)
            np.testing.assert_array_equal((words & 2**bits - 1).reshape(inputs, outputs).T, codes)
            zeros = tensors["l.qzeros"].view(np.uint32)[:, :, None] >> shifts.astype(np.uint32)
            np.testing.assert_array_equal(((zeros & 2**bits - 1).reshape(2, outputs) + 1).T % 2**bits, zero)
        if layout == "gptq_v2":
            zero = (zero - 1) % 2**bits
    found = column_codes(given, {**tensors, "l.bias": np.zeros(outputs, np.float16), "norm": scale})
    assert sorted(found) == ["l.weight", "norm"]
    one = found["l.weight"]
    assert isinstance(one, ColumnCodes)
    np.testing.assert_array_equal(one.codes(slice(3, 9)), codes[3:9])
    np.testing.assert_array_equal(one.zeros(slice(None)), zero)
    want = (codes - np.repeat(zero, group, axis=1)) * np.repeat(scale, group, axis=1).astype(np.float32)
    np.testing.assert_array_equal(one.dense(slice(None), slice(5, None)), want[:, 5:])
    np.testing.assert_array_equal(np.asarray(packed(one).dense(jnp.float32)).T, want)


def test_groups_of_inputs_that_are_not_neighbours_are_dequantised(rng):
    codes = rng.integers(0, 16, (8, 32), dtype=np.uint8)
    scale, zero = rng.uniform(0.1, 1, (8, 2)).astype(np.float16), np.full((8, 2), 8.0, np.float32)
    tensors = gptq_tensors("l", codes, scale, zero, 4)
    tensors["l.g_idx"] = rng.permutation(tensors["l.g_idx"])
    given = {"quant_method": "gptq", "bits": 4}
    one = column_codes(given, tensors)["l.weight"]
    want = (codes - 8.0) * scale.astype(np.float32)[:, tensors["l.g_idx"]]
    np.testing.assert_array_equal(one.dense(slice(None), slice(None)), want)
    with pytest.raises(HubError, match=r"l\.g_idx does not name a group of 2"):
        column_codes(given, tensors | {"l.g_idx": tensors["l.g_idx"] + 1})
    with pytest.raises(HubError, match=r"l\.qweight is there, and no l\.scales"):
        column_codes(given, {name: x for name, x in tensors.items() if name != "l.scales"})
    with pytest.raises(HubError, match="bits = 5; read: 2, 3, 4, 8"):
        column_codes(given | {"bits": 5}, tensors)
    with pytest.raises(HubError, match=r"the layout 'marlin'; read: gptq, gptq_v2"):
        column_codes(given | {"checkpoint_format": "marlin"}, tensors)
    with pytest.raises(HubError, match="are not of one matrix in 8 bits"):
        column_codes(given | {"bits": 8}, tensors)


@pytest.mark.parametrize("kind", ["fp8", "int8", "mxfp4"])
def test_values_of_compressed_tensors(kind, rng):
    """Float8, int8 and MXFP4 are what compressed-tensors' own decompressors make of the arrays, plain and packed."""
    rows, columns = 16, 64
    entry = config_entry([IntScheme(8, None, True)], [], "fp8" if kind == "int8" else kind)
    if kind == "int8":
        entry["format"] = "int-quantized"
        entry["config_groups"]["group_0"]["weights"] |= {"type": "int"}
        values = rng.integers(-128, 128, (rows, columns), dtype=np.int8)
        scale = rng.uniform(0.1, 1, (rows, 1)).astype(np.float32)
        tensors, want = {"l.weight": values, "l.weight_scale": scale}, values * scale
    else:
        grid = CodebookGrid(kind)
        weight = jnp.asarray(rng.normal(size=(columns, rows)), jnp.float32)
        codes, params = round_to_nearest(weight, grid, 32 if kind == "mxfp4" else None)
        tensors = value_tensors("l.weight", kind, np.asarray(codes).T, np.asarray(params.scale).T)
        scheme = QuantizationScheme.model_validate(entry["config_groups"]["group_0"])
        compressor = MXFP4PackedCompressor if kind == "mxfp4" else NaiveQuantizationCompressor
        want = compressor.decompress({name[2:]: as_torch(x) for name, x in tensors.items()}, scheme)["weight"]
        want = want.float().numpy()
    one = packed_matrices(entry, tensors)["l.weight"]
    assert isinstance(one, StoredCodes)
    np.testing.assert_array_equal(one.dense(slice(2, 9), slice(3, None)), want[2:9, 3:])
    np.testing.assert_array_equal(np.asarray(packed(one).dense(jnp.float32)).T, want)
    assert len(np.unique(want)) > 12
    with pytest.raises(HubError, match=r"l\.weight_scale is .*has scales"):
        packed_matrices(entry, tensors | {"l.weight_scale": tensors["l.weight_scale"][:-1]})
    entry["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    assert isinstance(packed_matrices(entry, tensors)["l.weight"], StoredCodes)
    entry["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    with pytest.raises(HubError, match="quantises activations with stored scales"):
        packed_matrices(entry, tensors)


def as_torch(x: np.ndarray) -> torch.Tensor:
    """The array in torch, float8 too."""
    if x.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.array(x))
