"""The KV cache's speed: bytes of a decode step by format, decoded tokens per second, and prefixes found in each tier.

    python -m benchmarks.serving.kv_cache [--context 32768] [--formats auto,int8,int4,bfp4,kivi4,kivi2]
        [--on v6e:1x1,h100:1x1] [--prompt 2048] [--model smollm2] [--rounds 5] [--parts bytes,tokens,tiers] [--tiny]
        [--json]

- "bytes": a decode step of the recipe llama3_8b in bfloat16 with one sequence of ``--context`` cached tokens, compiled
  for devices that are not here, as by `python -m benchmarks.engine_bytes`: what it moves in all, and the part that is
  the cache: whole pages, and with KIVI's formats the ring buffer.
- "tokens": tokens per second of one sequence of the model with so many cached tokens, on this machine. The decode
  program of an engine runs over pages that nobody has filled; what they hold does not change its time. The best of the
  rounds counts, and rounds take turns.
- "tiers": seconds to the first token of a prompt that is computed, and of the same prompt when its prefix is found on
  the device, in host memory, and on the disk. The median of the rounds.

``--tiny`` compiles two layers, and takes short contexts, to try the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = "auto,int8,int4,bfp4,kivi4,kivi2"
PAGE, STEPS = 128, 8
TINY_CONTEXT, TINY_PROMPT = 1024, 96


def compiled(topology: Any, kv_format: str, context: int, tiny: bool) -> dict[str, Any]:
    """In a child that is set up for the topology's compiler: bytes of a decode step, and of the cache that it reads."""
    import jax

    from benchmarks.engine_bytes import engine_program
    from jaxllm.compiler import hbm_traffic
    from jaxllm.infer.runner.paged_cache import layer_groups
    from jaxllm.infer.runner.step.step_shape import StepShape
    from recipes.llama3 import llama3_8b

    config = dataclasses.replace(llama3_8b().model, param_dtype="bfloat16", dtype="bfloat16")
    if tiny:
        config = dataclasses.replace(config, layers=2, vocab_size=512)
    group = layer_groups(config, kv_format)[0]
    shape = StepShape(
        1, 1, True, False, 1, context // PAGE + 1, 1, STEPS, 1, "float32", residual=group.residual > 0
    )  # fmt: skip
    layers = "apart" if topology.platform == "gpu" else "stacked"
    program, params, pool, _ = engine_program(topology, config, shape, PAGE, layers, kv_dtype=kv_format)
    mesh = jax.sharding.Mesh(np.array(topology.devices()[:1]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):  # slots are padded as on that device
        cache = group.sequence_bytes(context, PAGE)
    nbytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    text = program.as_text() or ""
    # One of several decode steps is what a second turn of their loop adds.
    moved = hbm_traffic.read(text, turns=2).bytes - hbm_traffic.read(text).bytes
    if group.residual:  # the kernel reads encoded pages and writes none, so the walker counts the whole pool a layer
        moved -= config.layers * nbytes(pool.in_pages())
    memory: Any = program.memory_analysis()
    read = nbytes(params) - (0 if config.tied else nbytes(params["embedding"]["table"]))
    return {
        "moved": moved + cache, "cache": cache, "weights": read, "temporaries": memory.temp_size_in_bytes,
    }  # fmt: skip


class CachedDecoding:
    """The decode program of an engine, over pages of a sequence of so many tokens that nobody has filled."""

    def __init__(self, loaded: Any, kv_format: str, context: int):
        from jaxllm.infer import EngineConfig
        from jaxllm.infer.engine.engine import Engine
        from jaxllm.infer.kv_cache_options import with_kv_cache

        sizes = EngineConfig(
            max_sequences=1, max_batched_tokens=64, max_len=context + 4 * STEPS, buckets=(64,), samplers=("plain",),
            prefix_cache=False, decode_steps=STEPS,
        )  # fmt: skip
        self.engine = Engine.of(loaded.model, loaded.params, with_kv_cache(sizes, kv_format), strict=True)
        self.runner: Any = self.engine.runner
        self.shape = self.runner.choose(1, 1, decode=True, full=False)
        self.bytes = sum(g.sequence_bytes(context, self.runner.spec.page_size) for g in self.runner.spec.groups)
        self.packed = np.zeros((1, self.shape.inputs.size), np.int32)
        views = self.shape.inputs.views(self.packed[0])
        views["starts"][...] = [0, 1]
        views["kv_lens"][...], views["steps"][...], views["stops"][...] = context, STEPS, -1
        views["tables"][...] = np.arange(self.shape.columns)

    def tokens_per_second(self) -> float:
        """Decoded tokens per second of one call of the program."""
        start = time.perf_counter()
        np.asarray(self.runner.run(self.shape, self.packed))
        return STEPS / (time.perf_counter() - start)


def first_token_seconds(engine: Any, prompt: Sequence[int]) -> tuple[float, int]:
    """(seconds from a prompt's submission to its first token, tokens of it that the prefix cache had)."""
    from jaxllm.infer import SamplingParams

    start = time.perf_counter()
    request, seen = engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0)), None
    while engine.busy:
        found = any(delta.tokens for delta in engine.step())
        seen = time.perf_counter() - start if found and seen is None else seen
    assert seen is not None
    return seen, request.cached_tokens


def tier_seconds(loaded: Any, kv_format: str, length: int, rounds: int, disk: Path) -> dict[str, float]:
    """Median seconds to the first token of a prompt: computed, and with its prefix found in each tier."""
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.engine.engine import Engine
    from jaxllm.infer.kv_cache_options import with_kv_cache

    page = 32
    sizes = EngineConfig(
        max_sequences=1, max_batched_tokens=256, max_len=length + page, buckets=(256,), samplers=("plain",),
        page_size=page, pages=length // page + 4,
    )  # fmt: skip
    tiers = with_kv_cache(sizes, kv_format, kv_host=4.0, kv_disk=disk)
    rng, found = np.random.default_rng(0), dict[str, list[float]]()
    build = lambda: Engine.of(loaded.model, loaded.params, tiers, strict=True)  # noqa: E731
    engine = build()
    for _ in range(rounds):
        prompt, other = (rng.integers(0, engine.vocab_size, length).tolist() for _ in range(2))
        for tier in ("computed", "device", "host", "disk"):
            if tier == "host":  # the pool holds one prompt: another one evicts this one's pages
                first_token_seconds(engine, other)
            if tier == "disk":
                engine.close()
                engine = build()
            seconds, cached = first_token_seconds(engine, prompt)
            if (cached > 0) != (tier != "computed"):
                raise RuntimeError(f"{cached} tokens of a prompt came from the prefix cache, of which it was {tier!r}.")
            found.setdefault(tier, []).append(seconds)
    engine.close()
    return {tier: statistics.median(seconds) for tier, seconds in found.items()}


def rows(options: argparse.Namespace, loaded: Any) -> Iterator[dict[str, Any]]:
    """Rows of the tables, one after the other."""
    from sharding.isolate import run_isolated

    formats, parts = options.formats.split(","), options.parts.split(",")
    for on in options.on.split(",") if "bytes" in parts else ():
        for kv in formats:
            given = {"kv_format": "bfloat16" if kv == "auto" else kv, "context": options.context, "tiny": options.tiny}
            yield {"part": "bytes", "on": on, "format": kv} | run_isolated(
                "benchmarks.serving.kv_cache:compiled", on, given
            )
    if "tokens" in parts:
        made = {kv: CachedDecoding(loaded(), kv, options.context) for kv in formats}
        best = dict.fromkeys(made, 0.0)
        for _ in range(options.rounds):
            for kv, one in made.items():
                best[kv] = max(best[kv], one.tokens_per_second())
        for kv, one in made.items():
            yield {"part": "tokens", "format": kv, "tokens_per_second": best[kv], "cache": one.bytes}
            one.engine.close()
    if "tiers" in parts:
        for kv in formats:
            with tempfile.TemporaryDirectory() as folder:
                seconds = tier_seconds(loaded(), kv, options.prompt, options.rounds, Path(folder))
            yield {"part": "tiers", "format": kv, "prompt": options.prompt} | seconds


def shown(row: dict[str, Any]) -> str:
    """Line of a row."""
    if row["part"] == "bytes":
        return (
            f"{row['on']:9} {row['format']:6} {row['moved'] / 1e9:7.3f} GB a step, {row['cache'] / 1e9:6.3f} of them "
            f"cache, {row['weights'] / 1e9:6.3f} weights; {row['temporaries'] / 1e6:.0f} MB of temporaries"
        )
    if row["part"] == "tokens":
        return f"{row['format']:6} {row['tokens_per_second']:8.2f} tokens/s, {row['cache'] / 1e6:8.1f} MB of cache"
    tiers = ", ".join(f"{tier} {1e3 * row[tier]:.0f} ms" for tier in ("computed", "device", "host", "disk"))
    return f"{row['format']:6} first token of {row['prompt']:,}: {tiers}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--on", default="v6e:1x1,h100:1x1")
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="bytes,tokens,tiers")
    parser.add_argument("--tiny", action="store_true", help="two compiled layers, short contexts, to try the command")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    options.context = options.context or (TINY_CONTEXT if options.tiny else 32768)
    options.prompt = options.prompt or (TINY_PROMPT if options.tiny else 2048)
    held: list[Any] = []

    def loaded() -> Any:
        from jaxllm.convert.load import load_model

        if not held:
            held.append(load_model(options.model))
        return held[0]

    for row in rows(options, loaded):
        print(json.dumps(row) if options.json else shown(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
