"""KV cache formats that lose bits over streamed weights: the tokens and log-probabilities of resident weights."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sharding
from jaxllm.infer import Engine, EngineConfig, Request
from jaxllm.infer.streaming.blocks.block_runner import BlockRunner
from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES
from jaxllm.infer.streaming.experts.expert_slots import LOOK_AHEAD
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.models import MoeConfig
from pallas_kernels.paged_attention.kv_formats import kv_format
from tests.infer import adapters, engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof
from tests.proofs.offload.blocks import check_parts, drawn_cache
from tests.proofs.offload.sharded_layers import DIVIDED
from tests.proofs.offload.streamed_weights import FAMILIES, MIXTURES, WAYS, drawn

FORMATS = ("int8", "fp8", "int4", "kivi4")
LATENT = "deepseek_v3"
"""The family with latents (MLA)."""
KINDS = {"layers": FAMILIES, "slots of experts": MIXTURES, "batches": FAMILIES, "shards": tuple(DIVIDED)}
"""What is streamed besides layers -> models."""
RANKS = (4, 17, 8)
"""Of the adapters, of which two have slots at a time."""
COUNTS = ("preemptions", "cached", "adapted", "from files", "latent", "latent from files", "latent KV from files")


def drawn_config(rng: np.random.Generator, kind: str, model: str) -> EngineConfig:
    """A format, a way to serve that goes with it, the prefix cache or none, slots of adapters or none.

    A step decodes one token, as with streamed weights: so both engines plan the same steps, which formats that encode
    whole pages need.
    """
    legal = [form for form in FORMATS if not kv_format(form).residual or (kind != "batches" and model != LATENT)]
    kv = str(rng.choice(legal))
    ways = WAYS[:-1] if kind in ("batches", "shards") else WAYS
    if kv_format(kv).residual:  # whole pages go with neither swapping nor contiguous caches, nor invariant batches
        ways = tuple(way for way in ways if way not in ("tight, swap", "contiguous", "invariant"))
    way = str(rng.choice([*ways, *(way for way in ways if "tight" in way)]))
    config = dataclasses.replace(engines.ENGINES[way], kv_dtype=kv, decode_steps=1)
    if rng.random() < 0.3:
        config = dataclasses.replace(config, prefix_cache=False)
    if rng.random() < 0.4 and way != "invariant":
        config = dataclasses.replace(config, adapter_slots=2)
    return dataclasses.replace(config, preemption="recompute") if kind == "batches" else config


def drawn_placement(
    rng: np.random.Generator, kind: str, model: str, config: EngineConfig, folder: Path
) -> WeightPlacement:
    """Window, loaders, and tiers of layers, experts and KV cache at random."""
    architecture = engines.model_of(model, "float64")
    units = sum(repeats for _, repeats in architecture.segments)
    placement = drawn(rng, units + (kind == "slots of experts"), folder)
    if kind == "batches":
        return dataclasses.replace(
            placement, cache=drawn_cache(rng, int(rng.choice([3000, 10000, 30000])), units, folder)
        )
    if kind == "slots of experts":
        experts = min(block.mlp.experts for block in architecture.blocks if isinstance(block.mlp, MoeConfig))
        placement = dataclasses.replace(
            placement,
            expert_slots=int(rng.integers(1, experts + 1)),
            eviction=str(rng.choice(["lru", "score"])),
            ahead=str(rng.choice(LOOK_AHEAD)),
            absent="load" if config.batch_invariant else str(rng.choice(list(SCHEDULES))),  # type: ignore[arg-type]
        )
        if placement.disk is not None and rng.random() < 0.7:
            placement = dataclasses.replace(placement, expert_host_bytes=int(rng.choice([0, 5000])))
    return placement


@proof("offload", count=24, sample=1, float64=True, bound={"logprobs": 1e-12}, counts=COUNTS)
def quantised_caches_too(seed: int) -> dict[str, float]:
    """Random traffic with int8, fp8, int4 and kivi4 caches: tokens and log-probabilities of resident weights.

    Families, ways to serve (chunked prefill, prefix cache, both preemptions), adapters; layers, experts in slots, KV
    cache of batches by turns, and shards by random placements; the other engine has the same format, sizes, mesh and
    adapters, and all weights on the device. Nothing is compiled meanwhile. Counted are preemptions, tokens of prompts
    found in the prefix cache, requests with adapters, and draws that have read files, of MLA too.
    """
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(KINDS)))
    model = LATENT if rng.random() < 0.25 else str(rng.choice(KINDS[kind]))
    config, fields = drawn_config(rng, kind, model), dict[str, Any]()
    if kind == "shards":
        tensor = int(rng.choice(DIVIDED[model]))
        fields["mesh"] = sharding.MeshSpec.parse(f"tensor={tensor}").build(jax.devices()[:tensor])
    with tempfile.TemporaryDirectory() as folder:
        placement = drawn_placement(rng, kind, model, config, Path(folder))
        both = [engines.build(config, model, "float64", placement=one, **fields) for one in (None, placement)]
        requests = [one | {"cancel": None, "salt": ""} for one in engines.traffic(rng, config, 8)]
        if config.adapter_slots:
            for n, rank in enumerate(RANKS):
                for engine in both:
                    engine.adapters.add(f"a{n}", adapters.drawn(model, n, rank))
            for one in requests:
                number = int(rng.integers(len(RANKS) + 1))
                one["adapter"] = None if number == len(RANKS) else f"a{number}"
        want, heard = engines.serve(both[0], requests), Compilations()
        with heard:
            made = engines.serve(both[1], requests)
        assert not heard.names
        counts = seen(both[1], model, made)
        return {"logprobs": difference(want, made), **counts}


def seen(engine: Engine, model: str, made: list[Request]) -> dict[str, float]:
    """What a draw has met with, see ``COUNTS``; the engine's threads end."""
    runner = engine.runner
    assert isinstance(runner, StreamedRunner)
    if engine.config.adapter_slots:
        adapters.check_slots(engine)
    found, disk = dict.fromkeys(COUNTS, 0.0), runner.window.counts.reads["disk"] > 0
    if isinstance(runner, BlockRunner):
        check_parts(runner)
        in_files = runner.parts.counts.reads["disk"] > 0
        disk = disk or in_files
        found["latent KV from files"] = float(in_files and model == LATENT)
    if runner.experts is not None:
        disk = disk or any(files.counts.reads for files in runner.experts.files)
    found["preemptions"], found["cached"] = engine.scheduler.preemptions, engine.scheduler.hit_tokens
    found["adapted"] = sum(request.adapter is not None for request in made)
    found["from files"], found["latent"] = float(disk), float(model == LATENT)
    found["latent from files"] = float(disk and model == LATENT)
    runner.close()
    return {name: float(value) for name, value in found.items()}


def difference(want: list[Request], made: list[Request]) -> float:
    """The largest difference of a log-probability, of completions and of prompts; tokens and ends are equal."""
    worst = 0.0
    for one, other in zip(want, made, strict=True):
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert (a.tokens, a.finish) == (b.tokens, b.finish)
            worst = max(worst, farthest(list(a.logprobs), list(b.logprobs)))
            for top, same in zip(a.top, b.top, strict=True):
                worst = max(worst, farthest([value for _, value in top], [value for _, value in same]))
        scores = ([score for score, _ in each.prompt_scores] for each in (one, other))
        worst = max(worst, farthest(next(scores), next(scores)))
    return worst


def farthest(some: list[float], others: list[float]) -> float:
    """The largest difference of as many numbers."""
    assert len(some) == len(others)
    return float(np.abs(np.subtract(some, others)).max(initial=0))
