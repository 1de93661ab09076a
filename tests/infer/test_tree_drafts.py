"""Draft trees: best-first search by a draft model, verified in one step, and what is served is plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.scheduling.proposer import proposals
from jaxllm.infer.speculate import tree_draft
from jaxllm.infer.speculate.draft_length import FixedDraftLength
from jaxllm.infer.speculate.draft_tree import DraftTree
from jaxllm.infer.speculate.tree_draft import TreeDraftProposer
from jaxllm.infer.streaming import WeightPlacement
from tests import environment
from tests.infer import engines, meshes
from tests.infer.proposers import OracleTreeProposer
from tests.infer.test_speculation import refuse
from tests.infer.test_verification import asked, beside, equal, plainly_sampled, writer, written

TOKENS = 5
"""Draft tokens of a tree."""


@pytest.fixture(scope="module")
def verifying():
    """An engine in float64 that verifies trees and runs out of pages, and its proposer."""
    oracle = OracleTreeProposer("silent", np.random.default_rng(environment.seed()), engines.VOCAB)
    with environment.x64():
        return engines.build(sizes(), "llama", "float64", proposer=oracle), oracle


def sizes(**fields: Any) -> EngineConfig:
    few = {"max_sequences": 2, "decode_steps": 1, "verify_tokens": TOKENS, "draft_trees": True}
    return dataclasses.replace(engines.ENGINES["tight, recompute"], **few | fields)


def path(tree: DraftTree, number: int) -> list[int]:
    """Tokens of a branch, up to this one."""
    tokens = []
    while number >= 0:
        tokens.append(tree.tokens[number])
        number = tree.parents[number]
    return tokens[::-1]


@pytest.mark.drawn(0.3)
def test_trees_are_plain_decoding(verifying, rng, float64):
    """Branches cross pages; greedy, sampled, with logits processors, preempted; keys and values are where they were."""
    engine, oracle = verifying
    oracle.mode = "some"
    before = engine.scheduler.preemptions
    made = beside(engine, engine, asked(rng, engine.config, 5), oracle)
    assert engines.error("llama", "float64", made) <= 1e-10
    assert engine.scheduler.preemptions > before


@pytest.mark.drawn(0.3)
def test_trees_over_streamed_weights(rng, float64):
    """A step that reads every layer verifies a tree (the case of SpecExec)."""
    oracle = OracleTreeProposer("some", rng, engines.VOCAB)
    engine = engines.build(sizes(), "qwen3", "float64", proposer=oracle, placement=WeightPlacement(1))
    made = beside(engine, engine, asked(rng, engine.config, 2), oracle)
    assert engines.error("qwen3", "float64", made) <= 1e-10


@pytest.mark.drawn(0.5)
def test_trees_of_a_draft_model_are_plain_decoding(verifying, rng, float64):
    """The model itself as its draft: the likeliest token of every step is in the tree."""
    engine, oracle = verifying
    oracle.mode = "silent"
    requests, plain = asked(rng, engine.config, 2), plainly_sampled(rng)
    want = [engines.serve(engine, some) for some in (requests, plain)]
    proposer = engines.tree_draft(engine, engines.MODELS["llama"], engines.params_of("llama", "float64"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "proposer", proposer)
        patch.setattr(engine, "metrics", EngineMetrics())
        got = engines.serve(engine, requests)
        equal(got, want[0])
        assert engines.error("llama", "float64", got) <= 1e-10
        equal(engines.serve(engine, plain), want[1])
        patch.setattr(engine, "metrics", EngineMetrics())
        engines.serve(engine, plain[:1])
        drafts, metrics = engine.metrics.drafts, engine.metrics
    assert drafts > 1
    # A greedy request: the first token of every draft is right.
    assert metrics.accepted_by_position[0] == drafts
    assert proposer.runner.program_cache.counts.late == 0


@pytest.mark.drawn(0.5)
def test_a_tree_is_the_likeliest_continuations(verifying, rng, float64):
    """Beside a search through all continuations of up to four tokens, after two drafts of other lengths."""
    engine, _ = verifying
    proposer = engines.tree_draft(engine, engines.MODELS["llama"], engines.params_of("llama", "float64"))
    request = engine.submit(rng.integers(0, engines.VOCAB, 9).tolist(), SamplingParams(max_tokens=40))
    one = request.sequences[0]
    one.slot = 0
    for count in (2, 5, 4):
        (tree,) = proposer.propose_all([(one, count)])
        assert tree is not None
        assert len(tree.tokens) == count
        found, logs = [], dict[tuple[int, ...], float]({(): 0.0})
        for _ in range(4):
            for branch in [some for some in logs if some not in found]:
                found.append(branch)
                after = engines.logprobs_of("llama", "float64", [*one.tokens, *branch])[-1]
                logs |= {(*branch, t): logs[branch] + after[t] for t in np.argsort(after)[-count:].tolist()}
            logs = dict(sorted(logs.items(), key=lambda item: -item[1])[: count + 1])
        best = [list(branch) for branch in logs if branch]
        assert [path(tree, number) for number in range(count)] == best
        one.tokens += best[-1]
    one.slot = -1
    engine.cancel(request)
    engine.step()


@pytest.mark.drawn(0.3)
def test_grammars_and_stop_strings(rng, float64):
    """Every branch ends before a token that the grammar forbids, and has token masks of its own."""
    oracle = OracleTreeProposer("some", rng, 256)
    engine = writer(verify_tokens=4, draft_trees=True, proposer=oracle)
    beside(engine, engine, written(), oracle)


@pytest.mark.drawn(0.3)
def test_over_replicas_and_split_heads(rng, float64):
    oracle = OracleTreeProposer("some", rng, engines.VOCAB)
    config = sizes(preemption="swap", max_sequences=1, verify_tokens=3)
    engine = meshes.over("data=2,tensor=2", "wide", config, "float64", proposer=oracle)
    made = beside(engine, engine, asked(rng, config, 5), oracle)
    assert engines.error("wide", "float64", made) <= 1e-10


@pytest.mark.drawn(0.3)
def test_over_split_tokens(rng, float64):
    """Over ``context``, where each device has some of a step's tokens: a tree may lie on both sides of the border."""
    oracle = OracleTreeProposer("some", rng, engines.VOCAB)
    config = sizes(preemption="recompute")
    engine = meshes.over("context=2,tensor=2", "wide", config, "float64", proposer=oracle)
    assert engine.runner._step(engine.runner.shape(12, False, True)).forward_model is engine.runner._split_model
    requests = asked(rng, config, 3)
    made = beside(engine, engine, requests, oracle)
    assert engines.error("wide", "float64", made) <= 1e-10
    proposer = engines.tree_draft(engine, engines.WIDE["wide"], engines.params_of("wide", "float64"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "proposer", proposer)
        patch.setattr(engine, "metrics", EngineMetrics())
        equal(engines.serve(engine, requests), made)
        assert engine.metrics.accepted_tokens > 0.4 * engine.metrics.drafts, "the draft is the model itself"


def test_masks_and_accepted_tokens(rng):
    """Of trees at random: hidden are the tokens of other branches; accepted is the longest branch that was sampled."""
    for count in (1, 7, 40):
        parents = tuple(int(rng.integers(-1, number)) for number in range(count))
        tree = DraftTree(tuple(rng.integers(0, 3, count).tolist()), parents)
        hidden = tree.hidden(2).view(np.uint32)
        for number, other in itertools.product(range(count), repeat=2):
            seen, at = [], number
            while at >= 0:
                seen.append(at)
                at = parents[at]
            bit = hidden[number, other // 32] >> np.uint32(other % 32) & 1
            assert bit == (other < number and other not in seen)
        # Children of a token are told apart by their tokens.
        unique = DraftTree(tuple(range(count)), parents)
        branch = path(unique, count - 1)
        assert unique.accepted([*branch, count]) == len(branch)
        assert unique.accepted([*branch[:-1], count]) == len(branch) - 1


def test_what_does_not_go_together_is_refused(verifying, rng, float64):
    refuse(r"'tree:': tree:; give a draft model and the number", speculate="tree:")
    refuse("tree:smollm2,0; give a draft model and", speculate="tree:smollm2,0")
    refuse("whose argument says how many tokens", speculate="tree:smollm2,8", speculate_tokens=4)
    refuse("verify_tokens = 300; give 0", speculate="tree:smollm2,300")
    window = EngineConfig(retention="window+sinks", prefix_cache=False)
    refuse("does not go with retention = 'window", window, speculate="tree:smollm2,8")
    refuse("does not go with kv_dtype = 'kivi4'", EngineConfig(kv_dtype="kivi4"), speculate="tree:smollm2,8")
    with pytest.raises(ValueError, match="draft_trees without verify_tokens"):
        EngineConfig(draft_trees=True)
    oracle = OracleTreeProposer("some", rng, engines.VOCAB)
    with pytest.raises(ValueError, match=r"a sliding window of 5 tokens, and a branch of a draft tree may\s+have 5"):
        engines.build(sizes(), "gemma3", "float64", proposer=oracle)

    class Backwards:
        def propose(self, sequence: Any, count: int) -> DraftTree:
            return DraftTree((1, 2), (1, -1))

    engine, _ = verifying
    request = engine.submit([1, 2], SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match=r"a tree with parents \(1, -1\) for request"):
        proposals(Backwards(), [(request.sequences[0], 2)])
    engine.cancel(request)
    engine.step()


def branch_error(
    engine: Engine, family: str, proposer: TreeDraftProposer, rng: np.random.Generator, most: int
) -> float:
    """Reads a tree at random in two passes: its logits beside those of each branch as a sequence of its own.

    Args:
        proposer: made with ``BRANCHES`` tokens after each row, all of the vocabulary.
    """
    request = engine.submit(
        rng.integers(0, engines.VOCAB, int(rng.integers(1, 30))).tolist(), SamplingParams(max_tokens=9)
    )
    one = request.sequences[0]
    one.slot, worst, read = int(rng.integers(engine.config.max_sequences)), 0.0, 0
    ready, _ = proposer._read({one: 0})
    while not ready:
        ready, _ = proposer._read({one: proposer._known(one)})
    count = int(rng.integers(2, most + 1))
    parents = tuple(int(rng.integers(-1, number)) for number in range(count))
    tree = DraftTree(tuple(rng.integers(0, engines.VOCAB, count).tolist()), parents)
    cut = int(rng.integers(1, count))
    for end in (cut, count):
        chunk = tree_draft.ScheduledChunk(
            one, len(one.tokens) + read, end - read, samples=True, proposed=tree.tokens[read:end], tree=tree.first(end)
        )  # fmt: skip
        step = proposer._start([chunk], 1, decode=False)
        for number, (ids, logs) in enumerate(step.branches(one, end - read), read):
            want = engines.logprobs_of(family, "float64", [*one.tokens, *path(tree, number)])[-1]
            worst = max(worst, float(np.abs(want[ids] - logs).max()))
        read = end
    one.slot = -1
    engine.cancel(request)
    engine.step()
    return worst


@pytest.mark.drawn(3)
def test_a_tree_mask_is_each_path(verifying, rng, float64, monkeypatch):
    """Of every family: `make proof speculation ONLY=tree_mask_is_each_path`."""
    engine, _ = verifying
    monkeypatch.setattr(tree_draft, "BRANCHES", engines.VOCAB)
    proposer = engines.tree_draft(engine, engines.MODELS["llama"], engines.params_of("llama", "float64"))
    assert branch_error(engine, "llama", proposer, rng, TOKENS) <= 1e-10


def test_lengths_of_drafts_are_fixed(verifying, float64):
    engine, _ = verifying
    assert isinstance(engine.draft_length, FixedDraftLength)
