"""Quantised matrices: GPTQ is the paper's recurrence, and packed files are those of other libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme

from jaxllm.hub.compressed_tensors import IntScheme, config_entry, packed_matrices, packed_tensors
from jaxllm.hub.gguf.gguf_codes import CODE_KINDS
from jaxllm.hub.gptq_awq import awq_tensors, column_codes, gptq_tensors
from jaxllm.hub.stored_codes import in_one_format
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant.codebooks import CODEBOOKS, CodebookGrid
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import GridParams, IntGrid, MinimumGrid
from jaxllm.quant.methods.gptq import gptq
from jaxllm.quant.methods.nearest import round_to_nearest, spread
from pallas_kernels.packed_matmul import native
from tests.hub.test_stored_codes import gguf_tensor, packed
from tests.proofs.harness import proof
from tests.quant.test_gptq import by_column, drawn


@proof("quant", count=60, sample=1, bound={"codes": 0.0, "scales": 1e-10, "of_nearest": 1.0}, float64=True)
def gptq_is_the_recurrence(seed: int) -> dict[str, float]:
    """Codes that differ from a column-by-column reference in numpy, its scales, and its error over the nearest's."""
    rng = np.random.default_rng(seed)
    inputs, size, bits = int(rng.integers(9, 90)), int(rng.choice([0, 4, 8, 32])), int(rng.choice([3, 4, 8]))
    symmetric, act_order = bool(rng.integers(2)), bool(rng.integers(2))
    weight, x = drawn(rng, inputs)
    gram, grid = x.T @ x, IntGrid(bits, symmetric)
    want, dense, params = by_column(weight, gram, bits, symmetric, size or inputs, act_order)
    codes, got = gptq(jnp.asarray(weight), jnp.asarray(gram), grid, size or None, act_order=act_order)
    plain, own = round_to_nearest(jnp.asarray(weight), grid, size or None)
    nearest = np.asarray(grid.decode(plain, spread(own, size or inputs, inputs)))
    scales = np.asarray([params[g][0] for g in sorted(params)])
    return {
        "codes": float((np.asarray(codes) != want).sum()),
        "scales": float(np.abs(np.asarray(got.scale) / scales - 1).max()),
        "of_nearest": float(np.linalg.norm(x @ (weight - dense)) / np.linalg.norm(x @ (weight - nearest))),
    }


@proof("quant", count=200, sample=3, bound={"ours": 0.0, "theirs": 0.0})
def files_are_those_of_compressed_tensors(seed: int) -> dict[str, float]:
    """A random matrix, written here, is what both libraries read: largest difference from codes times scales.

    From nine rows on: compressed-tensors 0.20 cannot unpack the zero points of fewer.
    """
    rng = np.random.default_rng(seed)
    bits, symmetric = int(rng.integers(2, 9)), bool(rng.integers(2))
    group = None if rng.random() < 0.2 else int(rng.choice([8, 16, 24, 64]))
    rows, columns = int(rng.integers(9, 70)), (group or 8) * int(rng.integers(1, 6))
    codes = rng.integers(0, 2**bits, (rows, columns), dtype=np.uint8)
    groups = columns // group if group else 1
    scale = rng.uniform(1e-4, 1, (rows, groups)).astype(np.float32)
    zero = None if symmetric else rng.integers(0, 2**bits, (rows, groups)).astype(np.float32)
    tensors = packed_tensors("layer.weight", codes, scale, zero, bits)
    entry = config_entry([IntScheme(bits, group, symmetric)], [])
    middle = np.full((rows, groups), 2.0 ** (bits - 1), np.float32)
    params = GridParams(*(np.repeat(x, columns // groups, axis=1) for x in (scale, middle if zero is None else zero)))
    want = (codes.astype(np.float32) - params.zero) * params.scale
    whole = packed_matrices(entry, tensors)["layer.weight"]
    begin, end = sorted(int(n) for n in rng.integers(0, rows + 1, 2))
    parts = [
        whole.dense(slice(None), slice(None)) - want,
        whole.dense(slice(begin, end), slice(1, None)) - want[begin:end, 1:],
    ]
    scheme = QuantizationScheme.model_validate(entry["config_groups"]["group_0"])
    given = {name.removeprefix("layer."): torch.from_numpy(np.array(x)) for name, x in tensors.items()}
    theirs = PackedQuantizationCompressor.decompress(given, scheme)["weight"].numpy()
    return {
        "ours": max(float(np.abs(x).max(initial=0)) for x in parts),
        "theirs": float(np.abs(theirs - want).max()),
    }


@proof("quant", count=200, sample=1, bound={"matmul": 1e-12, "dense": 0.0, "beyond_a_step": 1e-6}, float64=True)
def packed_matmuls_are_dense_ones(seed: int) -> dict[str, float]:
    """Random grids, groups and shapes: a matmul with packed codes, over the dequantised weight's, relative.

    And the dequantised weight over its packed and unpacked codes, and errors of rounding in steps less a half.
    """
    rng = np.random.default_rng(seed)
    bits = int(rng.integers(2, 9))
    grids = [IntGrid(bits), IntGrid(bits, False), MinimumGrid(bits), *(CodebookGrid(name) for name in CODEBOOKS)]
    grid = grids[int(rng.integers(len(grids)))]
    last, heads, outputs = 8 * int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 12))
    group = None if rng.random() < 0.2 else int(rng.integers(1, heads * last + 1))
    form = CodeGroups(grid, group, -2, 2)
    weight = jnp.asarray(rng.normal(size=(heads, last, outputs)) + rng.normal())
    flat = form.flatten(weight)
    params = form.fit(flat)
    codes = grid.encode(flat, form.spread(params, flat.shape[0]))
    weight_packed = PackedWeight(form.pack_codes(codes, weight.shape), form.join(params), form)
    dense = np.asarray(weight_packed.dense(jnp.float64))
    x = rng.normal(size=(1, int(rng.integers(1, 5)), heads, last))
    got = np.asarray(jax.jit(lambda x: weight_packed.project(x, (None, None, None), 2))(jnp.asarray(x)))
    want = np.einsum("bsnh,nho->bso", x, dense)
    spread_ = form.spread(params, flat.shape[0])
    values = np.asarray(grid.decode(codes, spread_)).reshape(weight.shape)
    step = np.asarray(spread_.scale).reshape(weight.shape)
    over = np.abs(values - weight) / step - 0.5 if isinstance(grid, IntGrid) else np.zeros(1)
    return {
        "matmul": float(np.abs(got - want).max() / np.einsum("bsnh,nho->bso", np.abs(x), np.abs(dense)).max()),
        "dense": float(np.abs(dense - values).max()),
        "beyond_a_step": max(0.0, float(over.max())) if isinstance(grid, IntGrid) and not grid.symmetric else 0.0,
    }


@proof("quant", count=200, sample=2, bound={"dense": 2e-6, "widened": 4e-6, "bytes": 1.2})
def gguf_blocks_stay_packed(seed: int) -> dict[str, float]:
    """Random blocks of every format: packed and dequantised over GGML's values, relative to the largest of them.

    And the same in a format that holds those of a second one too, and bytes in memory over those of the file.
    """
    rng = np.random.default_rng(seed)
    names = list(CODE_KINDS)
    name, second = names[seed % len(names)], names[int(rng.integers(len(names)))]
    rows, columns = int(rng.integers(1, 20)), 256 * int(rng.integers(1, 4))
    tensor, want = gguf_tensor(name, rng, rows, columns)
    other, _ = gguf_tensor(second, rng, rows, columns)
    weight, most = packed(tensor.stored), float(np.abs(want).max())
    whole = in_one_format([tensor.stored, other.stored])
    assert whole is not None
    errors = [np.abs(np.asarray(one.dense(jnp.float32)).T - want).max() / most for one in (weight, packed(whole[0]))]
    return {"dense": float(errors[0]), "widened": float(errors[1]), "bytes": weight.nbytes / tensor.nbytes}


@proof("quant", count=200, sample=2, bound={"matmul": 1e-6, "bits": 0.0})
def native_matmuls_are_dense_ones(seed: int) -> dict[str, float]:
    """Blocks of every GGUF format by the kernel for CPUs: error over the size of the sum without cancellations.

    And bits of a row that depend on the rows beside it. Without a compiler, plain JAX in their place.
    """
    rng = np.random.default_rng(seed)
    names = list(CODE_KINDS)
    rows, columns = int(rng.integers(16, 150)), 256 * int(rng.integers(1, 5))
    tensor, _ = gguf_tensor(names[seed % len(names)], rng, rows, columns)
    weight = packed(tensor.stored)
    x = jnp.asarray(rng.normal(size=(1, int(rng.integers(1, 40)), columns)), jnp.float32)
    run = jax.jit(lambda x: weight.project(x, (None, None, None), 1))
    got, dense = np.asarray(run(x))[0], np.asarray(weight.dense(jnp.float32), np.float64)
    usual = np.linalg.norm(np.abs(np.asarray(x[0], np.float64)) @ np.abs(dense)) / np.sqrt(columns)
    last = np.asarray(run(x[:, -1:]))[0, 0] if not native.not_by_default() else got[-1]
    return {
        "matmul": float(np.linalg.norm(got - np.asarray(x[0], np.float64) @ dense) / usual),
        "bits": float((last != got[-1]).sum()),
    }


@proof("quant", count=200, sample=2, bound={"codes": 0.0, "values": 0.0, "packed": 0.0})
def gptq_and_awq_files_are_read_and_written(seed: int) -> dict[str, float]:
    """Random matrices in both layouts, zero points that wrap among them: differences after writing and reading."""
    rng = np.random.default_rng(seed)
    awq, bits = bool(rng.integers(2)), int(rng.choice([2, 3, 4, 8]))
    bits = 4 if awq else bits
    groups, group, outputs = int(rng.integers(1, 5)), 32 * int(rng.integers(1, 4)), 32 * int(rng.integers(1, 4))
    codes = rng.integers(0, 2**bits, (outputs, groups * group), dtype=np.uint8)
    scale = rng.uniform(1e-3, 1, (outputs, groups)).astype(np.float16)
    zero = rng.integers(0, 2**bits, (outputs, groups)).astype(np.float32)
    tensors = awq_tensors("l", codes, scale, zero) if awq else gptq_tensors("l", codes, scale, zero, bits)
    one = column_codes({"quant_method": "awq" if awq else "gptq", "bits": bits}, tensors)["l.weight"]
    want = (codes - np.repeat(zero, group, axis=1)) * np.repeat(scale.astype(np.float32), group, axis=1)
    return {
        "codes": float((one.codes(slice(None)) != codes).sum()),
        "values": float(np.abs(one.dense(slice(None), slice(None)) - want).max()),
        "packed": float(np.abs(np.asarray(packed(one).dense(jnp.float32)).T - want).max()),
    }
