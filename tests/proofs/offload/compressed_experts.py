"""Compressed experts of a trained mixture: bits by expert (EdgeMoE), and the ternary dictionary code (QMoE)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.convert import quantise as quantising
from jaxllm.convert.quantise import QuantiseConfig, quantise
from jaxllm.hub import load_hf, open_source
from jaxllm.hub.families.config_json import config_json
from jaxllm.hub.huggingface import HubModel, export_hf
from jaxllm.models import functional
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant import pack_params
from jaxllm.quant.formats.ternary_dictionary import TernaryDictionary
from jaxllm.quant.packing import packed_weight
from jaxllm.quant.ternary_code import decode_row, encode
from tests.proofs.harness import proof
from tests.proofs.moe_models.training import text
from tests.proofs.offload.trained_mixture import CONFIG, held_out_loss, trained

ROWS, LENGTH = 32, 64
WAYS = {
    "int2": QuantiseConfig("gptq", 2, 0, None, ROWS, LENGTH, only="experts"),
    "int3": QuantiseConfig("gptq", 3, 0, None, ROWS, LENGTH, only="experts"),
    "by_expert": QuantiseConfig("gptq", 4, 0, None, ROWS, LENGTH, budget=2.5, only="experts"),
    "ternary": QuantiseConfig("gptq", 2, 0, None, ROWS, LENGTH, codebook="ternary", only="experts"),
}


@proof("offload", count=20, sample=1, float64=True, bound={"matmul": 1e-12}, counts=("weights", "bits"))
def ternary_experts_are_their_dense_ones(seed: int) -> dict[str, float]:
    """Experts of drawn sizes and shares of zeros: decoded exactly, row by row too; matmuls of the dense matrices.

    A weight takes less than a bit with 88.5% zeros or more, scales and padding included, from 512 inputs on.
    """
    rng = np.random.default_rng(seed)
    experts, outputs = int(rng.integers(1, 4)), int(rng.integers(1, 48))
    inputs, zeros = int(rng.choice([1, 33, 200, 512, 1536])), float(rng.choice([0.3, 0.7, 0.885, 0.9, 0.97]))
    other = (1 - zeros) / 2
    values = rng.choice([-1, 0, 1], size=(experts, inputs, outputs), p=[other, zeros, other]).astype(np.int8)
    scales = rng.uniform(0.5, 2, size=(experts, 1, outputs)).astype(np.float32)
    packed = packed_weight(TernaryDictionary(), jnp.asarray(values * scales))
    dense = np.asarray(packed.dense(jnp.float64))
    np.testing.assert_array_equal(dense, values * scales)
    words, counts = encode(np.ascontiguousarray(values[0].T))
    row = int(rng.integers(outputs))
    end = counts[: row + 1].sum()
    np.testing.assert_array_equal(decode_row(words[end - counts[row] : end], inputs), values[0, :, row])
    bits = 8 * packed.nbytes
    if inputs >= 512 and zeros >= 0.885 and outputs >= 8:
        assert bits < values.size
    sizes = rng.integers(0, 4, experts)
    x = rng.normal(size=(sizes.sum() + 1, inputs))
    got = np.asarray(jax.jit(packed.grouped_matmul)(jnp.asarray(x), jnp.asarray(sizes, jnp.int32)))[:-1]
    want = np.einsum("mi,mio->mo", x[:-1], np.repeat(dense, sizes, axis=0))
    return {"matmul": float(np.abs(got - want).max(initial=0)), "weights": values.size, "bits": bits}


@proof("offload", cases=range(3), sample=1, counts=(*WAYS, "ternary_nearest", "ternary_bits"))
def bits_by_expert(seed: int) -> dict[str, float]:
    """Experts of a trained mixture with 2.5 bits in the mean: the error of their results, rounded to the nearest, is
    below the mean of those in 2 and in 3 bits, which is what half of the experts, drawn blindly, would have.

    Rises of the held-out loss, in nats, are kept: in 2 and 3 bits, by expert, ternary by GPTQ and to the nearest; and
    the bits of a ternary weight in the dictionary code, whose rows have 24 and 32 values here.
    """
    model, params = functional(CONFIG), trained(seed)
    loss = held_out_loss(model)
    before = loss(params)
    found, errors = {}, {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantising, "copy_tokenizer_files", lambda source, out: None)
        export_hf(HubModel(CONFIG, params, config_json(CONFIG, LENGTH)), Path(folder) / "plain")
        source = open_source(Path(folder) / "plain")
        for way, config in WAYS.items():
            report = quantise(source, Path(folder) / way, config, text()[: ROWS * LENGTH].tolist())
            errors[way] = sum(one.nearest for one in report.matrices)
            quantised = load_hf(Path(folder) / way).params
            found[way] = loss(quantised) - before
            if way == "ternary":
                experts = pack_params(model, quantised, "experts_ternary")["segments"]["0"]["0"]["mlp"]["experts"]
                size: Any = sum(np.prod(one.shape) for one in experts.values())
                found["ternary_bits"] = sum(8 * one.values.nbytes for one in experts.values()) / size
    nearest = pack_params(model, params, "experts_ternary")
    is_leaf = lambda x: isinstance(x, PackedWeight)  # noqa: E731
    nearest = jax.tree.map(lambda x: x.dense(jnp.float32) if is_leaf(x) else x, nearest, is_leaf=is_leaf)
    found["ternary_nearest"] = loss(nearest) - before
    assert errors["by_expert"] < (errors["int2"] + errors["int3"]) / 2
    assert found["ternary"] < found["ternary_nearest"]
    return found
