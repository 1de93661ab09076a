"""Tiny engines for tests and proofs, requests at random, and what must hold of them at every step."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig, Request, SamplingParams
from jaxllm.infer.scheduling.page_allocator import NO_PAGE
from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.infer.speculate.draft_head import DraftHead
from jaxllm.infer.speculate.draft_model import DraftModelProposer, ServedModel
from jaxllm.infer.speculate.head_draft import HeadProposer
from jaxllm.infer.speculate.layer_parallel_draft import LayerParallelProposer
from jaxllm.infer.speculate.self_draft import SelfDraftProposer
from jaxllm.infer.speculate.trained_draft import TrainedDraft
from jaxllm.infer.speculate.tree_draft import TreeDraftProposer
from jaxllm.infer.streaming.experts.active_slices import ActiveSlices
from jaxllm.infer.streaming.experts.mlp_slices import SlicedLayers, sliced_model
from jaxllm.infer.streaming.layer_store import LayerStore, LoadedLayers
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement
from jaxllm.models import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    MLAConfig,
    MlpConfig,
    MoeConfig,
    RopeConfig,
    RouterConfig,
    YarnScaling,
    functional,
    unstack_layers,
)
from jaxllm.text import ByteTokenizer
from tests import quick, tiny

VOCAB = 40
LONGEST = 64
"""Tokens of the longest sequence of all engines here."""


def _blocks(*windows: int | None, **attention: Any) -> tuple[BlockConfig, ...]:
    norms = attention.pop("norms", "pre")
    return tuple(
        BlockConfig(AttentionConfig(4, 2, 8, window=w, **attention), MlpConfig(12), norms) for w in windows
    )  # fmt: skip


_LATENT = MLAConfig(4, latent=8, q_latent=6, nope_dim=6, rope_dim=4, value_dim=6)
_GROUPED = RouterConfig("sigmoid", groups=3, top_groups=2, group_score="best two", balance_bias=True)
_CLAMPED = MoeConfig(4, 2, 8, "quick_gelu", router=RouterConfig(bias=True), bias=True, clamp=1.0, up_offset=1.0)


def _decoder(layers: int, pattern: tuple[BlockConfig, ...], **fields: Any) -> DecoderConfig:
    return DecoderConfig(VOCAB, 16, layers, pattern=pattern, dtype="float64", param_dtype="float64", **fields)


MODELS = {
    "llama": tiny.decoder(vocab_size=VOCAB, rope=RopeConfig(scaling=Llama3Scaling(original_length=16))),
    "smollm2": tiny.decoder(vocab_size=VOCAB, heads=3, kv_heads=1),
    "mistral": tiny.decoder(vocab_size=VOCAB, window=9, tied=False),
    "qwen2": tiny.decoder(vocab_size=VOCAB, bias="qkv", rope=RopeConfig(scaling=YarnScaling(4.0, 16))),
    "qwen3": tiny.decoder(vocab_size=VOCAB, qk_norm="head"),
    "gemma2": _decoder(3, _blocks(7, None, softcap=2.0, norms="sandwich"), logit_softcap=3.0, embed_scale=4.0,
                       norm="rms_plus_one"),
    "gemma3": _decoder(4, _blocks(5, 5, None, qk_norm="head", norms="sandwich"), norm="rms_plus_one"),
    "phi3": tiny.decoder(vocab_size=VOCAB, kv_heads=4, tied=False, rope=RopeConfig(scaling=LinearScaling(2.0))),
    "olmo2": tiny.decoder(vocab_size=VOCAB, norms="post", qk_norm="all"),
    "gpt2": tiny.decoder(vocab_size=VOCAB, bias="all", norm="layer", gated=False, learned_positions=LONGEST),
    "mixtral": tiny.decoder(vocab_size=VOCAB, moe=(4, 2, 12, True)),
}  # fmt: skip
"""A tiny one of each family."""

MIXTURES = {
    "deepseek_v3": _decoder(
        3,
        (BlockConfig(_LATENT, MoeConfig(6, 2, 8, shared=8, router=_GROUPED)),),
        prefix=(BlockConfig(_LATENT, MlpConfig(12)),),
    ),
    "gpt_oss": _decoder(
        3,
        tuple(replace(b, mlp=_CLAMPED) for b in _blocks(5, None, bias="all", sinks=True)),
    ),
}
"""Families whose caches or scores are of another kind."""

WIDE = {
    "wide": tiny.decoder(vocab_size=VOCAB, heads=8, kv_heads=8, head_dim=4),
    "few kv heads": tiny.decoder(vocab_size=VOCAB, heads=16, kv_heads=2, head_dim=4, tied=False),
}
"""With heads for eight devices."""

WRITERS = {"bytes": tiny.decoder(vocab_size=ByteTokenizer.vocab_size)}
"""With the vocabulary of a tokenizer, for grammars."""

DEEP = {
    f"deep {name}": replace((MODELS | MIXTURES)[name], layers=layers)
    for name, layers in {
        "llama": 5, "qwen3": 4, "gemma2": 7, "gpt2": 4, "phi3": 6, "mixtral": 4, "deepseek_v3": 4, "gpt_oss": 6,
    }.items()
}  # fmt: skip
"""With layers for several pipeline stages, some of them in groups of two."""

SHALLOW = {f"shallow {name}": replace(MODELS[name], layers=1) for name in ("llama", "mistral")}
"""With one layer, whose keys and values are of their own token alone."""

RELU = {
    f"relu {name}": replace(
        MODELS[name],
        pattern=tuple(replace(b, mlp=replace(b.mlp, activation="relu")) for b in MODELS[name].pattern),
        prefix=tuple(replace(b, mlp=replace(b.mlp, activation="relu")) for b in MODELS[name].prefix),
    )
    for name in ("llama", "qwen3", "gemma3", "olmo2")
}
"""With ReLU, whose slices may be inactive."""

_FULL = {"samplers": ("full",), "max_len": LONGEST, "top_logprobs": 3}
ENGINES = {
    "roomy": EngineConfig(max_sequences=4, max_batched_tokens=16, pages=80, page_size=8, buckets=(16,), **_FULL),
    "tight, recompute": EngineConfig(
        max_sequences=4, max_batched_tokens=12, pages=18, page_size=4, buckets=(12,), decode_steps=3, **_FULL
    ),
    "tight, swap": EngineConfig(
        max_sequences=4,
        max_batched_tokens=12,
        pages=18,
        page_size=4,
        buckets=(12,),
        decode_steps=3,
        preemption="swap",
        **_FULL,
    ),
    "contiguous": EngineConfig(max_sequences=3, max_batched_tokens=16, page_size=None, pages=4, buckets=(16,), **_FULL),
    "one after the other": EngineConfig(
        max_sequences=1,
        max_batched_tokens=5,
        pages=40,
        page_size=4,
        buckets=(5,),
        decode_steps=4,
        prefix_cache=False,
        **_FULL,
    ),
    "layers apart": EngineConfig(
        max_sequences=4, max_batched_tokens=16, pages=40, page_size=4, buckets=(16,), decode_steps=2, **_FULL
    ),
    "invariant": EngineConfig(
        max_sequences=3,
        max_batched_tokens=11,
        pages=40,
        page_size=4,
        decode_steps=1,
        preemption="swap",
        batch_invariant=True,
        **_FULL,
    ),
}
"""Ways to serve."""


def model_of(name: str, dtype: str) -> DecoderConfig:
    return dataclasses.replace(
        (MODELS | MIXTURES | WIDE | WRITERS | DEEP | SHALLOW | RELU)[name], dtype=dtype, param_dtype=dtype
    )


@functools.cache
def params_of(name: str, dtype: str, seed: int = 4) -> Any:
    # Scaled up, so that the next token is neither certain nor a toss-up.
    return jax.tree.map(jnp.asarray, quick.params(model_of(name, dtype), seed=seed, scale=0.5))


def build(
    config: EngineConfig,
    model: str = "llama",
    dtype: str = "float32",
    *,
    apart: bool = False,
    placement: WeightPlacement | None = None,
    slices: int = 0,
    active: ActiveSlices | None = None,
    params: Any = None,
    **fields: Any,
) -> Engine:
    """An engine whose programs compile fast; with ``placement`` its weights are streamed, with ``slices`` its layers
    are cut, of which a token takes those that ``active`` predicts; ``params``: other weights.
    """
    params = params_of(model, dtype) if params is None else params
    params = unstack_layers(params) if apart else params
    served = functional(model_of(model, dtype))
    if placement is not None:
        ends = {name: value for name, value in params.items() if name != "segments"}
        layers: LayerStore = LoadedLayers(params)
        if slices:
            layers = SlicedLayers(layers, served.config, slices, active)
            served = sliced_model(served, slices, active=active is not None)
        params = StreamedWeights.of(served, ends, layers, placement, [model, slices])
        config = replace(config, layer_window=placement.window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return Engine.of(served, params, config, strict=True, **fields)


def draft(engine: Engine, config: DecoderConfig, params: Any) -> DraftModelProposer:
    """A draft model for an engine, whose programs compile fast."""
    dtype = str(jax.tree.leaves(params)[0].dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        draft = functional(replace(config, dtype=dtype, param_dtype=dtype))
        return DraftModelProposer(draft, params, _served(engine))


def layer_parallel_draft(
    engine: Engine, config: DecoderConfig, params: Any, parallel: int, devices: int = 1
) -> LayerParallelProposer:
    """Layers in parallel of a draft model for an engine, whose programs compile fast."""
    dtype = str(jax.tree.leaves(params)[0].dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        draft = functional(replace(config, dtype=dtype, param_dtype=dtype))
        return LayerParallelProposer(draft, params, _served(engine), parallel, jax.devices()[:devices])


def self_draft(engine: Engine, kept: int | TrainedDraft) -> SelfDraftProposer:
    """Self-speculation of an engine by so many layers, or by a trained draft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return SelfDraftProposer(kept, _served(engine))


def head_draft(engine: Engine, head: DraftHead) -> HeadProposer:
    """Drafts of a draft head for an engine that keeps features."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        proposer = HeadProposer(head, _served(engine))
        proposer.attach(engine.runner)
        return proposer


def tree_draft(engine: Engine, config: DecoderConfig, params: Any) -> TreeDraftProposer:
    """Draft trees of a draft model for an engine, whose programs compile fast."""
    dtype = str(jax.tree.leaves(params)[0].dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        draft = functional(replace(config, dtype=dtype, param_dtype=dtype))
        return TreeDraftProposer(draft, params, _served(engine))


def _served(engine: Engine) -> ServedModel:
    runner = engine.runner
    assert runner.model is not None
    return ServedModel(
        runner.model, runner.params, engine.config, None, engine.vocab_size, mesh=runner.mesh, strict=True
    )


@functools.lru_cache(4)
def engine(name: str, model: str = "llama", dtype: str = "float32") -> Engine:
    """One of ENGINES, that others may have used."""
    return build(ENGINES[name], model, dtype, apart=name == "layers apart")


@functools.cache
def _forward(model: str, dtype: str) -> Any:
    made = functional(model_of(model, dtype))
    from jaxllm.models import Segments

    positions = jnp.arange(LONGEST, dtype=jnp.int32)[None]
    run = lambda p, t: jax.nn.log_softmax(made.head(p, made.forward(p, t, positions, Segments())[0]))[0]  # noqa: E731
    return quick.jit(run)


def logprobs_of(model: str, dtype: str, tokens: list[int], params: Any = None) -> np.ndarray:
    """Float[S V] by the training forward: row i is of the token after the first i + 1; ``params``: other weights."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    params = params_of(model, dtype) if params is None else params
    return np.asarray(_forward(model, dtype)(params, jnp.asarray(padded)))[: len(tokens)]


def check_books(engine: Engine) -> None:
    """Every page is free, cached, or held by exactly the sequences that list it; each once. Slots likewise."""
    whole = engine.scheduler
    assert all(s.slot == -1 and not s.computed for s in getattr(whole, "unassigned", ()))
    for scheduler in getattr(whole, "schedulers", [whole]):
        _check_books(engine, scheduler)


def _check_books(engine: Engine, scheduler: Scheduler) -> None:
    everyone = scheduler.sequences()
    for pool, pages in enumerate(scheduler.pages):
        groups = [group for group, one in enumerate(scheduler._pools) if one == pool]
        held = Counter(page for s in everyone for group in groups for page in s.pages[group] if page != NO_PAGE)
        assert {page: int(n) for page, n in enumerate(pages.ref_counts) if n} == dict(held)
        assert len(set(pages._free)) == len(pages._free)
        assert not set(pages._free) & (set(held) | set(pages._cached))
        assert not set(held) & set(pages._cached)
        assert len(pages._free) + len(pages._cached) + len(held) == pages.count
        assert {page: h for h, page in pages._found.items()} == pages._hashes
        assert not set(pages._hashes) & set(pages._free)
        for s in scheduler.running:
            for group in groups:
                table = scheduler.tables[group][s.slot]
                assert all(page in (NO_PAGE, entry) for page, entry in zip(s.pages[group], table, strict=False))
    slots = [s.slot for s in scheduler.running]
    assert sorted([*slots, *scheduler._slots]) == list(range(engine.config.max_sequences))
    assert all(s.slot == -1 for s in (*scheduler.waiting, *scheduler.forks))


def serve(engine: Engine, requests: list[dict[str, Any]], *, check: bool = True) -> list[Request]:
    """Runs requests that come at a step and may be cancelled at another: {prompt, params, at, cancel, salt}.

    What pieces say is what the sequences hold in the end.
    """
    made: list[Request | None] = [None] * len(requests)
    pieces: dict[tuple[int, int], list[int]] = {}
    ends: Counter[tuple[int, int]] = Counter()
    step = 0
    while engine.busy or None in made:
        for number, asked in enumerate(requests):
            if made[number] is None and asked.get("at", 0) <= step:
                made[number] = engine.submit(
                    asked["prompt"], asked["params"], salt=asked.get("salt", ""), adapter=asked.get("adapter")
                )
            request = made[number]
            if request is not None and asked.get("cancel") == step:
                engine.cancel(request)
        for piece in engine.step():
            pieces.setdefault((piece.request.id, piece.number), []).extend(piece.tokens)
            ends[piece.request.id, piece.number] += piece.finish is not None
        if check:
            check_books(engine)
        step += 1
        assert step < 5000
    done = [request for request in made if request is not None]
    for request in done:
        for s in request.sequences:
            key = request.id, s.number
            assert ends[key] == 1
            assert pieces.get(key, []) == s.completion
    assert all(pages.available == pages.count for pages in engine.scheduler.pages)
    return done


def error(model: str, dtype: str, requests: list[Request], params: Any = None) -> float:
    """The largest difference of a log-probability that was served from the training forward's."""
    worst = 0.0
    for request in requests:
        for s in request.sequences:
            want = logprobs_of(model, dtype, s.tokens, params)
            begin = len(request.prompt)
            assert np.isfinite(s.logprobs).all()
            own = [want[i - 1, s.tokens[i]] for i in range(begin, len(s.tokens))]
            worst = max(worst, float(np.abs(np.subtract(own, s.logprobs)).max(initial=0)))
            for i, best in enumerate(s.top, begin):
                row = want[i - 1]
                worst = max([worst, *(abs(row[token] - value) for token, value in best)])
                assert len(best) == request.params.logprobs
                assert all(value >= np.sort(row)[-len(best)] - 1e-4 for _, value in best)
        if request.params.prompt_logprobs is not None and request.sequences[0].finish != "cancelled":
            want = logprobs_of(model, dtype, request.prompt, params)
            assert np.isfinite(request.prompt_scores).all()
            for i, (value, rank) in enumerate(request.prompt_scores, 1):
                own = want[i - 1, request.prompt[i]]
                worst = max(worst, abs(own - value))
                if np.abs(np.delete(want[i - 1], request.prompt[i]) - own).min() > 1e-4:
                    assert rank == (want[i - 1] > own).sum()
    return worst


def _shaping(rng: np.random.Generator) -> dict[str, Any]:
    """Some of what changes logits."""
    words = tuple(tuple(rng.integers(0, VOCAB, n).tolist()) for n in rng.integers(1, 6, 5))
    every = {
        "typical_p": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": -0.3,
        "logit_bias": {int(token): float(rng.normal()) for token in rng.integers(0, VOCAB, 4)},
        "bad_words": words,
        "allowed_tokens": tuple(rng.permutation(VOCAB)[: VOCAB // 2].tolist()),
    }
    return {name: value for name, value in every.items() if rng.random() < 0.5}


def traffic(rng: np.random.Generator, config: EngineConfig, many: int) -> list[dict[str, Any]]:
    """Random requests: lengths, arrivals, shared prefixes, multiple completions, cancellations, salts."""
    common = rng.integers(0, VOCAB, 30).tolist()
    out = []
    for _ in range(many):
        shared = int(rng.choice([0, 0, 8, 16, 24, 30]))
        own = int(rng.integers(1, 24))
        prompt = [*common[:shared], *rng.integers(0, VOCAB, own).tolist()]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, LONGEST - len(prompt) + 1)),
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            top_k=int(rng.choice([0, 0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.05])),
            seed=int(rng.integers(2**32)),
            n=int(rng.choice([1, 1, 1, 2, 3])),
            stop_ids=tuple(rng.integers(0, VOCAB, rng.choice([0, 0, 1, 10])).tolist()),
            logprobs=int(rng.integers(0, config.top_logprobs + 1)),
            prompt_logprobs=int(rng.integers(0, config.top_logprobs + 1)) if rng.random() < 0.3 else None,
            **(_shaping(rng) if rng.random() < 0.4 else {}),
        )
        params = dataclasses.replace(params, min_tokens=int(rng.integers(0, params.max_tokens + 1)))
        at = int(rng.integers(0, 12))
        cancel = at + int(rng.integers(0, 15)) if rng.random() < 0.15 else None
        out.append({"prompt": prompt, "params": params, "at": at, "cancel": cancel, "salt": str(rng.integers(2))})
    return out
