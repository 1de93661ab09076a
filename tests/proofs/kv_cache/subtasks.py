"""Subtasks that leave (TIMRUN): what follows a cut is the training forward of the pruned text; pages come back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxllm.infer import Engine, EngineConfig, Request, SamplingParams
from jaxllm.infer.grammar import Grammar
from jaxllm.infer.scheduling.subtasks import Subtasks
from jaxllm.text import ByteTokenizer
from tests.infer import engines
from tests.proofs.harness import proof

MODELS = ["llama", "smollm2", "mistral", "qwen2", "gemma2", "gemma3", "gpt2", "mixtral", "deepseek_v3", "gpt_oss"]
WAYS = [
    (model, way)
    for model in MODELS
    for way in ("roomy", "tight, recompute", "tight, swap", "contiguous", "one after the other", "invariant")
]
MARKERS = [((3,), (4,)), ((3,), (4, 5)), ((3, 3), (4,)), ((3, 6), (6, 3))]
"""Markers that models with random weights write often, as the markers' tokens are made likely."""


def pruned(prompt: list[int], completion: list[int], rule: Subtasks) -> list[list[int]]:
    """Text that each generated token follows: markers as brackets of a tree, whose finished nodes are taken out.

    The text is one list whose elements are tokens and, for what is between two markers, lists: the oldest of those that
    are finished, and are in no other finished one, becomes an empty one.
    """
    root: list[Any] = []
    path, finished, found = [root], list[list[Any]](), []
    recent: list[int] = []  # of the last marker on
    for token in completion:
        found.append([*prompt, *_flat(root)])
        path[-1].append(token)
        recent.append(token)
        if tuple(recent[-len(rule.start) :]) == rule.start:
            path[-1].append(inner := [])
            path.append(inner)
        elif len(path) > 1 and tuple(recent[-len(rule.end) :]) == rule.end:
            # The end marker is behind its subtask; its first tokens may be where the subtask is already.
            closed = path.pop()
            tail = [closed.pop() for _ in rule.end][::-1]
            path[-1] += tail
            finished = [one for one in finished if not _holds(closed, one)]
            finished += [closed] if closed else []
            if len(finished) > rule.kept:
                finished.pop(0).clear()
        else:
            continue
        recent = []
    return found


def _flat(node: list[Any]) -> list[int]:
    return [token for one in node for token in (_flat(one) if isinstance(one, list) else [one])]


def _holds(node: list[Any], other: list[Any]) -> bool:
    return any(one is other or (isinstance(one, list) and _holds(one, other)) for one in node)


def error(model: str, request: Request) -> tuple[float, int]:
    """The largest difference of a log-probability from the training forward of the pruned text; tokens that left."""
    rule, worst, gone = request.params.subtasks, 0.0, 0
    assert rule is not None
    for sequence in request.sequences:
        completion = sequence.completion
        for text, token, value in zip(
            pruned(request.prompt, completion, rule), completion, sequence.logprobs, strict=True
        ):
            worst = max(worst, abs(engines.logprobs_of(model, "float64", text)[-1, token] - value))
        gone += sequence.left
        assert len(request.prompt) + len(completion) - sequence.left == len(sequence.tokens) <= engines.LONGEST
    return worst, gone


def asked(rng: np.random.Generator, rule: Subtasks, many: int, length: int) -> list[dict[str, Any]]:
    """Requests whose completions have many subtasks."""
    markers = (*rule.start, *rule.end)
    likely = dict.fromkeys(rule.start, 10.0) | dict.fromkeys(rule.end, 12.5)
    out = []
    for _ in range(many):
        params = SamplingParams(
            max_tokens=length, temperature=5.0, logprobs=0, seed=int(rng.integers(2**32)), subtasks=rule,
            n=int(rng.choice([1, 1, 2])), logit_bias=likely, allowed_tokens=(*markers, *range(10, 16)),
            frequency_penalty=float(rng.choice([0.0, 0.05])),
        )  # fmt: skip
        prompt = rng.integers(0, engines.VOCAB, rng.integers(1, 20)).tolist()
        out.append({"prompt": prompt, "params": params, "at": int(rng.integers(0, 10))})
    return out


def built(sizes: EngineConfig, model: str) -> Engine:
    return engines.build(dataclasses.replace(sizes, max_len=engines.LONGEST), model, "float64")


@proof("kv_cache", cases=WAYS, sample=1, float64=True, bound=1e-10)
def subtasks_leave_in_every_way(case: tuple[str, str]) -> float:
    """Random completions with subtasks inside of subtasks, several at a time, preempted, of up to 100 tokens in
    sequences of 64: each token has the log-probability that the training forward gives it after the pruned text.
    Every page is one sequence's, or free."""
    model, way = case
    rng = np.random.default_rng([*model.encode(), *way.encode()])
    engine, worst, gone = built(engines.ENGINES[way], model), 0.0, 0
    for start, end in MARKERS:
        rule = Subtasks(start, end, int(rng.integers(0, 3)))
        for request in engines.serve(engine, asked(rng, rule, 2, 100)):
            found, left = error(model, request)
            worst, gone = max(worst, found), gone + left
    assert gone == engine.metrics.cut_tokens > 0
    return worst


@proof("kv_cache", cases=["window+sinks:64,4", "corm:0,4,8"], sample=1, float64=True, bound=1e-10)
def subtasks_under_retention_rules(keep: str) -> float:
    """Likewise under retention rules that keep everything."""
    rng = np.random.default_rng(len(keep))
    sizes = dataclasses.replace(engines.ENGINES["tight, recompute"], retention=keep, prefix_cache=False)
    engine, rule = built(sizes, "llama"), Subtasks((3,), (4,), 1)
    found = [error("llama", request) for request in engines.serve(engine, asked(rng, rule, 4, 120))]
    assert sum(left for _, left in found) > 0
    return max(worst for worst, _ in found)


@proof("kv_cache", cases=[0, 1], sample=1, float64=True, bound={"error": 1e-10, "pages": 0.0})
def completions_longer_than_the_pool(kept: int) -> dict[str, float]:
    """A completion of 400 tokens in a pool of 16 pages of 4, and a context of 64: a grammar writes subtasks, each with
    three others inside, and takes what is finished out. The pages of a sequence are never more than those of what is
    left and the next token; all are free in the end."""
    rule = Subtasks((ord("<"),), (ord(">"),), kept)
    sizes = dataclasses.replace(engines.ENGINES["one after the other"], pages=17)
    engine = engines.build(sizes, "bytes", "float64", tokenizer=ByteTokenizer())
    nested = Grammar.regex("(<[a-z]{2}(<[a-z]{6}>[a-z]){3}>){13}")
    params = SamplingParams(max_tokens=400, temperature=0.0, logprobs=0, subtasks=rule, grammar=nested)
    prompt, held = [ord(c) for c in "Plan: "], 0
    request = engine.submit(prompt, params)
    (sequence,) = request.sequences
    while engine.busy:
        engine.step()
        engines.check_books(engine)
        held = max(held, len(sequence.pages[0]) - -(-(len(sequence.tokens) + 1) // 4))
    assert (len(sequence.completion), sequence.finish) == (400, "length")
    assert all(pages.available == pages.count for pages in engine.scheduler.pages)
    worst, left = error("bytes", request)
    assert left > 300
    return {"error": worst, "pages": float(max(0, held))}
