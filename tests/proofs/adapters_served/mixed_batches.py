"""Mixed batches: rows of many adapters and of the base are as each adapter alone, on one device and on meshes."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import numpy as np

from jaxllm.compiler import collectives
from jaxllm.infer import LLM, Engine, EngineConfig, SamplingParams
from jaxllm.peft import Adapter, LowRank
from jaxllm.peft.adapter import factor_shapes
from tests import environment
from tests.infer import adapters, engines, meshes
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

RANKS = (4, 64, 8, 17, 32, 5, 48, 16, 9, 64, 4, 31, 24, 12, 6, 33)
WAYS = [
    ("", "llama", "roomy"),
    ("", "qwen2", "tight, swap"),
    ("", "gemma2", "tight, recompute"),
    ("", "gpt2", "layers apart"),
    ("", "mixtral", "contiguous"),
    ("", "smollm2", "invariant"),
    ("tensor=8", "wide", "roomy"),
    ("tensor=8", "few kv heads", "tight, swap"),
    ("data=2,tensor=4", "llama", "layers apart"),
    ("data=4", "smollm2", "tight, recompute"),
    ("context=2,tensor=2", "llama", "roomy"),
    ("fsdp=2,tensor=2", "olmo2", "tight, recompute"),
    ("expert=2,tensor=2", "mixtral", "tight, swap"),
]
"""(mesh, model, way to serve)."""
LATENT = [
    ("", "deepseek_v3", "roomy"),
    ("", "deepseek_v3", "layers apart"),
    ("tensor=2", "deepseek_v3", "tight, swap"),
    ("data=2,tensor=2", "deepseek_v3", "roomy"),
]


def built(mesh: str, model: str, way: str, **fields: Any) -> Engine:
    config, apart = dataclasses.replace(engines.ENGINES[way], **fields), way == "layers apart"
    if mesh:
        return meshes.over(mesh, model, config, "float64", apart=apart)
    return engines.build(config, model, "float64", apart=apart)


@proof("adapters_served", cases=WAYS, sample=1, float64=True, bound=1e-10)
def adapters_together_are_each_alone(case: tuple[str, str, str]) -> float:
    """Sixteen adapters of ranks 4 to 64 and the base over five slots, random traffic: the merged model's logits.

    With prefixes, forks, preemption and cancellation; nothing is compiled meanwhile, and no slot or page is lost.
    """
    return mixed_error(case)


def mixed_error(case: tuple[str, str, str]) -> float:
    """Largest error of random traffic by sixteen adapters and the base."""
    mesh, model, way = case
    engine, heard = built(mesh, model, way, adapter_slots=5), Compilations()
    for n, rank in enumerate(RANKS):
        engine.adapters.add(f"a{n}", adapters.drawn(model, n, rank))
    rng = np.random.default_rng([*mesh.encode(), *model.encode()])
    asked = engines.traffic(rng, engine.config, 24 + 4 * engine.runner.spec.replicas)
    for i, one in enumerate(asked):
        one["adapter"] = None if i % 6 == 5 else f"a{rng.integers(len(RANKS))}"
    with heard:
        made = engines.serve(engine, asked)
    assert heard.names == []
    adapters.check_slots(engine)
    worst = 0.0
    for one, request in zip(asked, made, strict=True):
        number = None if one["adapter"] is None else int(one["adapter"][1:])
        params = None if number is None else adapters.merged(model, "float64", number, RANKS[number])
        worst = max(worst, engines.error(model, "float64", [request], params))
    assert engine.adapter_slots is not None
    assert engine.adapter_slots.evictions > 0
    return worst


def collectives_of(engine: Engine) -> Counter[tuple[str, str, int]]:
    """Collectives of all steps by program, kind and bytes."""
    found: Counter[tuple[str, str, int]] = Counter()
    for name, program in engine.runner.programs.items():
        if name != "adapter":
            for one in collectives.read(program.compiled.as_text()).collectives:
                found[name, one.kind, one.bytes] += one.count
    return found


@proof("adapters_served", cases=LATENT, sample=1, float64=True, bound=1e-10)
def latent_attention_too(case: tuple[str, str, str]) -> float:
    """The same with multi-head latent attention, whose up-projection steps absorb into queries and outputs.

    On meshes its steps have the collectives of an engine without slots.
    """
    if case[0]:
        with_slots, without = (collectives_of(built(*case, adapter_slots=n)) for n in (4, 0))
        assert with_slots == without
        assert without
    return mixed_error(case)


@proof("adapters_served", cases=[w for w in WAYS if "tensor" in w[0]], sample=1, float64=True)
def adapters_add_no_collective(case: tuple[str, str, str]) -> None:
    """Steps of an engine with slots have the collectives of one without, byte for byte.

    That is what the placement of the factors gives: left ones split as the base's inputs, right ones as its outputs,
    and partial sums added before the base's one all-reduce.
    """
    with_slots, without = (collectives_of(built(*case, adapter_slots=n)) for n in (4, 0))
    assert without
    assert with_slots == without


@functools.cache
def smollm2() -> LLM:
    sizes = EngineConfig(
        max_sequences=20, max_batched_tokens=64, max_len=128, pages=120, buckets=(64,), samplers=("full",),
        decode_steps=4, adapter_slots=16, adapter_rank=64, prefix_cache=False,
    )  # fmt: skip
    return LLM("smollm2", sizes, strict=True, manifest=environment.ROOT / ".cache" / "jaxllm" / "engine")


def small_adapter(llm: LLM, seed: int, rank: int) -> Adapter:
    """A random adapter that changes what the model says and leaves it able to speak."""
    rng, factors = np.random.default_rng(seed), {}
    for path, linear in llm.loaded.model.linears().items():
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in factor_shapes(linear, rank))
        inputs = np.prod(linear.shape[: linear.contract])
        factors[path] = LowRank(a / np.sqrt(inputs), b * 0.3 / np.sqrt(rank), 1.0)
    return Adapter("lora", factors, {path: (rank,) * one.a.shape[0] for path, one in factors.items()})


@proof("adapters_served", count=1, sample=1, bound=1e-3, parallel=False)
def smollm2_tokens(seed: int) -> float:
    """The real SmolLM2: sixteen adapters and the base in one batch say what each says alone.

    Log-probabilities are within a thousandth of a nat, up to the first token whose runner-up is nearer than that.
    """
    llm = smollm2()
    names = [f"a{n}" for n in range(16)]
    for n, name in enumerate(names):
        llm.engine.load_adapter(name, small_adapter(llm, n, RANKS[n]))
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, ignore_eos=True)
    prompts, order = ["The quick brown fox", "Once upon a time"], [*names, None, "a3", None]
    asked = [prompts[i % 2] for i in range(len(order))]
    together = llm.generate(asked, params, adapter=order)
    said = {one.outputs[0].tokens for one in together}
    assert len(said) > 8, "the adapters differ"
    worst = 0.0
    for prompt, name, mixed in zip(asked, order, together, strict=True):
        (alone,) = llm.generate(prompt, params, adapter=name)
        for i, (one, other) in enumerate(zip(alone.outputs[0].tokens, mixed.outputs[0].tokens, strict=True)):
            (_, best), (_, second) = alone.outputs[0].top[i]
            if best - second < 1e-3:
                break
            assert one == other
            worst = max(worst, abs(alone.outputs[0].logprobs[i] - mixed.outputs[0].logprobs[i]))
    return worst
