"""Step shape: the sizes that an engine step is compiled for, and the packed buffers of its inputs and outputs.

Legend: T rows of the flat batch, S requests of a step, R slots (running sequences), J columns of a page table, N decode
steps per call, K top log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.infer.runner.step.packed_buffer import PackedBuffer

DEVICE_STOP_TOKENS = 8
"""Stop tokens per request that the device checks, to end its decode loop early; the host checks all."""
PENALTIES = ("repetition", "presence", "frequency")


@dataclass(frozen=True)
class StepShape:
    """Shape of a step's program: the sizes that it is compiled for.

    Attributes:
        tokens: T.
        requests: S, at most T.
        decode: decode-only: T = S sequences that decode up to ``decode_steps`` tokens each; otherwise prefill chunks
            of any lengths mixed with decode tokens, and one sampled token each.
        full: supports all of ``SamplingParams``; otherwise only seed and temperature.
        slots: R.
        columns: J.
        groups: number of page tables, one for each part of each group of layers, see ``LayerGroup``.
        decode_steps: N.
        top_logprobs: K.
        logprob_dtype: dtype of log-probabilities.
        rows: last rows of each request whose logits are computed in a step with prefill: 1, or more for steps that
            verify proposed tokens.
        retained: indices of the page tables with a retention rule.
        adapters: (slots, pages of the largest) of the adapters on the device; None: the engine serves none.
        residual: the latest tokens of a slot are in full precision, in ring buffers.
        evicts: the retention rule chooses by scores, and steps begin with its evictions.
        every_row: a token is sampled after each proposed one, whatever was sampled before: they are no proposals, but
            mask tokens of a draft.
        features: the step keeps the hidden states of its tokens, behind the page pools, see ``keep_features``.
        tree_words: words of a tree mask, see ``TreeMask``; 0: drafts are chains.
        branches: number of the likeliest tokens after each row, which come out instead of sampled ones, with their
            log-probabilities: the step is of a draft model that makes trees. 0: tokens are sampled.
        shares: pages that requests begin with are read once for all of them, see ``shared_pages``.
        halves: the rows go through the layers in two halves, see ``step_halves``.
        slices: latents are in slices, and generated tokens attend to each by itself, see ``latent_slices``.
    """

    tokens: int
    requests: int
    decode: bool
    full: bool
    slots: int
    columns: int
    groups: int
    decode_steps: int
    top_logprobs: int
    logprob_dtype: str
    rows: int = 1
    retained: tuple[int, ...] = ()
    adapters: tuple[int, int] | None = None
    residual: bool = False
    evicts: bool = False
    every_row: bool = False
    features: bool = False
    tree_words: int = 0
    branches: int = 0
    shares: bool = False
    halves: bool = False
    slices: bool = False

    @property
    def name(self) -> str:
        """Name of the program, such as decode-16-plain."""
        return f"{'decode' if self.decode else 'prompt'}-{self.tokens}-{'full' if self.full else 'plain'}"

    @property
    def verifies(self) -> bool:
        """Whether the step can verify proposed tokens."""
        return not self.decode and self.rows > 1

    @property
    def inputs(self) -> PackedBuffer:
        """Packed buffer of the inputs that the host sends.

        ``tokens`` are -1 where only the device knows them (the slot's last token); ``slots`` is R in rows without a
        request; ``copies`` after the first ``copied`` are not done; ``fresh`` are (first, stop) of the columns of a
        page table that the request has got since its last step, of groups with a retention rule, and ``stop`` is the
        number of its pages; ``found`` are tokens that a request has found in the prefix cache; ``proposed`` is the
        number of tokens to verify at the end of the request's rows; ``hidden`` and ``tree_first`` are the tree mask;
        ``parents`` say after which of these tokens, from 1 on, each of them comes, 0 for the row before them, -1 where
        there is none; ``targets`` are the tokens to be scored, -1 for none; ``shared`` is the number of a request's
        first pages that are read once for all; ``prompts`` are the lengths of prompts; ``adapters`` are the slots of
        the requests' adapters, -1 for none, and ``adapter_tables`` and ``adapter_scales`` say what is in all slots.
        """
        s = self.requests
        fields = [
            ("tokens", (self.tokens,), "int32"),
            ("starts", (s + 1,), "int32"),
            ("kv_lens", (s,), "int32"),
            ("slots", (s,), "int32"),
            ("tables", (self.groups, s, self.columns), "int32"),
            ("copied", (self.groups,), "int32"),
            ("copies", (self.groups, s, 2), "int32"),
            ("seeds", (s,), "uint32"),
            ("temperature", (s,), "float32"),
        ]
        if self.retained:
            fields += [("fresh", (len(self.retained), s, 2), "int32")]
        if self.residual:
            fields += [("found", (s,), "int32")]
        if self.verifies:
            fields += [("proposed", (s,), "int32")]
        if self.tree_words:
            fields += [("hidden", (self.tokens, self.tree_words), "int32"), ("tree_first", (s,), "int32")]
        if self.tree_words and not self.branches:
            fields += [("parents", (s, self.rows - 1), "int32")]
        if self.adapters is not None:
            fields += [("adapters", (s,), "int32"), ("adapter_tables", self.adapters, "int32")]
            fields += [("adapter_scales", self.adapters[:1], "float32")]
        if self.shares:
            fields += [("shared", (self.groups, s), "int32")]
        if self.slices:
            fields += [("prompts", (s,), "int32")]
        if self.decode:
            fields += [("steps", (), "int32"), ("stops", (s, DEVICE_STOP_TOKENS), "int32")]
        if self.full:
            fields += [(name, (s,), "int32") for name in ("top_k", "kind", "earliest")]
            fields += [(name, (s,), "float32") for name in ("top_p", "min_p", "typical_p", *PENALTIES)]
        if self.full and not self.decode:
            fields += [("targets", (self.tokens,), "int32")]
        return PackedBuffer(tuple(fields))

    @property
    def outputs(self) -> PackedBuffer:
        """Packed buffer of the outputs that the host gets; ``evictions`` are those of ``evict``, by page table.

        Rows are the last rows of each request, or with a tree mask the tokens that were sampled one after the other.
        """
        n, s = (self.decode_steps if self.decode else self.rows), self.requests
        fields = [("tokens", (n, s), "int32")]
        if self.evicts:
            fields += [("evictions", (len(self.retained), s, 3), "int32")]
        if self.branches:
            each = (n, s, self.branches)
            fields += [("branch_ids", each, "int32"), ("branch_logs", each, self.logprob_dtype)]
        if self.full:
            top = (n, s, self.top_logprobs)
            fields += [
                ("logprobs", (n, s), self.logprob_dtype),
                ("top_ids", top, "int32"),
                ("top_logprobs", top, self.logprob_dtype),
            ]
        if self.full and not self.decode:
            t, top = self.tokens, (self.tokens, self.top_logprobs)
            fields += [("scores", (t,), self.logprob_dtype), ("ranks", (t,), "int32")]
            fields += [("prompt_ids", top, "int32"), ("prompt_top", top, self.logprob_dtype)]
        return PackedBuffer(tuple(fields))


def by_usefulness(shapes: Sequence[StepShape], plain: bool = False) -> tuple[list[StepShape], list[StepShape]]:
    """Shapes that an engine can serve with alone, and the others with the most useful first.

    Any step fits into the largest shape of its kind with the most capable sampler, padded. Of the others, a single
    user's come first: the plain sampler, the smallest sizes, then the largest ones.

    Args:
        shapes: all shapes of an engine.
        plain: the first ones have the plain sampler, if there is one; a step that needs the other waits for it.
    """
    most = (min if plain else max)(shape.full for shape in shapes)
    kinds = [[one for one in shapes if one.decode == decode] for decode in (False, True)]
    ends = {id(kind): (min(s.tokens for s in kind), max(s.tokens for s in kind)) for kind in kinds if kind}
    first = [next(s for s in kind if s.full == most and s.tokens == ends[id(kind)][1]) for kind in kinds if kind]

    def order(shape: StepShape) -> tuple[bool, int, bool, int]:
        least, largest = next(ends[id(kind)] for kind in kinds if kind and kind[0].decode == shape.decode)
        rank = 0 if shape.tokens == least else 1 if shape.tokens == largest else 2
        return shape.full, rank, not shape.decode, shape.tokens

    return first, sorted((one for one in shapes if one not in first), key=order)


def smallest_fitting(shapes: Sequence[StepShape], least: StepShape) -> StepShape | None:
    """Smallest of some shapes that a step of the shape ``least`` fits into; None if there is none."""
    fitting = [
        one for one in shapes if one.decode == least.decode and one.tokens >= least.tokens and one.full >= least.full
    ]
    return min(fitting, key=lambda one: (one.tokens, one.full), default=None)
