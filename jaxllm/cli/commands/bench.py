"""``jaxllm bench``: decode throughput of a model and its share of the roofline; ``jaxllm bench serve``: a load test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import load_with_progress
from jaxllm.cli.runtime import use_compilation_cache


def bench(argv: list[str]) -> int:
    """Measure decode speed: `jaxllm bench MODEL`; or load-test a server: `jaxllm bench serve`."""
    return bench_serve(argv[1:]) if argv[:1] == ["serve"] else bench_model(argv)


def bench_model(argv: list[str]) -> int:
    """Measure how fast a model writes, and its share of the roofline: `jaxllm bench MODEL`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        batches: tuple[int, ...] = (1, 16),
        prompt: int = 64,
        tokens: int = 64,
        rounds: int = 3,
        dtype: Literal["float32", "bfloat16"] | None = None,
        layers: Literal["stacked", "apart"] = "stacked",
    ) -> int:
        """Greedy continuations of random prompts, the fastest of some rounds.

        The roofline is the time to read the weights and what is cached once a step, by the data sheet's bandwidth of
        the memory, or on a CPU by a measured one.

        Args:
            model: whatever `jaxllm generate` takes.
            batches: how many sequences at a time.
            prompt: tokens of each prompt.
            tokens: tokens made after each.
            rounds: how often each is measured.
            dtype: what another library's model is computed in, float32 by default.
            layers: apart: each in arrays of its own, which is faster after compiling for longer.
        """
        use_compilation_cache()
        from jaxllm.infer.decode_benchmark import Bench, memory_bandwidth

        if min((*batches, prompt, rounds)) < 1 or tokens < 2:
            raise UsageError("give batches, prompts and rounds of 1 or more, and 2 tokens or more to make.")
        loaded, bandwidth = load_with_progress(model, dtype, layers), memory_bandwidth()
        print(f"{model}, prompts of {prompt} tokens, {tokens} made; memory {bandwidth / 1e9:,.0f} GB/s")
        for batch in batches:
            measured = Bench(loaded, batch, prompt, tokens, bandwidth)
            measured.run()
            print(min((measured.run() for _ in range(rounds)), key=lambda figures: figures.seconds), flush=True)
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm bench")


def bench_serve(argv: list[str]) -> int:
    """Load a server that speaks OpenAI's API, and measure it: `jaxllm bench serve --url http://127.0.0.1:8000`."""

    def run(
        url: str = "http://127.0.0.1:8000",
        model: str | None = None,
        clients: int | None = None,
        rate: float | None = None,
        trace: Path | None = None,
        requests: int = 100,
        prompt: int = 64,
        tokens: int = 64,
        ttft: float = 1.0,
        tpot: float = 0.1,
        seed: int = 0,
        json: Path | None = None,
        plot: Path | None = None,
    ) -> int:
        """Streams completions and prints throughput, times to the first token and between tokens, and goodput.

        Args:
            url: of the server. $JAXLLM_API_KEY is sent as its key.
            model: to ask for; the server's first by default.
            clients: so many ask, each again when it is answered; 8 by default.
            rate: instead, requests a second that come at random, however slow the server is; inf for all at once.
            trace: instead, a file with a line {"at": seconds, "prompt": text, "max_tokens": n} a request.
            requests: how many.
            prompt: about how many tokens each begins with.
            tokens: made for each at most.
            ttft: seconds to the first token that a good answer keeps.
            tpot: seconds a token after it that a good answer keeps.
            seed: of prompts and arrivals.
            json: a file for the figures.
            plot: an image of their distributions.
        """
        import asyncio
        import json as as_json

        from jaxllm.serve import load_benchmark

        if sum(way is not None for way in (clients, rate, trace)) > 1:
            raise UsageError("give one of --clients, --rate and --trace.")
        if min(requests, prompt, tokens, clients or 1) < 1 or (rate is not None and not rate > 0):
            raise UsageError("give 1 or more requests, clients and tokens, and a rate above 0.")
        asks = (
            load_benchmark.read_trace(trace)
            if trace
            else load_benchmark.random_requests(requests, rate or float("inf"), prompt, tokens, seed)
        )

        async def load() -> list[load_benchmark.RequestResult]:
            client = load_benchmark.LoadClient(url, model or "", os.environ.get("JAXLLM_API_KEY", ""))
            try:
                client.model = model or (await client.models())[0]
            except OSError as error:
                raise UsageError(f"{url} does not answer: {error}") from None
            if trace is None and rate is None:
                return await load_benchmark.run_closed_loop(client, asks, clients or 8)
            return await load_benchmark.run_open_loop(client, asks)

        seen = asyncio.run(load())
        figures = load_benchmark.summary(seen, ttft, tpot)
        print(load_benchmark.show(figures))
        if json is not None:
            json.write_text(as_json.dumps(figures, indent=1) + "\n")
        if plot is not None:
            load_benchmark.plot(seen, plot)
        return 1 if figures["failed"] else 0

    return tyro.cli(run, args=argv, prog="jaxllm bench serve")
