"""LoRA adapters: tokens per second served with several in a batch over the base alone, the time of a training step over
that of the whole model, and bytes of a step.

    python -m benchmarks.adapters [--model smollm2] [--batch 32] [--ranks 4,8,16] [--counts 1,8,16,32] [--json FILE]
    python -m benchmarks.adapters --train [--ranks 8,16]
    python -m benchmarks.adapters --matmuls
    python -m benchmarks.adapters --traces
    python -m benchmarks.adapters --on v6e:1x1,h100:1x1 [--slots 8,32] [--rank 16] [--tiny]

The first decodes on this machine, with random adapters of every projection. The engine without slots, and the one with
slots serving the base and 1, 8, ... adapters in a batch of the same sequences, take turns; the median counts. Pages
have as many ranks as the adapters. Then steps of SFT of the whole model and of each rank of LoRA take turns. Ratios are
of processor time, of all cores, so that other work of the machine does not change them.
``--matmuls`` times matmuls alone, by the two ways of the plain implementation. ``--traces`` draws requests for
Llama-3-8B on 80 GB and counts, at equal memory, adapters that are on the device when a request needs them: with a pool
of their own, and in one pool with the KV cache (S-LoRA's). The last compiles the decode step of the recipe llama3_8b in
bfloat16 for a device far away and reads its bytes from the program's text, as ``benchmarks.engine_bytes`` does; every
slot is counted as in use. Layers are apart on GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def random_adapter(model: Any, seed: int, rank: int) -> Any:
    """Adapter of every projection, with small random factors."""
    from jaxllm.peft import Adapter, LowRank
    from jaxllm.peft.adapter import factor_shapes

    rng, factors = np.random.default_rng(seed), {}
    for path, linear in model.linears().items():
        a, b = (rng.normal(size=shape).astype(np.float32) * 0.01 for shape in factor_shapes(linear, rank))
        factors[path] = LowRank(a, b, 1.0)
    return Adapter("lora", factors, {path: (rank,) * one.a.shape[0] for path, one in factors.items()})


def decode_seconds(engine: Any, batch: int, tokens: int, adapters: Sequence[str | None]) -> tuple[float, float]:
    """Time from the last first token to the last token of a batch, whose sequences use the adapters in turn: seconds of
    the clock, and of all processors.
    """
    from jaxllm.infer import SamplingParams

    rng, params = np.random.default_rng(0), SamplingParams(max_tokens=tokens, temperature=0.0)
    for i in range(batch):
        engine.submit(rng.integers(0, engine.vocab_size, 16), params, adapter=adapters[i % len(adapters)])
    seen: set[int] = set()
    first = time.perf_counter(), time.process_time()
    while engine.busy:
        for delta in engine.step():
            if delta.tokens and delta.request.id not in seen:
                seen.add(delta.request.id)
                first = time.perf_counter(), time.process_time()
    return time.perf_counter() - first[0], time.process_time() - first[1]


def measure(model: str, batch: int, tokens: int, rank: int, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Tokens per second of each way to serve a batch."""
    from jaxllm.infer import Engine, EngineConfig, load_model

    loaded = load_model(model)
    sizes = EngineConfig(
        max_sequences=batch, max_batched_tokens=max(64, batch), max_len=16 + tokens, buckets=(max(64, batch),),
        samplers=("plain",), prefix_cache=False, decode_steps=16,
    )  # fmt: skip

    def built(slots: int) -> Any:
        config = dataclasses.replace(sizes, adapter_slots=slots, adapter_rank=rank, adapter_page_ranks=min(rank, 16))
        return Engine.of(loaded.model, loaded.params, config, mesh=loaded.mesh)

    plain, served = built(0), built(max(counts))
    for n in range(max(counts)):
        served.load_adapter(f"a{n}", random_adapter(loaded.model, n, rank))
    ways: dict[str, tuple[Any, Sequence[str | None]]] = {
        "the base, no slots": (plain, (None,)),
        "the base": (served, (None,)),
    }
    for count in counts:
        ways[f"{count} adapters"] = served, [f"a{n}" for n in range(count)]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (engine, adapters) in ways.items():
            seconds = decode_seconds(engine, batch, tokens, adapters)
            taken[name] += [seconds] if turn else []
    rows = []
    for name, seconds in taken.items():
        clock, processor = (statistics.median(times) for times in zip(*seconds, strict=True))
        base = statistics.median(times[1] for times in taken["the base, no slots"])
        speed = batch * (tokens - 1) / clock
        rows.append({"rank": rank, "batch": batch, "way": name, "tokens/s": speed, "of the base": base / processor})
        print(
            f"rank {rank:3}, batch {batch}: {name:20} {speed:8.1f} tokens/s, {base / processor:.2f} of the base's "
            "speed by processor time",
            flush=True,
        )
    return rows


def train_steps(rows: int, length: int, ranks: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Processor time of a training step of the recipe sft_smollm2 with LoRA, over that of the whole model."""
    import jax

    from jaxllm.models import functional
    from jaxllm.peft import AdapterConfig, start_params
    from jaxllm.train import abstract_state, init_state
    from jaxllm.train.run import build_value_and_grad
    from jaxllm.train.run_model import run_model
    from jaxllm.train.step.step_builder import build_optimizer, build_step
    from recipes.sft import sft_smollm2
    from sharding import MeshSpec

    mesh, whole = MeshSpec.parse("dp").build(jax.devices()[:1]), sft_smollm2()
    whole = dataclasses.replace(
        whole, accumulate=1, data=dataclasses.replace(whole.data, seq_len=length, batch_size=rows)
    )
    ways, states = {}, {}
    batch = random_batch(rows, length, whole.model.vocab_size)
    with jax.set_mesh(mesh):
        base = functional(whole.model).init(jax.random.key(0))
        for name, adapter in (
            ("the whole model", AdapterConfig()),
            *((f"lora of rank {r}", AdapterConfig("lora", r)) for r in ranks),
        ):
            run = dataclasses.replace(whole, adapter=adapter)
            model = run_model(run)
            optimizer = build_optimizer(run, model)
            params = start_params(model, adapter, base, mesh, 0) if adapter else base
            abstract = abstract_state(model, optimizer, mesh)
            states[name] = init_state(model, optimizer, mesh, 0, abstract, jax.tree.map(jax.numpy.copy, params))
            step = build_step(run, model, build_value_and_grad(run, model, mesh), optimizer)
            ways[name] = jax.jit(step, donate_argnums=0)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, step in ways.items():
                start = time.process_time()
                states[name], metrics = step(states[name], batch)
                jax.block_until_ready((states[name], metrics))
                taken[name] += [time.process_time() - start] if turn else []
    middle = {name: statistics.median(seconds) for name, seconds in taken.items()}
    found = []
    for name, seconds in middle.items():
        ratio = seconds / middle["the whole model"]
        found.append({"step": name, "rows": rows, "length": length, "seconds": seconds, "of the whole": ratio})
        print(
            f"step of {rows} x {length} tokens: {name:16} {seconds:7.2f} s, {ratio:.2f} of the whole model's",
            flush=True,
        )
    return found


def matmuls(rows: int, slots: int, rank: int, rounds: int, layers: int = 30) -> list[dict[str, Any]]:
    """Processor time of a matmul with adapters over that without, for SmolLM2's sizes; the least of all rounds."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_lora import schedule_tiles
    from pallas_kernels.grouped_lora.xla import by_row, by_tile

    draw, found = np.random.default_rng(0).normal, []
    own = np.arange(rows, dtype=np.int32) % slots, np.arange(slots, dtype=np.int32)[:, None], np.ones(slots, np.float32)
    schedule = schedule_tiles(*map(jnp.asarray, own))
    for k, n in ((576, 576), (576, 1536)):
        sizes = (rows, k), (layers, k, n), (layers, slots, rank, k), (layers, slots, rank, n)
        arrays = [jnp.asarray(draw(size=size), jnp.float32) for size in sizes]

        def run(x: Any, w: Any, a: Any, b: Any, way: Any) -> Any:
            def layer(x: Any, weights: Any) -> Any:
                w, a, b = weights
                y = x @ w if way is None else x @ w + way(x, a, b, schedule)
                return y[:, : x.shape[1]] / jnp.max(jnp.abs(y)), None

            return jax.lax.scan(layer, x, (w, a, b))[0]

        program = jax.jit(run, static_argnums=4)
        taken: dict[str, list[float]] = {}
        for turn in range(rounds + 1):
            for name, way in (("the base", None), ("tile by tile", by_tile), ("row by row", by_row)):
                start = time.process_time()
                program(*arrays, way).block_until_ready()
                taken.setdefault(name, []).extend([time.process_time() - start] if turn else [])
        for name, seconds in taken.items():
            of_base = min(taken["the base"]) / min(seconds)
            found.append(
                {"matmul": [k, n], "rows": rows, "slots": slots, "rank": rank, "way": name, "of base": of_base}
            )
            print(f"{rows} rows, {slots} adapters of rank {rank}, {k} x {n}: {name:12} {of_base:.2f}", flush=True)
    return found


@dataclasses.dataclass(frozen=True)
class Trace:
    """Drawn requests for Llama-3-8B in bfloat16 on 80 GB: a heavy tail of 2,000 adapters of ranks 8 to 64.

    Attributes:
        load: running requests that arrivals would keep busy, over those that the whole memory holds.
        own: share of the memory that adapters have for themselves; 0: they share it with the KV cache.
    """

    load: float
    own: float

    MEMORY, TOKENS, KV_BYTES, RANK_BYTES = 60e9, 4096, 131_072, 5.24e6

    def run(self, requests: int = 20_000) -> dict[str, float]:
        """Share of requests whose adapter was there, requests that ran at a time, and those that waited."""
        rng = np.random.default_rng(0)
        names = np.minimum(rng.zipf(1.2, requests) - 1, 1999)
        size = rng.choice([8, 16, 32, 64], 2000) * self.RANK_BYTES
        need = rng.integers(self.TOKENS // 4, self.TOKENS, requests) * self.KV_BYTES
        steps = rng.integers(50, 400, requests)
        rate = self.load * self.MEMORY / (need.mean() * steps.mean())
        arrives = np.cumsum(rng.exponential(1 / rate, requests))
        resident: dict[int, int] = {}  # users of each adapter; least recently used first
        running: list[tuple[float, int]] = []
        kv = held = now = hits = waited = area = 0.0
        for i, name in enumerate(names):
            begin = now = max(now, arrives[i])
            while True:
                for done, other in [one for one in running if one[0] <= now]:
                    running.remove((done, other))
                    kv, resident[names[other]] = kv - need[other], resident[names[other]] - 1
                more = 0.0 if name in resident else size[name]
                room = (1 - self.own) * self.MEMORY - kv - need[i]
                spare = self.own * self.MEMORY if self.own else room
                idle = [other for other, users in resident.items() if not users and other != name]
                while held + more > spare and idle:
                    held -= size[idle[0]]
                    del resident[idle.pop(0)]
                if room >= 0 and held + more <= spare:
                    break
                now = min(done for done, _ in running)
            hits, waited, held, kv = hits + (name in resident), waited + (now > begin), held + more, kv + need[i]
            resident[name] = resident.pop(name, 0) + 1
            running.append((now + steps[i], i))
            area += steps[i]
        return {"there": hits / requests, "at a time": area / now, "waited": waited / requests}


def traces() -> list[dict[str, Any]]:
    """Adapters that are there when a request needs them, by load and by how memory is divided."""
    rows = []
    for load in (0.3, 0.6, 0.9):
        for own in (0.0, 0.05, 0.1, 0.2):
            row = {"load": load, "own": own, **Trace(load, own).run()}
            rows.append(row)
            name = f"{own:.0%} of the memory for adapters" if own else "one pool with the KV cache"
            print(
                f"load {load:.0%}: {name:30} {row['there']:.1%} are there, {row['at a time']:.0f} requests at a time, "
                f"{row['waited']:.1%} waited",
                flush=True,
            )
    return rows


def random_batch(rows: int, length: int, vocab: int) -> Any:
    """Batch of random tokens, all of them targets."""
    from jaxllm.data import Batch

    tokens = np.random.default_rng(0).integers(0, vocab, (rows, length + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy()
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((rows, length), np.int32), positions)


def compiled(topology: Any, batch: int, context: int, slots: int, rank: int, tiny: bool) -> dict[str, Any]:
    """In a child that is set up for the topology's compiler: bytes of a decode step."""
    import jax
    import jax.numpy as jnp

    from jaxllm.compiler import hbm_traffic
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.decode_benchmark import kv_bytes_per_token
    from jaxllm.infer.runner.adapter_pool import AdapterPool
    from jaxllm.infer.runner.paged_cache import layer_groups
    from jaxllm.infer.runner.serving_mesh import serving_model
    from jaxllm.infer.runner.step.engine_step import EngineStep
    from jaxllm.infer.runner.step.step_shape import StepShape
    from jaxllm.models import functional, unstack_layers
    from pallas_kernels.paged_attention import Slots
    from recipes.llama3 import llama3_8b

    config = dataclasses.replace(llama3_8b().model, param_dtype="bfloat16", dtype="bfloat16")
    if tiny:
        config = dataclasses.replace(config, layers=2, vocab_size=512)
    model, groups = serving_model(functional(config)), layer_groups(config)
    page, columns = 32, 2 * context // 32
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.Mesh(np.array(topology.devices()[:1]), ("data",), axis_types=(auto,))
    place = jax.NamedSharding(mesh, jax.P())

    def abstract(size: Any, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(size, dtype, sharding=place)

    with jax.set_mesh(mesh):
        form = groups[0].format()
        pool = abstract((config.layers, batch * columns + 1, form.kv_heads, page, form.width), jnp.bfloat16)
        shapes = model.abstract()
        if topology.platform == "gpu":  # where a layer would be copied out of a stack before each matmul
            shapes = jax.eval_shape(unstack_layers, shapes)
        params = jax.tree.map(lambda x: abstract(x.shape, x.dtype), shapes)
        weights, factors, adapters = params, (), None
        if slots:
            owned = AdapterPool(model, params, EngineConfig(adapter_slots=slots, adapter_rank=rank))
            factors, adapters = owned.arrays(lambda axes, shape: place), (owned.slots, owned.columns)
            weights = owned.weights(params, factors)
        shape = StepShape(batch, batch, True, False, batch, columns, 1, 8, 1, "float32", adapters=adapters)
        step = jax.jit(EngineStep(model, model, groups, shape, config.vocab_size).__call__, donate_argnums=(1, 2))
        last, packed = (abstract((1, n), jnp.int32) for n in (batch, shape.inputs.size))
        program = step.lower(weights, (Slots(pool),), last, packed).compile()
    text = program.as_text() or ""
    found = hbm_traffic.read(text)
    memory: Any = program.memory_analysis()
    return {
        "weights": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)),
        "adapters": sum(x.size * x.dtype.itemsize for x in factors),
        "moved": hbm_traffic.read(text, turns=2).bytes - found.bytes + batch * context * kv_bytes_per_token(config),
        "temporaries": memory.temp_size_in_bytes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures or compiles, and prints."""
    from sharding.isolate import run_isolated

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ranks", default="4,8,16")
    parser.add_argument("--counts", default="1,8,16,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--train-tokens", type=int, default=128, help="tokens of each of four rows of a step; 0: no steps"
    )
    parser.add_argument("--train", action="store_true", help="time training steps alone")
    parser.add_argument("--on", default="", help="compile for these instead of measuring here")
    parser.add_argument("--slots", default="0,8,32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true", help="two layers and a small vocabulary, to try the command")
    parser.add_argument("--matmuls", action="store_true", help="time matmuls of one layer alone, 16 adapters")
    parser.add_argument("--traces", action="store_true", help="count adapters that are there in drawn traces")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for on in options.on.split(",") if options.on else ():
        for slots in map(int, options.slots.split(",")):
            sizes = {"batch": options.batch, "context": options.context, "slots": slots, "rank": options.rank}
            row = run_isolated("benchmarks.adapters:compiled", on, {**sizes, "tiny": options.tiny})
            rows.append({"on": on, **sizes, **row})
            print(
                f"{on:9} batch {options.batch}, {slots:2} slots of rank {options.rank}: "
                f"{row['moved'] / 1e9:6.2f} GB moved, "
                f"{row['weights'] / 1e9:.2f} GB of weights, {row['adapters'] / 1e9:.2f} of adapters, "
                f"{row['temporaries'] / 1e6:.0f} MB of temporaries",
                flush=True,
            )
    if options.matmuls:
        for rank in map(int, options.ranks.split(",")):
            rows += matmuls(options.batch, 16, rank, 5 * options.rounds)
    elif options.traces:
        rows += traces()
    elif not options.on:
        counts = [int(count) for count in options.counts.split(",")]
        for rank in () if options.train else map(int, options.ranks.split(",")):
            rows += measure(options.model, options.batch, options.tokens, rank, counts, options.rounds)
        if options.train_tokens:
            ranks = [int(rank) for rank in options.ranks.split(",")]
            rows += train_steps(4, options.train_tokens, ranks, options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
