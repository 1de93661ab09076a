"""Attention pools in the engine: tokens are those of a colocated engine, bytes those of the formula, pages apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxllm.infer import Engine, EngineConfig, Request
from jaxllm.infer.attention_pool.offloaded_runner import OffloadedRunner
from jaxllm.infer.pools.pool_argument import AttentionPoolSizes
from jaxllm.infer.scheduling.policies import Service
from tests.infer import engines
from tests.proofs.engine_two.disaggregated import DEGREES, DEVICES, POLICIES, compare
from tests.proofs.harness import proof

WAYS = ("roomy", "tight, recompute", "tight, swap", "contiguous", "one after the other")


def drawn_sizes(rng: np.random.Generator, model: str) -> AttentionPoolSizes:
    """Devices of both parts: any that heads, experts, widths and the vocabulary divide over; or pages spread over two
    to five.
    """
    latent = any(block.attention.kv_spec.latent for block in engines.model_of(model, "float64").blocks)
    while True:
        weights = int(rng.choice([n for n in DEGREES[model] if engines.VOCAB % n == 0]))
        heads = int(rng.choice(DEGREES[model]))
        axis = "tensor" if latent or rng.random() < 2 / 3 else "context"
        found = AttentionPoolSizes(weights, heads if axis == "tensor" else int(rng.integers(2, 6)), axis)
        if found.devices <= DEVICES:
            return found


def by_formula(model: str, sizes: AttentionPoolSizes, rows: int, halves: bool) -> tuple[int, int]:
    """Bytes that a step sends and gets back: rows x (q + k + v), and rows x heads x value dim, of all layers."""
    sent = returned = 0
    rows = 2 * ((rows + 1) // 2) if halves else rows
    for block in engines.model_of(model, "float64").blocks:
        layer, spec = block.attention, block.attention.kv_spec
        if sizes.axis == "context":
            kv, copies = spec.kv_heads, sizes.attention
        else:
            kv, copies = max(spec.kv_heads, sizes.attention), 1  # a copy of a head for each device
        widths = layer.heads * spec.key_dim + kv * spec.key_dim + (0 if spec.latent else kv * spec.value_dim)
        sinks = (2 if halves else 1) * layer.heads if getattr(layer, "sinks", False) else 0
        sent += 8 * copies * (rows * widths + sinks)
        returned += 8 * rows * layer.heads * spec.value_dim
    return sent, returned


def watch(engine: Engine, model: str, sizes: AttentionPoolSizes) -> list[int]:
    """Bytes that each step moves less those of the formula, from now on; transfers are counted where they are made."""
    runner, wrong, moved = engine.runner, list[int](), [0]
    assert isinstance(runner, OffloadedRunner)
    own, away = set(runner.weight_devices.devices), set(runner.page_devices.devices)
    run = runner.run

    def put(x: Any, device: Any, put: Any = jax.device_put, **fields: Any) -> Any:
        """Counts what goes from one part's devices to the other's, by the devices that it is on."""
        targets = device if isinstance(device, list) else [None] * len(jax.tree.leaves(x))
        for one, target in zip(jax.tree.leaves(x), targets, strict=False):
            if target is not None and isinstance(one, jax.Array):
                (source,) = one.devices()
                assert (source in own) != (source in away)
                assert (target in own) == (source in away)
                moved[0] += one.nbytes
        return put(x, device, **fields)

    def watched(shape: Any, packed: Any, masks: Any = None) -> Any:
        moved[0], real = 0, jax.device_put
        jax.device_put = put
        try:
            out = run(shape, packed, masks)
        finally:
            jax.device_put = real
        wrong.append(moved[0] - sum(by_formula(model, sizes, shape.tokens, shape.halves)))
        return out

    runner.run = watched  # type: ignore[method-assign]
    return wrong


def books(engine: Engine) -> Any:
    """Holders of every page, free pages, and page tables of an engine's running sequences."""
    scheduler: Any = engine.scheduler
    held = [(list(pages.ref_counts), list(pages._free)) for pages in scheduler.pages]
    return held, [[table[s.slot].tolist() for table in scheduler.tables] for s in scheduler.running]


def serve_alike(plain: Engine, apart: Engine, asked: list[dict[str, Any]]) -> tuple[list[Request], list[Request], int]:
    """The same requests in both engines, step by step; how often their page books differ.

    Of a pool of windows whose pages are spread, each device has a whole number, so that there may be more pages: then
    books are not compared.
    """
    counts = [[pages.count for pages in one.scheduler.pages] for one in (plain, apart)]
    made: tuple[list[Any], list[Any]] = ([None] * len(asked), [None] * len(asked))
    step = differ = 0
    while plain.busy or apart.busy or None in made[0]:
        for number, one in enumerate(asked):
            for engine, own in zip((plain, apart), made, strict=True):
                if own[number] is None and one.get("at", 0) <= step:
                    level = Service(priority=len(one["prompt"]) % 3, key=str(len(one["prompt"]) % 2))
                    own[number] = engine.submit(one["prompt"], one["params"], salt=one.get("salt", ""), service=level)
                if own[number] is not None and one.get("cancel") == step:
                    engine.cancel(own[number])
        for engine in (plain, apart):
            engine.step()
            engines.check_books(engine)
        differ += counts[0] == counts[1] and books(plain) != books(apart)
        step += 1
        assert step < 5000
    return *made, differ


@proof(
    "engine_two", count=30, sample=1, float64=True, bound={"logprob": 1e-10, "bytes": 0, "pages": 0, "books": 0},
    counts=("steps", "single", "halves", "spread"),
)  # fmt: skip
def attention_pools_are_colocated(seed: int) -> dict[str, float]:
    """Random traffic with weights and attention on drawn devices of their own, and in one colocated engine.

    Prompts in chunks, common prefixes, several completions, cancellations, too few pages where the way says so,
    formats of the KV cache, policies, whole steps and halves. Bytes of pages on devices of weights, and of weights on
    devices of pages, are counted as wrong ones.
    """
    rng = np.random.default_rng(seed)
    model = str(rng.choice(list(DEGREES)))
    sizes = drawn_sizes(rng, model)
    # Spread pages are attended to in parts, in which values of formats are read in another precision.
    kv = "auto" if sizes.axis == "context" else str(rng.choice(["auto", "auto", "bfloat16", "int8"]))
    way = engines.ENGINES[str(rng.choice(WAYS))]
    config: EngineConfig = dataclasses.replace(
        way, kv_dtype=kv, decode_steps=1, buckets=None if rng.random() < 0.5 else way.buckets
    )
    if sizes.axis == "context" and config.pages is not None:  # of each device
        config = dataclasses.replace(config, pages=sizes.attention * -(-config.pages // sizes.attention))
    policy = POLICIES[rng.integers(len(POLICIES))]
    overlap = str(rng.choice(["none", "nano"]))
    # The colocated engine has programs of as many rows.
    prompt_rows = dataclasses.replace(config, pools="model=tensor:1, attention=tensor:1").prompt_buckets
    plain = engines.build(dataclasses.replace(config, buckets=prompt_rows), model, "float64", policy=policy)
    pools = f"model=tensor:{sizes.model}, attention={sizes.axis}:{sizes.attention}"
    pages = config.pages if sizes.axis == "tensor" or config.pages is None else config.pages // sizes.attention
    away = dataclasses.replace(config, pools=pools, overlap=overlap, pages=pages)
    apart = engines.build(away, model, "float64", policy=policy)
    wrong, worst, differ = watch(apart, model, sizes), 0.0, 0
    runner = apart.runner
    assert isinstance(runner, OffloadedRunner)
    for _ in range(2):
        want, got, differs = serve_alike(plain, apart, engines.traffic(rng, config, 10))
        worst, differ = max(worst, compare(got, want)), differ + differs
        if kv == "auto":
            worst = max(worst, engines.error(model, "float64", got))
    own, others = set(runner.weight_devices.devices), set(runner.page_devices.devices)
    strays = sum(x.nbytes for x in jax.tree.leaves(runner.pools) if x.sharding.device_set & own)
    strays += sum(x.nbytes for x in jax.tree.leaves((runner.params, runner.last)) if x.sharding.device_set & others)
    assert len(wrong) == runner.transfers.steps > 0
    return {
        "logprob": worst,
        "bytes": float(max(map(abs, wrong))),
        "pages": float(strays),
        "books": float(differ),
        "steps": float(len(wrong)),
        "single": float(any(name.endswith("-single") for name in runner.programs)),
        "halves": float(overlap == "nano"),
        "spread": float(sizes.axis == "context"),
    }
