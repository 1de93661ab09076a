"""Adapters over streamed layers: each request gets what its merged model says, wherever the layers are."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sharding
from jaxllm.infer import Engine
from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES
from jaxllm.models import MoeConfig
from tests.infer import adapters, engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof
from tests.proofs.offload.blocks import drawn_cache
from tests.proofs.offload.sharded_layers import DIVIDED
from tests.proofs.offload.streamed_weights import FAMILIES, MIXTURES, WAYS, drawn

RANKS = (4, 17, 8, 33, 16)
KINDS = {"layers": FAMILIES, "slots of experts": MIXTURES, "batches": FAMILIES, "shards": tuple(DIVIDED)}
"""What is streamed besides layers -> models."""


def built(rng: np.random.Generator, kind: str, model: str, folder: Path) -> Engine:
    """An engine with slots for fewer adapters than there are, whose layers are placed at random."""
    config = dataclasses.replace(engines.ENGINES[str(rng.choice(WAYS[:-1]))], adapter_slots=3)
    architecture = engines.model_of(model, "float64")
    placement, fields = drawn(rng, sum(repeats for _, repeats in architecture.segments), folder), dict[str, Any]()
    if kind == "slots of experts":
        experts = min(block.mlp.experts for block in architecture.blocks if isinstance(block.mlp, MoeConfig))
        placement = dataclasses.replace(
            placement,
            expert_slots=int(rng.integers(1, experts + 1)),
            absent=str(rng.choice(list(SCHEDULES))),  # type: ignore[arg-type]
        )
    if kind == "batches":
        config = dataclasses.replace(config, preemption="recompute")
        units = sum(repeats for _, repeats in architecture.segments)
        placement = dataclasses.replace(placement, cache=drawn_cache(rng, 20000, units, folder))
    if kind == "shards":
        tensor = int(rng.choice(DIVIDED[model]))
        fields["mesh"] = sharding.MeshSpec.parse(f"tensor={tensor}").build(jax.devices()[:tensor])
    return engines.build(config, model, "float64", placement=placement, **fields)


@proof("offload", count=24, sample=1, float64=True, bound={"logprobs": 1e-12}, counts=("adapted", "evictions"))
def adapters_of_streamed_layers(seed: int) -> dict[str, float]:
    """Random traffic of five adapters and the base over three slots, with layers, experts in slots, batches by turns or
    shards streamed by random placements: log-probabilities of the merged models' training forward. Nothing is compiled
    meanwhile, and no slot or page of an adapter is lost.
    """
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(KINDS)))
    model = str(rng.choice(KINDS[kind]))
    with tempfile.TemporaryDirectory() as folder:
        engine, heard = built(rng, kind, model, Path(folder)), Compilations()
        for n, rank in enumerate(RANKS):
            engine.adapters.add(f"a{n}", adapters.drawn(model, n, rank))
        asked = engines.traffic(rng, engine.config, 10)
        for one in asked:
            number = int(rng.integers(len(RANKS) + 1))
            one["adapter"] = None if number == len(RANKS) else f"a{number}"
        with heard:
            made = engines.serve(engine, asked)
        assert not heard.names
        adapters.check_slots(engine)
        assert engine.adapter_slots is not None
        found = {"logprobs": 0.0, "adapted": 0.0, "evictions": float(engine.adapter_slots.evictions)}
        for one, request in zip(asked, made, strict=True):
            params = None
            if one["adapter"] is not None:
                number = int(one["adapter"][1:])
                params = adapters.merged(model, "float64", number, RANKS[number])
                found["adapted"] += 1
            found["logprobs"] = max(found["logprobs"], engines.error(model, "float64", [request], params))
        engine.runner.close()
    return found
