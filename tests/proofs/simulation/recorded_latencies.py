"""Simulated latencies are a real engine's, where steps take the times that were measured of its programs."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import numpy as np

from jaxllm.convert.load import LoadedModel
from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.plan.hardware import Cluster
from jaxllm.serve.load_benchmark import RequestResult
from jaxllm.simulate import Deployment, RequestTrace, TraceRequest, simulate
from jaxllm.simulate.recorded import RecordedSteps, StepRecorder, record_steps
from jaxllm.simulate.request_trace import token_ids
from jaxllm.text import ByteTokenizer
from sharding import MeshSpec
from tests.proofs.harness import proof

MODEL = DecoderConfig(2048, 384, 8, pattern=(BlockConfig(AttentionConfig(6, 6, 64), MlpConfig(1536)),))
CONFIG = EngineConfig(
    max_sequences=4, max_batched_tokens=64, max_len=96, pages=64, page_size=16, buckets=(16, 64), decode_steps=4,
    samplers=("plain",), prefix_cache=False,
)  # fmt: skip
REQUESTS = 160


@functools.cache
def loaded() -> LoadedModel:
    model = functional(MODEL)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(0, 0.05, x.shape), x.dtype), model.abstract())
    return LoadedModel(model, params, ByteTokenizer(), None, jax.make_mesh((1,), ("data",)), 0, {}, None)


@functools.cache
def engine() -> Engine:
    return Engine.of(loaded().model, loaded().params, CONFIG, strict=True)


@proof("simulation", count=6, sample=0, bound={"ttft": 0.1, "tpot": 0.1}, counts=("elsewhere",))
def recorded_steps_tell_latencies(seed: int) -> dict[str, float]:
    """Medians of the time to the first token and between tokens, simulated and of requests in real time, less 1.

    The rate is drawn so that the device is busy for about 30 to 50% of the time: the nearer to all of it, the longer
    requests wait for each error of a step. Steps are measured while the requests are served, since a machine's speed is
    not the same from minute to minute; the simulator has but the mean time of each program, and says when which step
    runs. Counted is the larger error with the times of another run, before.
    """
    rng = np.random.default_rng(seed)
    prompts, tokens = rng.integers(8, 49, REQUESTS), rng.integers(4, 33, REQUESTS)
    before = record_steps(loaded(), CONFIG, "drawn", rounds=2)
    decode = next(one for one in before.programs if one.decode and one.rows == CONFIG.max_sequences)
    prompt = next(one for one in before.programs if not one.decode)
    alone = float(np.mean(tokens)) * decode.seconds(1, 200) / 2 + prompt.seconds(1, 50)
    at = np.cumsum(rng.exponential(alone / rng.uniform(0.3, 0.5), REQUESTS))
    requests = tuple(TraceRequest(float(a), int(p), int(n)) for a, p, n in zip(at, prompts, tokens, strict=True))
    recorder = StepRecorder()
    with recorder.of(engine()):
        real = served(requests)
    deployment = Deployment(MODEL, Cluster.parse("h100:1x1"), MeshSpec.parse("tensor=1"), CONFIG)

    def error(clock: RecordedSteps, name: str) -> float:
        found = simulate(deployment, RequestTrace("drawn", requests), clock=clock, host=clock.host).results
        simulated, want = (float(np.median([getattr(one, name) for one in some])) for some in (found, real))
        return abs(simulated / want - 1)

    during = recorder.fit("drawn")
    return {name: error(during, name) for name in ("ttft", "tpot")} | {
        "elsewhere": max(error(before, name) for name in ("ttft", "tpot"))
    }


def served(requests: tuple[TraceRequest, ...]) -> list[RequestResult]:
    """Serves requests as they come, in real time."""
    results = [RequestResult(one.at, one.at) for one in requests]
    going: dict[int, Any] = {}
    names = dict[str, int]()
    prompts = [np.asarray(token_ids(requests, n, names)) % MODEL.vocab_size for n in range(len(requests))]
    coming, begin = list(range(len(requests))), time.perf_counter()
    while coming or engine().busy:
        now = time.perf_counter() - begin
        while coming and requests[coming[0]].at <= now:
            index = coming.pop(0)
            params = SamplingParams(max_tokens=requests[index].tokens, temperature=0.0, seed=0, ignore_eos=True)
            going[engine().submit(prompts[index], params).id] = results[index]
        if not engine().busy:
            time.sleep(max(0.0, requests[coming[0]].at - (time.perf_counter() - begin)))
            continue
        for delta in engine().step():
            one = going[delta.request.id]
            one.chunks.append(time.perf_counter() - begin)
            one.tokens += len(delta.tokens)
    assert [one.tokens for one in results] == [one.tokens for one in requests]
    return results
