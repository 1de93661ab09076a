"""Packed experts: their bytes, and what refuses them; their outputs are a proof (``packed_experts``)."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sharding
from jaxllm.data import Batch
from jaxllm.hub import HubError, open_source
from jaxllm.hub.families.config_json import config_json
from jaxllm.hub.huggingface import CarriedTensors, hf_tensors, leaves_by_path
from jaxllm.hub.packed_weights import PackedOrPlain
from jaxllm.hub.safetensors import write_model
from jaxllm.models import Segments, functional
from jaxllm.train import value_and_grad
from tests import environment, quick, tiny
from tests.hub import test_quantised

FORMATS = {"fp8": lambda *a: test_quantised.deepseek(*a)[0], "mxfp4": test_quantised.gpt_oss}


def both(kind: str, folder: Path, rng: np.random.Generator, dtype: str) -> tuple[Any, Any]:
    """The same checkpoint, plain and packed; as in an engine, arrays of one device and of no mesh."""
    source = open_source(FORMATS[kind](folder, rng))
    ways: tuple[PackedOrPlain, ...] = ("plain", "packed")
    loaded = [source.load(dtype=dtype, weights=weights) for weights in ways]
    plain, packed = (
        dataclasses.replace(m, params=jax.tree.map(lambda x: x.addressable_data(0), m.params)) for m in loaded
    )
    return plain, packed


def fp8_mixture(folder: Path, rng: np.random.Generator) -> Path:
    """A tiny mixture of four experts in float8, whose scales are of 4 outputs by 8 inputs."""
    config = tiny.decoder(vocab_size=40, embed_dim=64, heads=4, kv_heads=2, moe=(4, 2, 64, True), dtype="float32")
    source = config_json(config, 128, {})
    params = leaves_by_path(quick.params(config))
    tensors: dict[str, Any] = {}
    for name, array in hf_tensors(source, config, params, CarriedTensors()).items():
        tensors[name] = np.asarray(array)
        if ".experts." in name:
            tensors[name] = (tensors[name] * 8).astype(ml_dtypes.float8_e4m3fn)
            shape = tuple(n // b for n, b in zip(array.shape, (4, 8), strict=True))
            tensors[f"{name}_scale_inv"] = rng.uniform(0.05, 0.2, shape).astype(np.float32)
    quantised = {**test_quantised.FP8, "weight_block_size": [4, 8]}
    write_model(
        folder / "fp8", tensors, {"config.json": json.dumps(source | {"quantization_config": quantised})}, 2**30
    )
    return folder / "fp8"


MIXTURES = {"fp8": fp8_mixture, "mxfp4": lambda *a: test_quantised.gpt_oss(*a, experts=4, width=64)}
"""Checkpoints whose sizes divide over experts, tensor and fsdp."""


def mixture(kind: str, folder: Path, rng: np.random.Generator, mesh: str) -> tuple[Any, Any]:
    """The same checkpoint in float64, plain on one device and packed on a mesh."""
    source = open_source(MIXTURES[kind](folder, rng))
    spec = sharding.MeshSpec.parse(mesh)
    devices = jax.devices()[: math.prod(n for _, n in spec.axes)]
    packed = source.load(dtype="float64", weights="packed", mesh=spec.build(devices))
    plain = source.load(dtype="float64")
    return dataclasses.replace(plain, params=jax.tree.map(lambda x: x.addressable_data(0), plain.params)), packed


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("kind", MIXTURES)
def test_packed_experts_compute_on_a_mesh_as_plain_ones_on_one_device(
    kind: str, tmp_path: Path, rng: np.random.Generator, float64: None
) -> None:
    """Experts, their width and the residual stream are split; packed bytes are what each device holds its part of."""
    plain, packed = mixture(kind, tmp_path, rng, "fsdp=2,expert=2,tensor=2")
    tokens = rng.integers(0, plain.config.vocab_size, (8, 6), np.int32)
    got, want = (quick.logits(m.config, m.params, tokens) for m in (packed, plain))
    assert np.abs(got - want).max() < 1e-10 * np.abs(want).max()
    for weight in experts(packed.params):
        held = [x.addressable_data(0).nbytes for x in (weight.values, weight.scales)]
        assert held == [weight.values.nbytes // 8, weight.scales.nbytes // 8]


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def experts(params: Any) -> list[Any]:
    """The matrices of all experts."""
    blocks = [block for segment in params["segments"].values() for block in segment.values()]
    return [b["mlp"]["experts"][n] for b in blocks if "experts" in b["mlp"] for n in ("gate", "up", "down")]


@pytest.mark.drawn(0.3)
def test_bytes_in_memory_and_of_the_compiled_program(tmp_path: Path, rng: np.random.Generator) -> None:
    plain, packed = both("mxfp4", tmp_path, rng, "bfloat16")
    half, few = nbytes(experts(plain.params)), nbytes(experts(packed.params))
    assert few == half * 17 / 64  # 32 numbers take 16 bytes and one of their scale, instead of 64
    model = functional(plain.config)

    def argument_bytes(params: Any) -> int:
        tokens = jnp.zeros((1, 2), jnp.int32)
        step = quick.jit(lambda p: model.forward(p, tokens, tokens, Segments())[0])
        return step.lower(params).compile(environment.AS_EVER).memory_analysis().argument_size_in_bytes  # type: ignore[union-attr]

    assert argument_bytes(plain.params) - argument_bytes(packed.params) == half - few


def test_what_cannot_be_packed_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    files = FORMATS["mxfp4"](tmp_path, rng)
    with pytest.raises(HubError, match="no weights of this model are quantised"):
        open_source(tmp_path / "plain").load(weights="packed")
    two = sharding.MeshSpec.parse("fsdp=2").build(jax.devices()[:2])
    with pytest.raises(
        HubError, match="splits a dimension of 32 into shards of 16, but 32 values along it share a scale"
    ):
        open_source(files).load(weights="packed", mesh=two)
    packed = open_source(files).load(weights="packed")
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(NotImplementedError, match=r"are packed .* have no gradients"):
        value_and_grad(functional(packed.config))(packed.params, Batch(tokens, tokens, tokens, tokens))
