"""Revisions while serving: a rollback gives the former outputs exactly, and loading and unloading lose no request."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from jaxllm.infer import SamplingParams
from jaxllm.serve import ServeConfig
from tests.infer import adapters, engines
from tests.infer.test_adapters import served
from tests.proofs.harness import proof
from tests.serve import adapter_servers, servers

STREAMS = 64
OTHERS = ("a0", "a1", "a2", "a3", None)


@proof("adapters_served", count=20, sample=1, float64=True)
def rollback_is_exact(seed: int) -> None:
    """A policy's revisions come by rollout and update, as in a training loop, and are rolled back one after the other.

    Each time the tokens and the bits of the log-probabilities are those of the first time; other adapters are served
    between, so that the revision has to be loaded again.
    """
    engine, rng = served(), np.random.default_rng(seed)
    prompt = rng.integers(0, engines.VOCAB, 7).tolist()
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=seed % 1000, logprobs=0, ignore_eos=True)

    def rollout(name: str | None) -> tuple[list[int], list[float]]:
        request = engine.submit(prompt, params, adapter=name)
        while engine.busy:
            engine.step()
        return request.sequences[0].tokens, request.sequences[0].logprobs

    seen = []
    for _ in range(4):
        engine.swap(adapter={"policy": adapters.drawn("llama", int(rng.integers(30)), int(rng.choice([4, 17, 40])))})
        seen.append(rollout("policy"))
        for n in rng.permutation(5)[:4]:
            rollout(OTHERS[n])
    for want in seen[-2::-1]:
        engine.rollback_adapter("policy")
        assert rollout("policy") == want
        for n in rng.permutation(5)[:3]:
            rollout(OTHERS[n])
    engine.unload_adapter("policy")
    adapters.check_slots(engine)


@proof("adapters_served", count=3, sample=1, parallel=False)
def streams_outlive_loading_and_unloading(seed: int) -> None:
    """64 streams at a time while adapters are loaded, rolled back and unloaded: every request that began ends whole.

    Each text is that of a revision of its adapter; a name that is gone is refused as such, and nothing else fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for number in range(6):
            adapter_servers.write(Path(folder) / str(number), number, 4 + 2 * number)
        config = ServeConfig(port=0, name="tiny", adapter_dirs=(folder,), admin_keys=(adapter_servers.ADMIN,))
        engine = adapter_servers.engine()
        try:
            with servers.running(adapter_servers.backend, config) as (_, url):
                asyncio.run(_load(url, random.Random(seed)))
        finally:
            for name in engine.adapters.names:
                engine.unload_adapter(name)
    adapters.check_slots(engine)
    engines.check_books(engine)
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[union-attr]


async def _load(url: str, rng: random.Random) -> None:
    limits = httpx.Limits(max_connections=STREAMS + 8)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        own = {"authorization": f"Bearer {adapter_servers.ADMIN}"}

        async def manage(what: str, **body: str) -> int:
            return (await client.post(f"/v1/{what}_lora_adapter", json=body, headers=own)).status_code

        async def say(model: str) -> tuple[int, str]:
            body = {"model": model, "prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                return answer.status_code, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
            return 200, answer.json()["choices"][0]["text"]

        texts = {}
        for number in range(6):
            assert await manage("load", lora_name="x", lora_path=str(number)) == 200
            texts[number] = (await say("x"))[1]
        legal, base = {*texts.values()}, (await say("tiny"))[1]
        assert await manage("unload", lora_name="x") == 200
        ends: Counter[Any] = Counter()
        busy = True

        async def stir() -> None:
            while busy:
                name, what = f"v{rng.randrange(3)}", rng.choice(["load", "load", "load", "rollback", "unload"])
                body = {"lora_path": str(rng.randrange(6))} if what == "load" else {}
                status = await manage(what, lora_name=name, **body)
                assert status == 200 or what != "load"
                ends[what, status] += 1

        async def ask(model: str) -> None:
            status, text = await say(model)
            if status == 200:
                assert text in ({base} if model == "tiny" else legal)
            else:
                assert status == 404, text
                assert model.startswith("v"), text
            ends[status] += 1

        stirring = asyncio.create_task(stir())
        rounds = 0
        while rounds < 3 or (ends["load", 200] <= 10 and rounds < 20):  # a busy machine answers few of them in three
            models = [rng.choice(["v0", "v1", "v2", "tiny"]) for _ in range(STREAMS)]
            await asyncio.gather(*map(ask, models))
            rounds += 1
        busy = False
        await stirring
        assert ends[200] + ends[404] == rounds * STREAMS
        assert ends[200] > STREAMS
        assert ends["load", 200] > 10
