"""Streamed weights: any placement of the layers serves what resident weights serve."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.infer import EngineConfig
from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES
from jaxllm.infer.streaming.experts.expert_slots import LOOK_AHEAD
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement
from jaxllm.infer.streaming.tier_rates import TierRates
from jaxllm.models import MoeConfig
from tests.infer import engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

FAMILIES = (*engines.MODELS, *engines.MIXTURES)
MIXTURES = ("mixtral", *engines.MIXTURES)
WAYS = ("roomy", "tight, recompute", "tight, swap", "contiguous", "one after the other", "invariant")


def drawn(rng: np.random.Generator, units: int, folder: Path) -> WeightPlacement:
    """A placement at random, of which some layers are streamed."""
    resident = int(rng.integers(0, units))
    on_host = None if rng.random() < 0.3 else int(rng.integers(0, units - resident + 1))
    return WeightPlacement(
        int(rng.integers(1, units + 2)), resident, on_host, None if on_host is None else folder, int(rng.integers(1, 5))
    )


@proof("offload", count=120, sample=1, float64=True, bound={"logprobs": 1e-12})
def streamed_is_resident(seed: int) -> dict[str, float]:
    """Random traffic over random placements: log-probabilities of the training forward; windows are kept to.

    Families, ways to serve (chunked prefill, prefix cache, both preemptions), windows, loaders, tiers. Nothing is
    compiled meanwhile.
    """
    rng = np.random.default_rng(seed)
    model, way = str(rng.choice(FAMILIES)), str(rng.choice(WAYS))
    config = engines.ENGINES[way]
    with tempfile.TemporaryDirectory() as folder:
        units = sum(repeats for _, repeats in engines.model_of(model, "float64").segments)
        placement = drawn(rng, units, Path(folder))
        engine = engines.build(config, model, "float64", placement=placement)
        requests = engines.traffic(rng, config, 5)
        counter = Compilations()
        with counter:
            made = engines.serve(engine, requests)
        assert not counter.names
        check_window(engine, placement)
        return {"logprobs": engines.error(model, "float64", made)}


def check_window(engine: Any, placement: WeightPlacement) -> None:
    """No more streamed layers were on the device than the window has, and every layer was used once a step."""
    runner = engine.runner
    assert isinstance(runner, StreamedRunner)
    counts, units = runner.window.counts, len(runner.window.units)
    assert counts.most <= placement.window
    assert counts.units == units * engine.metrics.steps
    streamed = max(0, units - placement.device_units)
    reads, used = sum(counts.reads.values()), streamed * engine.metrics.steps
    assert used <= reads <= used + min(placement.window, streamed)
    runner.close()


@proof(
    "offload",
    count=100,
    sample=1,
    float64=True,
    bound={"logprobs": 1e-12},
    counts=("wanted", "hits", "loads", "on_host"),
)
def experts_in_slots_are_resident(seed: int) -> dict[str, float]:
    """Random traffic over mixtures with any number of expert slots, either eviction, by each way to look ahead.

    They wait on the host, or in files with some of them on the host. Absent experts are loaded, or the host's processor
    computes them, by any of the choices, with measured costs.
    """
    rng = np.random.default_rng(seed)
    model, way = str(rng.choice(MIXTURES)), str(rng.choice(WAYS))
    config = engines.ENGINES[way]
    architecture = engines.model_of(model, "float64")
    experts = min(b.mlp.experts for b in architecture.blocks if isinstance(b.mlp, MoeConfig))
    with tempfile.TemporaryDirectory() as folder:
        units = sum(repeats for _, repeats in architecture.segments)
        placement = dataclasses.replace(
            drawn(rng, units + 1, Path(folder)),
            expert_slots=int(rng.integers(1, experts + 1)),
            eviction=str(rng.choice(["lru", "score"])),
            ahead=str(rng.choice(LOOK_AHEAD)),
            absent="load" if way == "invariant" else str(rng.choice(list(SCHEDULES))),  # type: ignore[arg-type]
        )
        if placement.disk is not None and rng.random() < 0.7:
            placement = dataclasses.replace(placement, expert_host_bytes=int(rng.choice([0, 5000, 20000])))
        engine = engines.build(config, model, "float64", placement=placement)
        counter = Compilations()
        requests = engines.traffic(rng, config, 5)
        with counter:
            made = engines.serve(engine, requests)
        assert not counter.names
        assert isinstance(engine.runner, StreamedRunner)
        stage = engine.runner.experts
        assert stage is not None
        counts = stage.counts
        loads = counts.wanted - counts.hits + counts.predicted
        assert counts.loads == loads - counts.on_host or (placement.absent == "schedule" and counts.loads <= loads)
        slots = [jax.tree.leaves(stage.with_slots(*key, {"mlp": {}}))[0].shape[0] for key in stage.slots]
        assert set(slots) == {placement.expert_slots}
        engine.runner.close()
        seen = {"wanted": counts.wanted, "hits": counts.hits, "loads": counts.loads, "on_host": counts.on_host}
        return {"logprobs": engines.error(model, "float64", made), **{n: float(x) for n, x in seen.items()}}


GATED = ("llama", "smollm2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "deepseek_v3")
"""Models with dense gated layers."""


@proof("offload", count=30, sample=1, float64=True, bound={"logprobs": 1e-12}, counts=("loads", "on_host"))
def sliced_layers_are_resident(seed: int) -> dict[str, float]:
    """Random traffic over dense models whose feed-forward layers are cut into slices, any number of which have slots,
    the others on the host or in files, copied or computed by the host's processor by any choice, with measured costs.
    """
    rng = np.random.default_rng(seed)
    model, way = str(rng.choice(GATED)), str(rng.choice([way for way in WAYS if way != "invariant"]))
    config, architecture = engines.ENGINES[way], engines.model_of(model, "float64")
    dense = [block.mlp.hidden for block in architecture.blocks if block.mlp.mixture is None]
    mixtures = [moe.experts for block in architecture.blocks if (moe := block.mlp.mixture) is not None]
    slices = int(rng.choice([n for n in range(2, 9) if not any(hidden % n for hidden in dense)]))
    with tempfile.TemporaryDirectory() as folder:
        units = sum(repeats for _, repeats in architecture.segments)
        placement = dataclasses.replace(
            drawn(rng, units + 1, Path(folder)),
            expert_slots=int(rng.integers(1, min(slices, *mixtures, slices) + 1)),
            absent=str(rng.choice(list(SCHEDULES))),  # type: ignore[arg-type]
        )
        if placement.disk is not None and rng.random() < 0.7:
            placement = dataclasses.replace(placement, expert_host_bytes=int(rng.choice([0, 3000, 10000])))
        engine = engines.build(config, model, "float64", placement=placement, slices=slices)
        counter = Compilations()
        requests = engines.traffic(rng, config, 5)
        with counter:
            made = engines.serve(engine, requests)
        assert not counter.names
        assert isinstance(engine.runner, StreamedRunner)
        stage = engine.runner.experts
        assert stage is not None
        assert all(mixtures or own.slots == placement.expert_slots for own in stage.slots.values())
        assert mixtures or stage.counts.wanted == slices * len(dense) * engine.metrics.steps
        engine.runner.close()
        seen = {"loads": float(stage.counts.loads), "on_host": float(stage.counts.on_host)}
        return {"logprobs": engines.error(model, "float64", made), **seen}


def beside_resident(
    model: str, kv_dtype: str, placement: WeightPlacement, look: Callable[[Any], None] = lambda _: None
) -> float:
    """Serves the same traffic with resident and with placed weights; the tokens are equal.

    Args:
        model, kv_dtype, placement: what is served, and how.
        look: looks at the engine with placed weights when it has served.

    Returns:
        The largest difference of a log-probability.
    """
    config = dataclasses.replace(engines.ENGINES["roomy"], kv_dtype=kv_dtype, prefix_cache=False, decode_steps=1)
    requests = [one | {"cancel": None} for one in engines.traffic(np.random.default_rng(7), config, 5)]
    both = [engines.build(config, model, "float64", placement=one) for one in (None, placement)]
    made = [engines.serve(engine, requests) for engine in both]
    look(both[1])
    worst = 0.0
    for one, other in zip(*made, strict=True):
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert a.tokens == b.tokens
            worst = max(worst, float(np.abs(np.subtract(a.logprobs, b.logprobs)).max(initial=0)))
    return worst


RATES = TierRates("drawn", (1, 4), (0.02, 0.03), (0.01, 0.01), host=1e9, disk=(4e8, 5e8))


@functools.cache
def smollm2_tokens(offload: str | None, weights: str) -> list[list[int]]:
    """Greedy tokens of SmolLM2 for a few prompts."""
    from jaxllm.cli.tier_options import ServedLoad, solve_placement
    from jaxllm.infer import LLM, SamplingParams, load_model
    from jaxllm.infer.streaming.fit_request import FitRequest
    from jaxllm.infer.streaming.offload_budget import OffloadBudget
    from jaxllm.infer.streaming.open_streamed import open_streamed

    prompts = ["The sea", "def main():", "Question: what is the capital of France?\nAnswer:", "1, 2, 3,"]
    config = EngineConfig(max_sequences=4, max_batched_tokens=64, max_len=128, samplers=("plain",))
    with tempfile.TemporaryDirectory() as folder:
        if offload is None:
            loaded = load_model("smollm2", weights=weights)
        else:
            text = offload.replace("DIR", folder)
            request = FitRequest.parse(text)
            if request is None:
                budget = OffloadBudget.parse(text)
            else:
                RATES.write(file := Path(folder) / "rates.json")
                own = dataclasses.replace(request, rates=file)
                budget = functools.partial(solve_placement, own, load=ServedLoad(4, max_len=config.max_len))
            loaded = open_streamed("smollm2", budget, weights=weights)
            assert isinstance(loaded.params, StreamedWeights)
        llm = LLM(loaded, config, manifest=None)
        params = SamplingParams(max_tokens=24, temperature=0.0, seed=0)
        found = [list(one.outputs[0].tokens) for one in llm.generate(prompts, params)]
    jax.clear_caches()
    return found


@proof(
    "offload",
    cases=[("window=1", "plain"), ("window=3,device=100MiB", "plain"), ("disk=DIR", "packed"), ("disk=DIR", "int4")],
    sample=1,
)
def smollm2_says_the_same(case: tuple[str, str]) -> None:
    """SmolLM2 from the host and from files, plain and packed: the greedy tokens of resident weights."""
    offload, weights = case
    assert smollm2_tokens(offload, weights) == smollm2_tokens(None, weights)


@proof("offload", cases=["fit,device=300MiB,host=1GiB", "fit,device=300MiB,host=200MiB,disk=DIR"], sample=1)
def solved_placements_say_the_same(offload: str) -> None:
    """SmolLM2 by solved placements, with and without files: the greedy tokens of resident weights."""
    assert smollm2_tokens(offload, "plain") == smollm2_tokens(None, "plain")
