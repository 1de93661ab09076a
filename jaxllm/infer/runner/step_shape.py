"""Step shape: the sizes that an engine step is compiled for, and the packed buffers of its inputs and outputs.

Legend: T rows of the flat batch, S requests of a step, R slots (running sequences), J columns of a page table, N decode
steps per call, K top log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.infer.runner.packed_buffer import PackedBuffer

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
        groups: number of groups of layers, see ``LayerGroup``.
        decode_steps: N.
        top_logprobs: K.
        logprob_dtype: dtype of log-probabilities.
        rows: last rows of each request whose logits are computed in a step with prefill: 1, or more for steps that
            verify proposed tokens.
        retained: indices of the groups with a retention rule.
        adapters: (slots, pages of the largest) of the adapters on the device; None: the engine serves none.
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
        number of its pages; ``proposed`` is the number of tokens to verify at the end of the request's rows;
        ``targets`` are the tokens to be scored, -1 for none; ``adapters`` are the slots of the requests' adapters, -1
        for none, and ``adapter_tables`` and ``adapter_scales`` say what is in all slots.
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
        if self.verifies:
            fields += [("proposed", (s,), "int32")]
        if self.adapters is not None:
            fields += [("adapters", (s,), "int32"), ("adapter_tables", self.adapters, "int32")]
            fields += [("adapter_scales", self.adapters[:1], "float32")]
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
        """Packed buffer of the outputs that the host gets."""
        n, s = (self.decode_steps if self.decode else self.rows), self.requests
        fields = [("tokens", (n, s), "int32")]
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
