"""Packed experts: their bytes, and what refuses them; their outputs are a proof (``packed_experts``)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.data import Batch
from jaxllm.hub import HubError, open_source
from jaxllm.hub.packed_weights import PackedOrPlain
from jaxllm.models import Segments, functional
from jaxllm.train import value_and_grad
from tests import environment, quick
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


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def experts(params: Any) -> list[Any]:
    """The matrices of all experts."""
    blocks = [block for segment in params["segments"].values() for block in segment.values()]
    return [b["mlp"]["experts"][n] for b in blocks if "experts" in b["mlp"] for n in ("gate", "up", "down")]


@pytest.mark.drawn(0.4)
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
    with pytest.raises(HubError, match="no experts of this model are quantised"):
        open_source(tmp_path / "plain").load(weights="packed")
    two = sharding.MeshSpec.parse("dp").build(jax.devices()[:2])
    with pytest.raises(HubError, match="packed experts are for one device, and the mesh has 2"):
        open_source(files).load(weights="packed", mesh=two)
    packed = open_source(files).load(weights="packed")
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(NotImplementedError, match=r"are packed .* have no gradients"):
        value_and_grad(functional(packed.config))(packed.params, Batch(tokens, tokens, tokens, tokens))
