"""Random adapters of tiny models, and engines that serve them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxllm.infer import EngineConfig
from jaxllm.models import functional
from jaxllm.peft import Adapter, LowRank, merged_params
from jaxllm.peft.adapter import factor_shapes
from tests.infer import engines

RANKS = (4, 64, 8, 17, 32, 5)
SIZES = EngineConfig(
    max_sequences=4, max_batched_tokens=16, max_len=engines.LONGEST, pages=80, page_size=8, buckets=(16,),
    decode_steps=3, samplers=("full",), top_logprobs=3, adapter_slots=3,
)  # fmt: skip


@functools.cache
def drawn(model: str, seed: int, rank: int, only: tuple[str, ...] = ()) -> Adapter:
    """An adapter whose effect on the next token is neither small nor everything."""
    made, rng = functional(engines.model_of(model, "float64")), np.random.default_rng([seed, rank])
    factors = {}
    for path, linear in made.linears().items():
        if not only or path.split("/")[-1] in only:
            a, b = (rng.normal(size=shape) for shape in factor_shapes(linear, rank))
            factors[path] = LowRank(a * 0.3, b * 0.3 / np.sqrt(rank), 1.5)
    return Adapter("lora", factors, {path: (rank,) * factors[path].a.shape[0] for path in factors})


@functools.lru_cache(64)
def merged(model: str, dtype: str, seed: int, rank: int, only: tuple[str, ...] = ()) -> Any:
    """The base's parameters with the adapter added."""
    made = functional(engines.model_of(model, dtype))
    return merged_params(made, engines.params_of(model, dtype), drawn(model, seed, rank, only))


def check_slots(engine: Any) -> None:
    """Every slot and page of the pool of adapters is free or one adapter's, once; users are running sequences."""
    slots = engine.adapter_slots
    one = list(slots._resident.values())
    assert sorted([*slots._free_slots, *(r.slot for r in one)]) == list(range(len(slots.scales)))
    held = [page for r in one for page in r.pages]
    assert sorted([*slots._free_pages, *held]) == list(range(engine.runner.adapter_pool.pages))
    for r in one:
        row = slots.tables[r.slot]
        assert row[: len(r.pages)].tolist() == r.pages
        assert (row[len(r.pages) :] == -1).all()
    users = sum(s.request.adapter is not None for s in engine.scheduler.running)
    assert users == sum(r.users for r in one)


def sized(**fields: Any) -> EngineConfig:
    return dataclasses.replace(SIZES, **fields)
