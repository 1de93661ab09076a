"""Weight swap during decode: every token is sampled from one set of weights, and nothing is compiled."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import AsyncEngine, SamplingParams
from tests import quick
from tests.infer import engines, writers
from tests.infer.engines import LONGEST

WAY = "tight, recompute"


def weights(seed: int) -> dict:
    return jax.tree.map(jnp.asarray, quick.params(engines.model_of("llama", "float32"), seed=seed, scale=0.5))


def logprobs(params: dict, tokens: list[int]) -> np.ndarray:
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(engines._forward("llama", "float32")(params, jnp.asarray(padded)))


def test_tokens_before_and_after_are_those_of_their_weights(rng):
    engine, sets = engines.engine(WAY), [weights(seed) for seed in (4, 5, 6)]
    engine.swap(sets[0])
    first, late = engine.version, engine.runner.program_cache.counts.late
    requests = []
    for asked in engines.traffic(rng, engine.config, 10):
        params = dataclasses.replace(asked["params"], logprobs=0, prompt_logprobs=None, stop_ids=())
        requests.append(engine.submit(asked["prompt"], params, salt=asked["salt"]))
    step, when = 0, {int(n): i for i, n in enumerate(rng.choice(np.arange(3, 40), 2, replace=False), 1)}
    while engine.busy:
        if step in when:
            engine.swap(sets[when[step]])
            engines.check_books(engine)
        engine.step()
        step += 1
    order = [sets[0], *(sets[when[step]] for step in sorted(when))]
    seen = set()
    for request in requests:
        for s in request.sequences:
            begin = len(request.prompt)
            assert len(s.versions) == len(s.tokens) - begin
            for version in set(s.versions):
                want = logprobs(order[version - first], s.tokens)
                places = [i for i, v in enumerate(s.versions) if v == version]
                own = [want[begin + i - 1, s.tokens[begin + i]] for i in places]
                np.testing.assert_allclose([s.logprobs[i] for i in places], own, atol=2e-4)
                seen.add(version)
    assert len(seen) > 1
    assert engine.runner.program_cache.counts.late == late
    engine.swap(weights(4))  # as others expect it


def test_a_paused_engine_keeps_what_it_has(rng):
    engine, prompt = engines.engine(WAY), rng.integers(0, engines.VOCAB, 9).tolist()
    params = SamplingParams(max_tokens=20, temperature=0.0)
    want = engines.serve(engine, [{"prompt": prompt, "params": params}])[0].sequences[0].tokens
    request = engine.submit(prompt, params)
    for _ in range(3):
        engine.step()
    engine.pause()
    while engine.busy:
        engine.step()
    assert request.sequences[0].finish is None
    with pytest.raises(RuntimeError, match="paused"):
        engine.step()
    engine.resume()
    while engine.busy:
        engine.step()
    assert request.sequences[0].tokens == want


def test_other_forms_of_weights_are_refused():
    engine, params = engines.engine(WAY), weights(4)
    with pytest.raises(ValueError, match=r"float16.*built for float32"):
        engine.swap(jax.tree.map(lambda x: x.astype(jnp.float16), params))
    with pytest.raises(ValueError, match="another structure"):
        engine.swap({"all": params})


def test_readers_pause_and_swap():
    async def read() -> int:
        async with AsyncEngine(writers.writer()) as engine:
            await engine.call(lambda e: e.pause())
            stream = engine.stream([1, 2], SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
            waits = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.05)
            assert not waits.done()
            await engine.call(lambda e: e.swap(e.runner.params))
            await engine.call(lambda e: e.resume())
            first = await waits
            with pytest.raises(ValueError, match="another structure"):
                await engine.call(lambda e: e.swap({}))
            rest = [piece async for piece in stream]
            return len(first.tokens) + sum(len(piece.tokens) for piece in rest)

    assert asyncio.run(read()) == 5
