"""Pools in several processes: tokens are those of a colocated engine; a killed decode process ends its own alone."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable

import numpy as np

from jaxllm.infer import Engine, Request, SamplingParams
from jaxllm.infer.pools.pool_argument import PoolSizes
from jaxllm.infer.pools.remote_engine import DecodeProcessLostError
from tests.infer import engines, pool_processes
from tests.proofs.engine_two.disaggregated import DEGREES, POLICIES, WAYS, compare, drawn_pools, watch
from tests.proofs.harness import proof

LIMIT = 20_000
"""Steps of a part of the proof."""


@proof(
    "engine_two", count=12, sample=1, float64=True, parallel=False,
    bound={"logprob": 1e-10, "bytes": 0.0, "unclear": 0.0}, counts=("pages", "shared", "lost", "found"),
)  # fmt: skip
def pools_over_processes(seed: int) -> dict[str, float]:
    """Random traffic with each engine of the decode pool in a process of its own, and in one colocated engine.

    One decode process is then killed while it decodes: its requests end with an error that says so, those of others
    end as they would have, the prefill pool's page books stay right and its pages are found again, and the process
    that takes its place serves what a colocated engine serves.
    """
    rng = np.random.default_rng(seed)
    model = str(rng.choice(list(DEGREES)))
    pools = drawn_pools(rng, tuple(n for n in DEGREES[model] if engines.VOCAB % n == 0))
    way = str(rng.choice([way for way in WAYS if "swap" not in way]))
    kv = str(rng.choice(["auto", "auto", "bfloat16", "int8"]))
    config, policy = dataclasses.replace(engines.ENGINES[way], kv_dtype=kv), POLICIES[rng.integers(len(POLICIES))]
    apart_config, many = dataclasses.replace(config, pools=pools), PoolSizes.parse(pools).decode.engines
    plain = engines.build(config, model, "float64", policy=policy)
    listener = pool_processes.listening()
    processes = [pool_processes.started(listener, way, model, apart_config) for _ in range(many)]
    found = {"unclear": 0.0, "lost": 0.0}
    try:
        apart = pool_processes.prefilling(apart_config, model, listener, policy=policy)
        assert apart.pools is not None
        by_formula = watch(apart)
        asked = engines.traffic(rng, config, 12)
        worst = compare(engines.serve(apart, asked), engines.serve(plain, asked))
        prompts = [rng.integers(0, engines.VOCAB, 17).tolist() for _ in range(3)]
        params = SamplingParams(max_tokens=engines.LONGEST - 17, temperature=0.0, ignore_eos=True, logprobs=1)
        lost = [apart.submit(prompt, params) for prompt in prompts]
        _run(apart, lambda: any(len(r.sequences[0].tokens) > 20 for r in lost))
        processes[0].send_signal(signal.SIGKILL)
        _run(apart, lambda: any(r.failure is not None for r in lost) or not apart.busy)
        processes.append(pool_processes.started(listener, way, model, apart_config))
        _run(apart, lambda: not apart.busy)
        alone = [plain.submit(prompt, params) for prompt in prompts]
        _run(plain, lambda: not plain.busy)
        for one, other in zip(lost, alone, strict=True):
            if one.failure is None:
                worst = max(worst, compare([one], [other]))
                continue
            found["lost"] += 1
            said = isinstance(one.failure, DecodeProcessLostError) and "decode process at 127.0.0.1:" in str(
                one.failure
            )
            found["unclear"] += not said or one.sequences[0].finish != "error"
        hits = apart.scheduler.hit_tokens
        again: list[Request] = [apart.submit(prompt, params) for prompt in prompts]
        _run(apart, lambda: not apart.busy)
        worst = max(worst, compare(again, alone), compare(engines.serve(apart, asked), engines.serve(plain, asked)))
        metrics, shared = apart.metrics, apart.pools.shared_pages
        found["found"] = float(apart.scheduler.hit_tokens - hits)
        apart.close()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found | {
        "logprob": worst,
        "bytes": abs(metrics.moved_bytes - math.fsum(by_formula)),
        "pages": float(metrics.moved_pages),
        "shared": float(shared),
    }


def _run(engine: Engine, holds: Callable[[], bool]) -> None:
    for _ in range(LIMIT):
        if holds():
            return
        engine.step()
        engines.check_books(engine)
    raise AssertionError("it does not end")
