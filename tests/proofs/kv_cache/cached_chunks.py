"""Cached chunks (Cache-Craft): exact where all is recomputed, a dense reference where not, and error falls between."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxllm.convert.load import load_model
from jaxllm.data import corpus
from jaxllm.infer import Engine, Request, SamplingParams
from jaxllm.infer.chunks.cached_chunks import CachedChunks
from jaxllm.models import Functional, functional
from jaxllm.models.attention_context import AttentionParams, LayerIndex
from tests import quick
from tests.infer import engines
from tests.proofs.harness import proof

MODELS = ["llama", "smollm2", "mistral", "qwen2", "gemma2", "gemma3", "phi3", "mixtral", "deepseek_v3"]
WAYS = [(model, way) for model in MODELS for way in ("roomy", "tight, recompute", "tight, swap")]
ROWS = 160
"""Rows of the reference: a text and its chunks once more, each with its lead."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """Attention context with an explicit mask besides the sliding window by position."""

    mask: Any

    def attend(
        self, layer: LayerIndex, q: Array, k: Array, v: Array, positions: Array, params: AttentionParams,
        sinks: Array | None = None,
    ) -> tuple[Array, Seen]:  # fmt: skip
        assert sinks is None
        (b, s, n, h), kv = q.shape, k.shape[2]
        scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(b, s, kv, n // kv, h), k) * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        mask = self.mask
        if params.window is not None:
            mask = mask & (positions[0][:, None] - positions[0] < params.window)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bkgts,bskv->btkgv", weights, v).reshape(b, s, n, -1), self


def reference(model: str, tokens: list[int], chunks: CachedChunks, page_size: int, prompt: int) -> np.ndarray:
    """Log-probabilities of a text whose chunks are reused."""
    view = View.of(tokens, chunks, page_size, prompt)
    run, rest = _forward(model), ROWS - len(view.text)
    text, at = (np.pad(np.asarray(x, np.int32), (0, rest)) for x in (view.text, view.positions))
    mask = np.eye(ROWS, dtype=bool)
    mask[:-rest, :-rest] = view.mask
    return np.asarray(run(text[None], at, mask))[0, : len(tokens)]


@functools.cache
def _forward(model: str) -> Any:
    """Log-probabilities of texts of ROWS tokens, compiled once."""
    run, params = functional(engines.model_of(model, "float64")), engines.params_of(model, "float64")
    return quick.jit(lambda text, at, mask: logprobs(run, params, text, at, mask))


def logprobs(model: Functional, params: Any, text: Any, at: Any, mask: Any) -> Array:
    """Float[B S V] of texts with the same positions [S] and mask [S S]."""
    positions = jnp.broadcast_to(jnp.asarray(at, jnp.int32), text.shape)
    hidden, _ = model.forward(params, jnp.asarray(text), positions, Seen(jnp.asarray(mask)))  # type: ignore[arg-type]
    return jax.nn.log_softmax(model.head(params, hidden))


@dataclass(frozen=True)
class View:
    """What sees what: each chunk is behind the text once more, with its lead, at its place; who looks at a reused token
    looks at that copy.

    Attributes:
        text: tokens, those of the copies included.
        positions: position of each.
        mask: Bool[S S], which of them each sees.
    """

    text: list[int]
    positions: list[int]
    mask: Bool[np.ndarray, "S S"]

    @classmethod
    def of(cls, tokens: list[int], chunks: CachedChunks, page_size: int, prompt: int) -> View:
        many = len(tokens)
        at, text, source, alone = list(range(many)), list(tokens), list(range(many)), list[tuple[int, int]]()
        for one in chunks.reuses(page_size, prompt):
            alone.append((len(text), len(text) + one.lead + one.end - one.origin))
            first = len(text) + one.lead
            text += [*tokens[: one.lead], *tokens[one.origin : one.end]]
            at += range(one.origin - one.lead, one.end)
            source[one.start : one.stop] = range(first + one.start - one.origin, first + one.stop - one.origin)
        mask = np.zeros((len(text), len(text)), dtype=bool)
        for i in range(many):
            mask[i, source[: i + 1]] = True
        for first, stop in alone:
            mask[first:stop, first:stop] = np.tri(stop - first, dtype=bool)
        return cls(text, at, mask)


def prompts(rng: np.random.Generator, share: float, many: int) -> list[dict[str, Any]]:
    """Prompts of some of three documents in any order, with texts between them and a question at the end."""
    common = rng.integers(0, engines.VOCAB, 10).tolist()
    documents = [rng.integers(0, engines.VOCAB, n).tolist() for n in (8, 13, 17)]
    out = []
    for _ in range(many):
        prompt, spans = common[: rng.integers(0, 11)], []
        for number in rng.permutation(3)[: rng.integers(1, 4)]:
            spans.append((len(prompt), len(prompt) + len(documents[number])))
            prompt += [*documents[number], *rng.integers(0, engines.VOCAB, rng.integers(0, 3)).tolist()]
        prompt += rng.integers(0, engines.VOCAB, rng.integers(1, 5)).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(2, 7)), temperature=0.0, logprobs=0,
            cached_chunks=CachedChunks(tuple(spans), share, int(rng.integers(0, 3))),
        )  # fmt: skip
        out.append({"prompt": prompt, "params": params, "at": int(rng.integers(0, 30))})
    return out


def served(engine: Engine, asked: list[dict[str, Any]]) -> list[Request]:
    made = engines.serve(engine, asked)
    for pages in engine.scheduler.pages:
        assert not any(pages.ref_counts)
    return made


@proof("kv_cache", cases=WAYS, sample=1, float64=True, bound={"all recomputed": 1e-10, "reused": 1e-10})
def chunks_are_reused_at_any_place(case: tuple[str, str]) -> dict[str, float]:
    """Random prompts of cached documents: with share 1 the training forward; with others a dense reference in which
    each reused token was computed in its chunk alone. Pages all come back."""
    model, way = case
    rng = np.random.default_rng([*model.encode(), *way.encode()])
    sizes = dataclasses.replace(engines.ENGINES[way], chunk_cache=True, pages=120)
    engine, worst = engines.build(sizes, model, "float64"), {"reused": 0.0}
    exact = served(engine, prompts(rng, 1.0, 3))
    assert all(not request.reuses for request in exact)
    worst["all recomputed"] = engines.error(model, "float64", exact)
    reused = 0
    for share in (0.0, 0.3):
        made = served(engine, prompts(rng, share, 5))
        for request in made:
            (sequence,), chunks = request.sequences, request.params.cached_chunks
            assert chunks is not None
            want = reference(model, sequence.tokens, chunks, engine.runner.spec.page_size, len(request.prompt))
            begin = len(request.prompt)
            # There are pages enough for everything, so all of it is copied, behind sliding windows too.
            assert request.cached_tokens >= sum(one.stop - one.start for one in request.reuses)
            own = [want[i - 1, sequence.tokens[i]] for i in range(begin, len(sequence.tokens))]
            worst["reused"] = max(worst["reused"], float(np.abs(np.subtract(own, sequence.logprobs)).max()))
            reused += request.cached_tokens
    assert reused > 0
    return worst


@proof("kv_cache", cases=[(model, seed) for model in ("llama", "qwen3", "deepseek_v3") for seed in range(10)],
       sample=2, float64=True)  # fmt: skip
def error_falls_with_the_recomputed_share(case: tuple[str, int]) -> None:
    """Random weights and 64 prompts of three chunks of 24 tokens: the mean difference of the next token's
    log-probabilities from those of full prefill falls with each larger share, to nothing at 1."""
    name, seed = case
    model = functional(engines.model_of(name, "float64"))
    params = engines.params_of(name, "float64", seed)
    rows = np.random.default_rng(seed).integers(0, engines.VOCAB, (64, 84))
    spans = tuple((first, first + 24) for first in (4, 28, 54))
    errors, want = [], None
    for share in reversed(SHARES):
        view = View.of(list(range(84)), CachedChunks(spans, share, 0), 4, 84)
        run = quick.jit(lambda p, text, view=view: logprobs(model, p, text, view.positions, view.mask))
        found = np.asarray(run(params, rows[:, view.text]))[:, 83]
        want = found if want is None else want
        errors.append(float(np.abs(found - want).mean()))
    assert errors[0] == 0.0
    assert np.all(np.diff(errors) > 0)


@proof("kv_cache", count=4, sample=1, bound={"0.0": 1.0, "0.25": 1.0, "0.5": 1.0})
def leads_lower_the_error(seed: int) -> dict[str, float]:
    """SmolLM2 on the held-out plays: 16 tokens, three chunks of 64 from elsewhere, and 32 tokens: the divergence of the
    last tokens' distributions from full prefill with chunks behind the first 16 tokens, over that with chunks alone, on
    the average of six such prompts: in a single one it may be more."""
    rng = np.random.default_rng(seed)
    alone, led = np.sum([_errors_of_leads(rng) for _ in range(6)], axis=0)
    return {str(share): float(ratio) for share, ratio in zip((0.0, 0.25, 0.5), led / alone, strict=True)}


def _errors_of_leads(rng: np.random.Generator) -> np.ndarray:
    """Divergences [without lead or with one, share that is computed again] of one prompt from full prefill."""
    model, params, ids = _smollm2()
    page = 16
    cut = lambda many: ids[(at := int(rng.integers(len(ids) - many))) : at + many]  # noqa: E731
    tokens = [*cut(page), *(token for _ in range(3) for token in cut(64)), *cut(32)]
    spans = tuple((first, first + 64) for first in (16, 80, 144))
    most = len(tokens) + 3 * (64 + page)

    def found(share: float, lead: int) -> np.ndarray:
        view = View.of(tokens, CachedChunks(spans, share, lead), page, len(tokens))
        rest = most - len(view.text)
        mask = np.eye(most, dtype=bool)
        mask[: len(view.text), : len(view.text)] = view.mask
        text, at = (np.pad(np.asarray(x, np.int32), (0, rest)) for x in (view.text, view.positions))
        return np.asarray(model(params, text[None], at, mask), np.float64)[0, len(tokens) - 33 : len(tokens)]

    want = found(1.0, 0)
    error = lambda *how: float((np.exp(want) * (want - found(*how))).sum(-1).mean())  # noqa: E731
    return np.array([[error(share, lead) for share in (0.0, 0.25, 0.5)] for lead in (0, 1)])


@functools.cache
def _smollm2() -> tuple[Any, Any, list[int]]:
    """Log-probabilities by SmolLM2, its weights, and token ids of the held-out plays."""
    loaded = load_model("smollm2")
    run = jax.jit(lambda params, text, at, mask: logprobs(loaded.model, params, text, at, mask))
    return run, loaded.params, loaded.tokenizer.encode(corpus.path("heldout").read_text("utf-8")[:400_000]).tolist()


@proof("kv_cache", count=100, sample=1, float64=True, bound={"error": 1e-10}, counts=("copied tokens",))
def copies_in_crowded_pools(seed: int) -> dict[str, float]:
    """Random histories of prompts with chunks, several completions, cancellations, preemptions and evictions, on a
    model of one layer, whose keys and values do not depend on context: every copy is exact, so the result is the
    training forward, whatever is copied, evicted or computed. Pages all come back."""
    rng = np.random.default_rng(seed)
    model, way = rng.choice(["shallow llama", "shallow mistral"]), rng.choice(["tight, recompute", "tight, swap"])
    sizes = dataclasses.replace(engines.ENGINES[way], chunk_cache=True, pages=int(rng.integers(26, 40)))
    engine = engines.build(sizes, model, "float64")
    asked = prompts(rng, float(rng.choice([0.0, 0.2, 0.5])), 14)
    for one in asked:
        many = engines.LONGEST - len(one["prompt"])
        one["params"] = dataclasses.replace(one["params"], max_tokens=many, n=int(rng.choice([1, 2])))
        one["at"] %= 6
        one["cancel"] = one["at"] + int(rng.integers(0, 15)) if rng.random() < 0.2 else None
        one["salt"] = str(rng.integers(2))
    made = served(engine, asked)
    assert engine.scheduler.preemptions > 0 or model == "shallow mistral"  # which frees what is behind its window
    copied = float(
        sum(request.cached_tokens for request in made)
    )  # of crowded pools, which may have evicted all of them
    return {"error": engines.error(model, "float64", made), "copied tokens": copied}
