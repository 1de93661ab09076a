"""Disaggregated pools in the engine: tokens are those of a colocated engine, and bytes moved those of the formula."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxllm.infer import Engine, Request
from jaxllm.infer.pools.pool_argument import PoolSizes
from jaxllm.infer.pools.pooled_runner import PooledRunner
from jaxllm.infer.scheduling.policies import Deadline, Fair, Grouped, Packed, Predicted, Priority, Service, Shortest
from tests.infer import engines
from tests.proofs.harness import proof

DEVICES = 8
DEGREES = {
    "llama": (1, 2, 4), "smollm2": (1, 3), "mistral": (1, 2, 4), "qwen3": (1, 2, 4), "gemma2": (1, 2, 4),
    "gemma3": (1, 2, 4), "gpt2": (1, 2, 4), "phi3": (1, 2, 4), "mixtral": (1, 2), "deepseek_v3": (1, 2, 4),
    "gpt_oss": (1, 2), "wide": (1, 2, 4), "few kv heads": (1, 2, 4),
}  # fmt: skip
"""Model -> devices that its heads, experts and widths divide over."""
WAYS = ("roomy", "tight, recompute", "tight, swap", "contiguous", "one after the other")
POLICIES = (
    None,
    Fair(),
    Priority(30.0),
    Shortest(20.0),
    Deadline(30.0),
    Predicted(),
    Packed(),
    Grouped(),
    Grouped(0.9),
)


def drawn_pools(rng: np.random.Generator, degrees: tuple[int, ...]) -> str:
    """Pools of any degrees and numbers of engines that eight devices have room for."""
    while True:
        prefill, decode = (int(n) for n in rng.choice(degrees, 2))
        first, second = (int(n) for n in rng.integers(1, 4, 2))
        if prefill * first + decode * second <= DEVICES:
            return f"prefill=tensor:{prefill} x{first}, decode=tensor:{decode} x{second}"


def compare(got: list[Request], want: list[Request]) -> float:
    """The largest difference of a log-probability; of what was cancelled, as far as both have come."""
    worst = 0.0
    for one, other in zip(got, want, strict=True):
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            cut = "cancelled" in (mine.finish, theirs.finish)
            assert cut or (mine.tokens, mine.finish, mine.text) == (theirs.tokens, theirs.finish, theirs.text)
            assert all(a == b for a, b in zip(mine.tokens, theirs.tokens, strict=not cut))
            gaps = [abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=not cut)]
            worst = max(worst, *gaps) if gaps else worst
        if "cancelled" not in (one.sequences[0].finish, other.sequences[0].finish):
            gaps = [abs(a[0] - b[0]) for a, b in zip(one.prompt_scores, other.prompt_scores, strict=True)]
            worst = max(worst, *gaps) if gaps else worst
    return worst


def watch(engine: Engine) -> list[float]:
    """Bytes of each transfer from now on by the formula: 2 x kv heads x head dim x bytes, for all slots and layers.

    In int8 a token has a scale for the key and one for the value, of a latent one for each of its two parts.
    """
    assert engine.pools is not None
    moving, taken = engine.pools.transfers, list[float]()
    start, spec = moving.start, moving.runner.spec
    shards = PoolSizes.parse(engine.config.pools or "").decode.tensor

    def watched(giver: int, taker: int, moves: Any) -> Any:
        for group, pairs in zip(spec.groups, moves, strict=True):
            one = group.kv_spec
            heads = max(one.kv_heads, shards if shards % one.kv_heads == 0 else 0)  # a copy for each device
            width = one.key_dim + (0 if one.latent else one.value_dim)
            slots = len(pairs) * spec.page_size * len(group.layers) * heads
            each = {"float64": 8 * width, "bfloat16": 2 * width, "int8": width + 4 * 2}
            taken.append(slots * each[group.dtype])
        return start(giver, taker, moves)

    moving.start = watched  # type: ignore[method-assign]
    return taken


@proof(
    "engine_two", count=60, sample=1, float64=True, bound={"logprob": 1e-10, "bytes": 0.0}, counts=("pages", "shared")
)
def pools_are_colocated(seed: int) -> dict[str, float]:
    """Random traffic, greedy and sampled, in a prefill and a decode pool of drawn meshes, and in one colocated engine.

    Prompts in chunks, common prefixes, several completions, cancellations, too few pages where the way says so,
    formats of the KV cache, policies. Every page of every engine has as many holders as the books say, and in the
    end none.
    """
    rng = np.random.default_rng(seed)
    model = str(rng.choice(list(DEGREES)))
    pools = drawn_pools(rng, tuple(n for n in DEGREES[model] if engines.VOCAB % n == 0))
    kv = str(rng.choice(["auto", "auto", "bfloat16", "int8"]))
    config = dataclasses.replace(engines.ENGINES[str(rng.choice(WAYS))], kv_dtype=kv)
    policy = POLICIES[rng.integers(len(POLICIES))]
    plain = engines.build(config, model, "float64", policy=policy)
    apart = engines.build(dataclasses.replace(config, pools=pools), model, "float64", policy=policy)
    by_formula, worst = watch(apart), 0.0
    for _ in range(2):
        asked = engines.traffic(rng, config, 12)
        for engine in (plain, apart):
            submit = engine.submit

            def serviced(prompt: Any, params: Any, submit: Any = submit, **fields: Any) -> Request:
                level = Service(priority=len(prompt) % 3, key=str(len(prompt) % 2), ttft=0.1)
                return submit(prompt, params, **fields | {"service": level})

            engine.submit = serviced  # type: ignore[method-assign]
        want, got = engines.serve(plain, asked), engines.serve(apart, asked)
        worst = max(worst, compare(got, want))
        if kv == "auto":
            worst = max(worst, engines.error(model, "float64", got))
    assert apart.pools is not None
    metrics, runner = apart.metrics, apart.runner
    assert isinstance(runner, PooledRunner)
    assert metrics.moved_pages > 0
    # Each pool ran the programs of its phase alone.
    names = {one.phase: {name.split("-")[0] for name in one.programs} for one in runner.engines}
    assert "decode" not in names["prefill"]
    assert "prompt" not in names["decode"]
    return {
        "logprob": worst,
        "bytes": abs(metrics.moved_bytes - math.fsum(by_formula)),
        "pages": float(metrics.moved_pages),
        "shared": float(apart.pools.shared_pages),
    }
