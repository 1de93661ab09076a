"""Engine whose tokens are bytes, with one program for everything."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig
from jaxllm.models import functional
from jaxllm.text import ByteTokenizer
from tests import quick, tiny

LONGEST = 512


@functools.cache
def writer() -> Engine:
    """A small random model of bytes."""
    tokenizer = ByteTokenizer()
    config = tiny.decoder(dtype="float32", vocab_size=tokenizer.vocab_size, layers=1)
    params = jax.tree.map(np.asarray, quick.params(config, seed=1, scale=0.5))
    sizes = EngineConfig(
        max_sequences=8, max_batched_tokens=16, max_len=LONGEST, pages=530, page_size=8,
        decode_steps=1, samplers=("full",), preemption="swap", batch_invariant=True,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return Engine.of(functional(config), jax.device_put(params), sizes, tokenizer=tokenizer, strict=True)
