"""``jaxllm bench``: decode throughput of a model and its share of the roofline; or the load of a server; or links,
operators of training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import check_kv_cache, check_offload, check_speculation, load_with_progress
from jaxllm.cli.runtime import processes, use_compilation_cache
from jaxllm.infer.kv_cache_options import KvFormat

if TYPE_CHECKING:
    from jaxllm.convert.load import LoadedModel


def bench(argv: list[str]) -> int:
    """Measure decode: `jaxllm bench MODEL`; a server: `bench serve`; links: `bench --links`."""
    if "--links" in argv:
        return bench_links([word for word in argv if word != "--links"])
    if any(word.split("=")[0] == "--operators" for word in argv):
        from jaxllm.cli.commands.planning.plan_profile import bench_operators

        return bench_operators(argv)
    return bench_serve(argv[1:]) if argv[:1] == ["serve"] else bench_model(argv)


def bench_model(argv: list[str]) -> int:
    """Measure decode throughput and its share of the roofline: `jaxllm bench MODEL`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        batches: tuple[int, ...] = (1, 16),
        prompt: int = 64,
        tokens: int = 64,
        rounds: int = 3,
        dtype: Literal["float32", "bfloat16"] | None = None,
        layers: Literal["stacked", "apart"] = "stacked",
        speculate: str | None = None,
        speculate_tokens: int | None = None,
        kv_format: KvFormat = "auto",
        kv_keep: str = "all",
        weights: str = "plain",
        offload: str | None = None,
        record: Path | None = None,
        tiers: Path | None = None,
        tiers_disk: Path | None = None,
    ) -> int:
        """Measures greedy decoding of random prompts; prints the fastest of several rounds per batch size.

        The roofline is the time to read weights and KV cache once per step, at the memory bandwidth of the data sheet,
        or on a CPU at a measured bandwidth.

        Args:
            model: model, as for `jaxllm generate`.
            batches: batch sizes to measure.
            prompt: prompt length in tokens.
            tokens: number of tokens to generate.
            rounds: number of rounds per batch size.
            dtype: compute dtype of a model from another library, float32 by default.
            layers: stacked: parameters of alike layers in one array; apart: one array per layer, which decodes faster
                on some devices and compiles longer.
            speculate: speculative decoding: ngram[:N] proposes what followed the last N tokens before, draft:MODEL what
                a smaller model samples, tree:MODEL,BUDGET a tree of its likeliest continuations, head:DIR what a
                trained layer over the model's features drafts, mtp what the model's own module for multi-token
                prediction drafts, self:LAYERS what the model samples with so many of its layers; the completion stays
                the same (docs/serve/speculation.md).
            speculate_tokens: with --speculate: number of tokens that are proposed and verified in one step; by default
                up to 4, as many as pay.
            kv_format: format of the KV cache: auto (the compute dtype), bf16, or 8, 4 or 2 bits with scales: int8, fp8,
                int4, bfp4, kivi4, kivi2; or shadowkv[:RANK[,TOKENS[,OUTLIERS]]], low-rank keys on the device, values on
                the host (what each costs: docs/serve/kv_cache.md).
            kv_keep: tokens that stay in the KV cache: all; window+sinks[:RECENT[,SINKS]], the most recent ones and
                the first few, by default 1024 and 4; corm[:THRESHOLD], those with that multiple of the even share of
                recent attention; pyramid[:SHARE], so many of all by recent attention, fewer in deeper layers;
                locret:HEADS.safetensors[,BUDGET], so many by trained heads; or chai[:SIZE], all, with one key for every
                SIZE kv heads that attend alike, 2 by default (docs/serve/kv_cache.md).
            weights: plain: quantised models are dequantised; packed: they stay as their files have them; int8, int4,
                mxfp4: matrices are rounded to that format after loading; experts_int2: those of experts alone.
            offload: a model that the device has no room for, as for `jaxllm generate` (docs/serve/offload.md); it has
                no roofline.
            record: measure instead the steps of an engine that serves batches up to the largest of these, of sequences
                of up to --prompt + --tokens, with as many tokens in a step as their prompts have, up to 2048, and write
                their times to a file, for `jaxllm simulate --steps FILE`.
            tiers: measure instead how fast layers compute at these batch sizes, and come from host memory and from
                files, and write that to a file, for `--offload fit,rates=FILE` (docs/serve/offload.md). The model need
                not fit.
            tiers_disk: with --tiers: directory on the disk to measure; by default that of temporary files.
        """
        check_speculation(speculate, speculate_tokens)
        check_kv_cache(kv_format, kv_keep)
        use_compilation_cache()
        from jaxllm.infer.decode_benchmark import DecodeBenchmark, memory_bandwidth

        if min((*batches, prompt, rounds)) < 1 or tokens < 2:
            raise UsageError("give --batches, --prompt and --rounds of 1 or more, and --tokens of 2 or more.")
        if record is not None:
            others = {
                "--tiers": tiers, "--tiers-disk": tiers_disk, "--offload": offload, "--speculate": speculate,
                "--kv-keep": None if kv_keep == "all" else kv_keep,
            }  # fmt: skip
            if given := [name for name, value in others.items() if value is not None]:
                raise UsageError(f"--record measures plain steps; leave {', '.join(given)} out.")
            check_outputs(record=record)
            loaded = load_with_progress(model, dtype, layers, weights=weights)
            return record_engine(loaded, model, record, max(batches), prompt, tokens, kv_format, rounds)
        if offload is not None and (tiers is not None or layers != "stacked"):
            raise UsageError("--offload streams layers; leave --tiers and --layers out.")
        check_offload(offload, None)
        if tiers is not None:
            from jaxllm.cli.tier_options import bench_tiers

            return bench_tiers(model, tiers, dtype, weights, batches, prompt, tiers_disk)
        if tiers_disk is not None:
            raise UsageError("--tiers-disk is for --tiers.")
        loaded = load_with_progress(
            model, dtype, layers, weights=weights, offload=offload, sequences=max(batches), max_len=prompt + tokens,
            kv_format=kv_format,
        )  # fmt: skip
        bandwidth = memory_bandwidth()
        print(f"{model}, prompts of {prompt} tokens, {tokens} generated; memory {bandwidth / 1e9:,.0f} GB/s")
        for batch in batches:
            measured = DecodeBenchmark(
                loaded, batch, prompt, tokens, bandwidth, speculate=speculate, speculate_tokens=speculate_tokens,
                kv_format=kv_format, kv_keep=kv_keep,
            )  # fmt: skip
            measured.run()
            print(min((measured.run() for _ in range(rounds)), key=lambda figures: figures.seconds), flush=True)
            if speculate is not None:
                print(measured.engine.metrics.show_drafts(), flush=True)
            if kv_keep != "all":
                print(measured.show_retention(), flush=True)
        return 0

    return parse_command(run, argv, "jaxllm bench")


def record_engine(
    loaded: LoadedModel, model: str, file: Path, batch: int, prompt: int, tokens: int, kv_format: KvFormat, rounds: int
) -> int:
    """Measures the steps of an engine, prints their times and writes them to a file."""
    from jaxllm.infer.engine_config import EngineConfig
    from jaxllm.infer.kv_cache_options import with_kv_cache
    from jaxllm.simulate.recorded import record_steps

    page = 32
    sizes = EngineConfig(
        max_sequences=batch, max_batched_tokens=max(batch, min(2048, batch * prompt)), max_len=prompt + tokens,
        samplers=("plain",), prefix_cache=False, page_size=page, pages=batch * (1 + -(-(prompt + tokens) // page)),
    )  # fmt: skip
    found = record_steps(
        loaded, with_kv_cache(sizes, kv_format, "all"), model, rounds=rounds,
        tell=lambda what: print(f"measuring {what}", file=sys.stderr, flush=True),
    )  # fmt: skip
    found.write(file)
    print(found)
    return 0


def bench_serve(argv: list[str]) -> int:
    """Load-test a server with OpenAI's API: `jaxllm bench serve --url http://127.0.0.1:8000`."""

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
        """Streams completions from a server; prints throughput, latencies (TTFT, TPOT) and goodput.

        Args:
            url: URL of the server. $JAXLLM_API_KEY is sent as its key.
            model: model to request; the server's first by default.
            clients: closed loop: number of concurrent clients, 8 by default.
            rate: open loop instead: requests per second at random (Poisson) times; inf for all at once.
            trace: open loop from a file instead, one line {"at": seconds, "prompt": text, "max_tokens": n} per request.
            requests: number of requests.
            prompt: approximate prompt length in tokens.
            tokens: maximum number of generated tokens per request.
            ttft: service-level objective for goodput: seconds to the first token.
            tpot: service-level objective for goodput: seconds per output token after the first.
            seed: seed of prompts and arrival times.
            json: file to write the results to.
            plot: image file to draw the distributions to.
        """
        import asyncio
        import json as as_json

        from jaxllm.serve import load_benchmark

        if sum(way is not None for way in (clients, rate, trace)) > 1:
            raise UsageError("give one of --clients, --rate and --trace.")
        if min(requests, prompt, tokens, clients or 1) < 1 or (rate is not None and not rate > 0):
            raise UsageError("give --requests, --prompt, --tokens and --clients of 1 or more, and --rate above 0.")
        check_outputs(json=json)
        load_requests = (
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
                return await load_benchmark.run_closed_loop(client, load_requests, clients or 8)
            return await load_benchmark.run_open_loop(client, load_requests)

        results = asyncio.run(load())
        figures = load_benchmark.summary(results, ttft, tpot)
        print(load_benchmark.show(figures))
        if json is not None:
            json.write_text(as_json.dumps(figures, indent=1) + "\n")
        if plot is not None:
            load_benchmark.plot(results, plot)
        return 1 if figures["failed"] else 0

    return parse_command(run, argv, "jaxllm bench serve")


def bench_links(argv: list[str]) -> int:
    """Measure the links between nodes of a job: `jaxllm bench --links`."""

    def run(
        units: int | None = None, names: tuple[str, ...] = (), message: str = "64MiB", out: Path | None = None
    ) -> int:
        """Sends messages between each two nodes, from all their devices at once; prints bandwidths and latencies.

        In a job of several processes each starts it, such as by `jaxllm launch`. The last lines are those of a cluster
        file for `jaxllm plan --on FILE.toml` (docs/train/unequal.md).

        Args:
            units: number of nodes or slices of equally many consecutive devices; one for each process by default.
            names: their names in the cluster file, such as new.0 new.1 old.0 old.1; node.0 and so on by default.
            message: bytes that each device sends at a time.
            out: file to write these lines to.
        """
        from jaxllm.cli.memory_budget import size_of

        nbytes = size_of("--message", message)
        check_outputs(out=out)
        with processes(advice="Start the measurement again.") as group:
            import jax

            from jaxllm.plan.unequal.link_benchmark import measure_links

            devices, many = jax.devices(), jax.process_count() if units is None else units
            if many < 2 or len(devices) % many or (names and len(names) != many):
                raise UsageError(
                    f"--links: {many} units with {len(names) or many} names, and {len(devices)} devices: give --units "
                    "that divide the devices, 2 or more, and a name for each."
                )
            each = len(devices) // many
            parts = [devices[n * each : (n + 1) * each] for n in range(many)]
            said = lambda line: print(line, file=sys.stderr, flush=True) if group.is_leader else None  # noqa: E731
            found = measure_links(parts, names or [f"node.{n}" for n in range(many)], nbytes, said)
            if group.is_leader:
                print(f"{found.table()}\n\n{found.toml()}")
                if out is not None:
                    out.write_text(found.toml() + "\n")
        return 0

    return parse_command(run, argv, "jaxllm bench --links")
