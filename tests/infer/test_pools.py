"""Disaggregated pools: what the argument says, what is refused, and that prefill and decode apart are both together."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig, Request, SamplingParams
from jaxllm.infer.engine.page_allocator import NO_PAGE
from jaxllm.infer.pools.phase_runner import counted
from jaxllm.infer.pools.pool_argument import PoolSizes
from jaxllm.infer.pools.pooled_runner import PooledRunner
from tests.infer import engines, meshes

SMALL = dataclasses.replace(engines.ENGINES["tight, recompute"], max_sequences=3)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, logprobs=0)


def pooled(pools: str, model: str, config: EngineConfig = SMALL, dtype: str = "float64", **fields: object) -> Engine:
    return engines.build(dataclasses.replace(config, pools=pools), model, dtype, **fields)


def test_the_argument_says_engines_and_devices():
    sizes = PoolSizes.parse("prefill=tensor:2 x3, decode=tensor:4")
    assert (sizes.prefill.tensor, sizes.prefill.engines, sizes.decode.tensor, sizes.decode.engines) == (2, 3, 4, 1)
    assert sizes.devices == 10
    assert PoolSizes.parse("decode = tensor:1 x2,prefill=tensor:1x1").decode.engines == 2


def test_tight(float64):
    rng = np.random.default_rng(0)
    engine = pooled("prefill=tensor:1, decode=tensor:2 x2", "llama")
    asked = engines.traffic(rng, engine.config, 14)
    made = engines.serve(engine, asked)
    print(engine.metrics, engine.pools.shared_pages, engine.scheduler.preemptions)
    assert engines.error("llama", "float64", made) < 1e-10
