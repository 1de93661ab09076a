"""Draft model: proposes the tokens that a smaller model samples (speculative decoding, arXiv:2211.17192).

The draft has a runner, compiled programs and a KV cache of its own, and drafts for all sequences of a step together:
one step with prefill for the tokens that it has not seen yet, then one decode loop. It samples with the seed and
position of the served model's token, so both use the same random numbers: where the two distributions are alike, a
sampled token is most often the same, and at temperature 0 both take the likeliest. Verification compares tokens, so
completions are those of plain decoding in any case.

Each slot of the batch has pages of the draft's KV cache for a whole sequence. The proposer remembers which tokens they
hold, and keeps those that the sequence begins with. This covers refused tokens, preemption and new sequences alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.convert.load import load_model
from jaxllm.hub import find_model
from jaxllm.infer.engine import step_inputs
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.length_limits import choose_max_len, hard_limit
from jaxllm.infer.runner.model_runner import ModelRunner
from jaxllm.infer.runner.serving_mesh import spans_processes
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.scheduling.step_plan import ScheduledChunk, StepPlan
from jaxllm.infer.speculate.draft_tree import DraftTree
from jaxllm.models import Functional
from jaxllm.text import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """Model that an engine serves, and how, for proposers that run a model beside it.

    Attributes:
        model, params, config, tokenizer, vocab_size, longest, mesh, manifest, strict, background, path: arguments of
            ``Engine.of``, with the vocabulary's size settled.
    """

    model: Functional
    params: Any
    config: EngineConfig
    tokenizer: Tokenizer | None
    vocab_size: int
    longest: int | None = None
    mesh: jax.sharding.Mesh | None = None
    manifest: Path | None = None
    strict: bool = False
    background: bool = False
    path: Path | None = None


@dataclass(frozen=True)
class HeldTokens:
    """Tokens whose keys and values a slot of a draft's KV cache holds: the first of a sequence, then drafted ones."""

    sequence: Sequence
    length: int
    drafted: list[int] = field(default_factory=list)

    def known(self, one: Sequence) -> int:
        """Number of them that a sequence begins with; its last token is left out, since it is yet to be read."""
        if self.sequence is one:
            same = self.length + _common_prefix(self.drafted, one.tokens[self.length :])
        else:
            same = _common_prefix([*self.sequence.tokens[: self.length], *self.drafted], one.tokens)
        return min(same, len(one.tokens) - 1)


@dataclass(frozen=True)
class _Step:
    """Step of the draft model on its way, with the (replica, row) of each sequence in its result."""

    shape: StepShape
    result: Any
    rows: dict[Sequence, tuple[int, int]]
    steps: int

    def tokens(self, one: Sequence) -> list[int]:
        """Tokens that were sampled for a sequence; waits for the result."""
        replica, row = self.rows[one]
        tokens = self.shape.outputs.views(np.asarray(self.result)[replica])["tokens"][:, row].tolist()
        return tokens[: self.steps] if self.shape.decode else tokens

    def branches(self, one: Sequence, rows: int) -> list[tuple[list[int], list[float]]]:
        """Likeliest tokens after each of a sequence's last rows, and their log-probabilities; waits for the result."""
        replica, row = self.rows[one]
        found = self.shape.outputs.views(np.asarray(self.result)[replica])
        ids, logprobs = (found[name][self.shape.rows - rows :, row].tolist() for name in ("branch_ids", "branch_logs"))
        return list(zip(ids, logprobs, strict=True))


class DraftModelProposer:
    """Draft model of an engine, for all sequences of a step together; see ``BatchProposer``.

    Args:
        model, params: draft model and its weights.
        served: model that the proposals are for.
        masks: mask tokens that the draft has, by the ids after those of its vocabulary; 0: it drafts a token a pass.
        branches: likeliest tokens that a step finds after each row, in place of a sampled one, see ``StepShape``.
        rows: most rows of a sequence after which it does.
        tree_tokens: most tokens of a sequence that a tree mask covers.

    Attributes:
        runner: runs the draft model.

    Raises:
        ValueError: the draft cannot propose for the served model; says why.
    """

    def __init__(
        self,
        model: Functional,
        params: Any,
        served: ServedModel,
        masks: int = 0,
        branches: int = 0,
        rows: int = 1,
        tree_tokens: int = 0,
    ):
        config = served.config
        self._masks = [model.config.vocab_size + number for number in range(min(masks, config.verify_tokens - 1))]
        max_len = choose_max_len(served.model.config, config.max_len, served.longest)
        check_draft_model(model, served, max_len)
        page_size = config.page_size or -(-max_len // 64) * 64
        columns = -(-max_len // page_size)
        sizes = EngineConfig(
            max_sequences=config.max_sequences, max_batched_tokens=config.max_batched_tokens, max_len=max_len,
            page_size=page_size, pages=max(config.max_sequences * columns, columns + 1),
            buckets=config.prompt_buckets, decode_steps=1 if self._masks or branches else config.verify_tokens,
            verify_tokens=rows if branches else len(self._masks), samplers=("plain",), prefix_cache=False,
        )  # fmt: skip
        self.runner = ModelRunner(
            model, params, sizes, vocab_size=served.vocab_size, mesh=served.mesh, manifest=served.manifest,
            strict=served.strict, background=served.background, every_row=bool(self._masks),
            branches=branches, tree_tokens=tree_tokens,
        )  # fmt: skip
        # A slot has the same pages for ever: those of layers with a sliding window are used in turn.
        slots, places = np.arange(config.max_sequences, dtype=np.int32)[:, None], np.arange(columns, dtype=np.int32)
        each = (min(columns, pages // config.max_sequences) for pages in self.runner.spec.pages)
        self._tables = [slots * count + places % count for count in each]
        self._held: dict[tuple[int, int], HeldTokens] = {}

    @property
    def device_bytes(self) -> int:
        """Bytes of the draft's weights and KV cache on one device."""
        leaves = jax.tree.leaves((self.runner.params, self.runner.pools))
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> Many[list[int] | DraftTree | None]:
        """Proposes up to so many tokens for each sequence; None for those that it has not read to their end yet.

        A call reads at most ``max_batched_tokens`` tokens, so that a long prompt does not hold up other sequences.
        """
        counts = dict(wanted)
        places = {one: self._known(one) for one in counts}
        if self._masks:
            drafts = self._draft_at_once(counts, places)
            return [until_stop(one, drafts[one]) if one in drafts else None for one in counts]
        unread = any(len(one.tokens) - place > 1 for one, place in places.items())
        drafting, read = self._read(places) if unread else (list(counts), None)
        steps = max((counts[one] for one in drafting), default=0) - unread
        room = self.runner.spec.max_len - max((len(one.tokens) for one in drafting), default=0)
        decoded = self._decode(drafting, min(steps, room + (not unread)), 0 if unread else -1)
        steps_run = [step for step in (read, decoded) if step is not None]
        drafts = {one: [token for step in steps_run for token in step.tokens(one)] for one in drafting}
        for one, draft in drafts.items():
            self._remember(one, draft[:-1])
        return [until_stop(one, drafts[one][:count]) if one in drafts else None for one, count in wanted]

    def swap(self, params: Any) -> None:
        """Does nothing: the draft's weights are not those that the engine replaces."""

    def _remember(self, one: Sequence, drafted: list[int]) -> None:
        """Notes that the KV cache of a sequence's slot holds all its tokens, and after them drafted ones."""
        self._held[one.replica, one.slot] = HeldTokens(one, len(one.tokens), drafted)

    def _known(self, one: Sequence) -> int:
        held = self._held.get((one.replica, one.slot))
        return 0 if held is None else held.known(one)

    def _read(self, places: dict[Sequence, int]) -> tuple[list[Sequence], _Step | None]:
        """Reads the tokens from these places on, the fewest first; returns the sequences that it has read whole."""
        room, chunks = self.runner.config.max_batched_tokens, []
        for one, place in sorted(places.items(), key=lambda each: len(each[0].tokens) - each[1]):
            if count := min(len(one.tokens) - place, room):
                chunks.append(ScheduledChunk(one, place, count, samples=True))
                self._held[one.replica, one.slot] = HeldTokens(one, place + count)
                room -= count
        ready = [c.sequence for c in chunks if c.start + c.count == len(c.sequence.tokens)]
        return ready, self._start(chunks, 1, decode=False)

    def _draft_at_once(self, counts: dict[Sequence, int], places: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        """Reads the tokens from these places on and mask tokens after them; a draft of each that is read whole."""
        room, chunks = self.runner.config.max_batched_tokens, []
        for one, place in sorted(places.items(), key=lambda each: len(each[0].tokens) - each[1]):
            unread = len(one.tokens) - place
            masks = self._masks[: max(0, min(counts[one] - 1, self.runner.spec.max_len - len(one.tokens)))]
            if (count := unread + len(masks)) <= room:
                chunks.append(ScheduledChunk(one, place, count, samples=True, proposed=tuple(masks)))
            elif count := min(unread, room):
                chunks.append(ScheduledChunk(one, place, count, samples=True))
            room -= count
            self._held[one.replica, one.slot] = HeldTokens(one, min(place + count, len(one.tokens)))
        ready = {c.sequence: len(c.proposed) for c in chunks if c.start + c.count >= len(c.sequence.tokens)}
        step = self._start(chunks, 1, decode=False)
        return {one: step.tokens(one)[-1 - masks :] for one, masks in ready.items()}

    def _decode(self, drafting: list[Sequence], steps: int, offset: int) -> _Step | None:
        """Decodes from the last token, or (offset 0) from the one that ``_read`` has sampled after it."""
        if not drafting or steps < 1:
            return None
        chunks = [ScheduledChunk(one, len(one.tokens) + offset, 1, samples=True) for one in drafting]
        return self._start(chunks, steps, decode=True)

    def _start(self, chunks: list[ScheduledChunk], steps: int, *, decode: bool) -> _Step:
        """Starts a step of the draft model."""
        runner = self.runner
        plans = [StepPlan(steps=steps, copies=[[] for _ in self._tables]) for _ in range(runner.spec.replicas)]
        for chunk in chunks:
            plans[chunk.sequence.replica].chunks.append(chunk)
        many, tokens = max(len(plan.chunks) for plan in plans), max(plan.tokens for plan in plans)
        shape = runner.choose(many, tokens, decode=decode, full=False)
        packed = np.zeros((len(plans), shape.inputs.size), np.int32)
        for own, plan in zip(packed, plans, strict=True):
            step_inputs.fill(plan, shape, self._tables, shape.inputs.views(own))
        rows = {c.sequence: (replica, row) for replica, p in enumerate(plans) for row, c in enumerate(p.chunks)}
        return _Step(shape, runner.run(shape, packed), rows, steps)


def load_draft_model(name: str, served: ServedModel, mesh: jax.sharding.Mesh | None = None) -> tuple[Functional, Any]:
    """Loads a draft model and its weights, in the served model's dtype unless it is a run's.

    Args:
        mesh: mesh to shard them over; None: the served model's.

    Raises:
        ValueError: its tokenizer is not the served model's.
    """
    is_run = (find_model(name) / "checkpoints").is_dir()
    loaded = load_model(name, mesh=mesh or served.mesh, dtype=None if is_run else served.model.config.dtype)
    own, theirs = loaded.tokenizer, served.tokenizer
    if theirs is None or own.token_bytes != theirs.token_bytes or own.special_names != theirs.special_names:
        sizes = "" if theirs is None else f" of {theirs.vocab_size} tokens, the draft's has {own.vocab_size}"
        raise ValueError(
            f"speculate: the draft model {name} has another tokenizer than the served model{sizes}; a draft must have "
            "the same tokens by the same ids. Give a model of the same family, or ngram."
        )
    return loaded.model, loaded.params


def check_draft_model(model: Functional, served: ServedModel, max_len: int) -> None:
    """Checks that a draft can propose for a served model, in sequences of ``max_len`` tokens.

    Raises:
        ValueError: it cannot; says why.
    """
    if spans_processes(served.mesh):
        raise ValueError("speculate: a draft model is served by one process; on a mesh of several give ngram.")
    if model.config.virtual_tokens or served.model.config.virtual_tokens:
        raise ValueError(
            "speculate: a draft model does not go with virtual tokens (prefix, prompt tuning); give ngram."
        )
    if model.config.vocab_size < served.vocab_size:
        raise ValueError(
            f"speculate: the draft model has {model.config.vocab_size} tokens, the served one {served.vocab_size}; "
            "give a draft with the same vocabulary."
        )
    most, why = hard_limit(model.config)
    if most is not None and most < max_len:
        why = why.replace("the model", "the draft model")
        raise ValueError(
            f"speculate: sequences have {max_len} tokens, but {why} {most}; give a smaller max_len, or another draft."
        )


def _common_prefix(one: list[int], other: list[int]) -> int:
    """Number of tokens that both lists begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def until_stop(one: Sequence, draft: list[int]) -> list[int]:
    """Draft up to its first stop token: a completion that is accepted up to there ends."""
    end = next((i for i, token in enumerate(draft, 1) if token in one.request.stop_ids), len(draft))
    return draft[:end]
