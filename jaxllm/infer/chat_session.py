"""Chat session: a conversation with a model through its chat template, with streamed answers."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxllm.convert.load import LoadedModel
from jaxllm.files import DataError
from jaxllm.infer.kv_cache_options import KEEP_ALL
from jaxllm.infer.llm import LLM, single_user_config
from jaxllm.infer.sampling_params import SEEDS, SamplingParams, with_sampling_defaults

DEFAULT_TEMPERATURE = 0.7
"""Sampling temperature of a model whose authors recommend none."""
FIRST_LENGTH = 2048
"""Tokens of a conversation that the first engine has room for."""
Message = dict[str, Any]
"""Message of a conversation, with "role" and "content", as templates expect it."""


@dataclass
class Chat:
    """Conversation with a model.

    Attributes:
        loaded: model; it must have a chat template.
        messages: conversation so far; may start with a system message.
        max_tokens: maximum tokens of an answer.
        temperature, top_p, top_k, min_p, repetition_penalty: see ``SamplingParams``; None: what the
            model's authors recommend (``LoadedModel.sampling``), else a temperature of 0.7 and nothing else.
        seed: sampling seed; each answer is sampled independently.
        speculate, speculate_tokens, speculate_runs: speculative decoding, see ``LLM``.
        kv_format, kv_keep: KV cache, see ``with_kv_cache``.

    Raises:
        DataError: the model has no chat template.
        ValueError: max_tokens is 0 or less, or the temperature is negative.
    """

    loaded: LoadedModel
    messages: list[Message] = field(default_factory=list)
    max_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    speculate: str | None = None
    speculate_tokens: int | None = None
    speculate_runs: int = 1
    kv_format: str = "auto"
    kv_keep: str = KEEP_ALL

    def __post_init__(self) -> None:
        self._params(self.max_tokens)
        if self.loaded.template is None:
            raise DataError(
                "this model has no chat template, so it was not trained for chat; "
                "use `jaxllm generate` to complete a text."
            )
        self._llm: LLM | None = None

    def say(self, text: str) -> Generator[str, None, None]:
        """Streams the answer to ``text``; both become part of the conversation.

        If the stream is not read to its end, the part that was read is the answer.

        Raises:
            DataError: the template refuses the conversation or renders nothing, or it is too long for the model;
                ``text`` is not added then.
        """
        ids = self.tokens([*self.messages, {"role": "user", "content": text}])
        room = self.max_tokens
        if self.loaded.longest is not None:
            room = min(room, self.loaded.longest - len(ids))
            if room < 1:
                raise DataError(
                    f"the conversation has {len(ids)} tokens, and the model reads {self.loaded.longest} at most; "
                    "start a new one."
                )
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            for piece in self._answer(ids, room):
                said.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})

    def tokens(self, messages: list[Message]) -> list[int]:
        """Prompt tokens of a conversation, up to the start of the answer; no message becomes a control token."""
        assert self.loaded.template is not None
        _, ids = self.loaded.template.encode(self.loaded.tokenizer, messages)
        if not ids:
            raise DataError("the template renders this conversation as an empty prompt; give a message with content.")
        return ids

    def _params(self, max_tokens: int) -> SamplingParams:
        given = {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }  # fmt: skip
        return with_sampling_defaults(
            given, {"temperature": DEFAULT_TEMPERATURE, **self.loaded.sampling}, max_tokens=max_tokens,
            seed=(self.seed + len(self.messages)) % SEEDS,
        )  # fmt: skip

    def _answer(self, ids: list[int], room: int) -> Iterator[str]:
        # A conversation that is too long for its engine gets a larger engine.
        if self._llm is None or self._llm.engine.max_len < len(ids) + room:
            room_for = max(FIRST_LENGTH, len(ids) + room)
            full = self._params(room).needs_full
            sizes = single_user_config(
                self.loaded,
                room_for,
                self.speculate,
                self.speculate_tokens,
                full,
                self.kv_format,
                self.kv_keep,
                self.speculate_runs,
            )
            self._llm = LLM(self.loaded, sizes)
        for piece in self._llm.stream(ids, self._params(room)):
            if piece.text:
                yield piece.text
