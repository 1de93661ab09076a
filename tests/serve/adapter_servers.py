"""A server whose tiny model has adapters, in PEFT's files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.hub import decoder_config
from jaxllm.infer import AdapterCatalogue, AsyncEngine, Engine, EngineConfig
from jaxllm.infer.embedder import Embedder
from jaxllm.models import functional
from jaxllm.peft import Adapter, LowRank, read_peft, write_peft
from jaxllm.peft.adapter import factor_shapes
from jaxllm.serve import Backend, EngineBackend
from jaxllm.text.byte_tokenizer import ByteTokenizer
from tests import quick
from tests.serve.servers import TEMPLATE

SOURCE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": ByteTokenizer().vocab_size,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
SIZES = EngineConfig(
    max_sequences=4, max_batched_tokens=32, max_len=128, page_size=8, buckets=(32,), decode_steps=2,
    samplers=("plain",), adapter_slots=2, adapter_rank=16,
)  # fmt: skip
ADMIN = "sk-admin"


@functools.cache
def model() -> Any:
    return functional(dataclasses.replace(decoder_config(SOURCE), dtype="float32", param_dtype="float32"))


def adapter(seed: int, rank: int = 4) -> Adapter:
    rng, factors = np.random.default_rng(seed), {}
    for path, linear in model().linears().items():
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in factor_shapes(linear, rank))
        factors[path] = LowRank(a * 0.4, b * 0.4, 2.0)
    return Adapter("lora", factors, dict.fromkeys(factors, (rank, rank)))


def write(folder: Path, seed: int, rank: int = 4) -> Path:
    """A directory of PEFT."""
    write_peft(folder, adapter(seed, rank), model(), SOURCE)
    return folder


@functools.cache
def engine() -> Engine:
    """A random model of bytes with two slots for adapters."""
    params = jax.tree.map(jnp.asarray, quick.params(model().config, seed=7, scale=0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return Engine.of(
            model(), params, SIZES, tokenizer=ByteTokenizer(), strict=True,
            adapters=AdapterCatalogue(lambda folder: read_peft(folder, model(), SOURCE)),
        )  # fmt: skip


@contextlib.asynccontextmanager
async def backend() -> AsyncIterator[Backend]:
    """The engine, running."""
    made = engine()
    async with AsyncEngine(made) as running:
        yield EngineBackend(running, TEMPLATE, Embedder(made.runner.model, made.runner.params, made.max_len))
