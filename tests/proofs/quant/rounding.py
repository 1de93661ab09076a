"""Quantised matrices: GPTQ is the paper's recurrence, packed files are those of compressed-tensors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme

from jaxllm.hub.compressed_tensors import IntScheme, config_entry, packed_matrices, packed_tensors
from jaxllm.quant.grids import GridParams, IntGrid
from jaxllm.quant.methods.gptq import gptq
from jaxllm.quant.methods.nearest import round_to_nearest, spread
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
    entry = config_entry(IntScheme(bits, group, symmetric), [])
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
