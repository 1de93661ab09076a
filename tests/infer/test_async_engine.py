"""Async engine: streams of many clients are never mixed, and nothing outlives its client."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from jaxllm.infer import AsyncEngine, EngineStopped, SamplingParams
from tests.infer import engines

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


async def read(engine: AsyncEngine, prompt: list[int], params: SamplingParams, most: int | None = None) -> list[int]:
    tokens: list[int] = []
    async with contextlib.aclosing(engine.stream(prompt, params)) as stream:
        async for piece in stream:
            tokens += piece.tokens
            if most is not None and len(tokens) >= most:
                break
    return tokens


@pytest.mark.drawn(0.3)
def test_streams_are_what_each_would_be_alone(rng):
    plain = engines.engine("roomy")
    prompts = [rng.integers(0, engines.VOCAB, n).tolist() for n in (3, 9, 1, 14, 5, 7)]
    want = [r.sequences[0].tokens for r in engines.serve(plain, [{"prompt": p, "params": GREEDY} for p in prompts])]

    async def main() -> list[list[int]]:
        async with AsyncEngine(plain) as engine:
            return await asyncio.gather(*(read(engine, p, GREEDY) for p in prompts))

    got = asyncio.run(main())
    assert [p + g for p, g in zip(prompts, got, strict=True)] == want


@pytest.mark.drawn(1)
def test_a_reader_that_leaves_ends_its_request():
    plain = engines.engine("roomy")
    before = plain.metrics.finished.get("cancelled", 0)

    async def main() -> None:
        async with AsyncEngine(plain) as engine:
            left = asyncio.create_task(read(engine, [1, 2], SamplingParams(max_tokens=60, n=2), most=3))
            killed = asyncio.create_task(read(engine, [3], SamplingParams(max_tokens=60)))
            stays = asyncio.create_task(read(engine, [4], GREEDY))
            await left
            killed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await killed
            assert len(await stays) == 20
            while plain.busy:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert plain.metrics.finished["cancelled"] > before
    engines.check_books(plain)
    assert plain.scheduler.idle


@pytest.mark.drawn(2)
def test_refusals_reach_their_caller_and_a_stopped_engine_says_so():
    plain = engines.engine("roomy")

    async def main() -> None:
        async with AsyncEngine(plain) as engine:
            with pytest.raises(ValueError, match="a prompt is empty"):
                await read(engine, [], GREEDY)
            assert len(await read(engine, [1], GREEDY)) == 20
        with pytest.raises(EngineStopped):
            await read(engine, [1], GREEDY)

    asyncio.run(main())


def test_a_failure_in_the_thread_reaches_every_reader(monkeypatch):
    plain = engines.engine("roomy")

    async def main() -> None:
        async with AsyncEngine(plain) as engine:
            monkeypatch.setattr(plain, "step", lambda: 1 / 0)
            results = await asyncio.gather(*(read(engine, [n], GREEDY) for n in (1, 2)), return_exceptions=True)
            assert all(isinstance(r, EngineStopped) for r in results)
            assert any(isinstance(r.__cause__, ZeroDivisionError) for r in results)

    asyncio.run(main())
    monkeypatch.undo()
    for sequence in plain.scheduler.sequences():
        plain.cancel(sequence.request)
    while plain.busy:
        plain.step()
