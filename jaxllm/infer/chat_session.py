"""A conversation with a model through its chat template, its answers streamed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxllm.convert.load import LoadedModel
from jaxllm.files import DataError
from jaxllm.infer.llm import LLM, for_one
from jaxllm.infer.sampling_params import SEEDS, SamplingParams

Message = dict[str, Any]
"""With "role" and "content", as templates read them."""


@dataclass
class Chat:
    """A conversation.

    Attributes:
        loaded: the model; it must have a chat template.
        messages: what was said so far; begin it with a system message, if any.
        max_tokens: of an answer, at most.
        temperature: 0 takes the likeliest token each time.
        seed: of the sampling; every answer has its own stream.

    Raises:
        DataError: the model has no chat template.
        ValueError: no tokens to make, a negative temperature.
    """

    loaded: LoadedModel
    messages: list[Message] = field(default_factory=list)
    max_tokens: int = 512
    temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        self._params(self.max_tokens)
        if self.loaded.template is None:
            raise DataError(
                "this model has no chat template, so it was not trained to converse; "
                "`jaxllm generate` continues a text with it."
            )
        self._llm: LLM | None = None

    def say(self, text: str) -> Generator[str, None, None]:
        """Streams the answer to ``text``, which then belongs to the conversation.

        A stream that is not read to its end leaves what was read as the answer.

        Raises:
            DataError: the template refuses the conversation or makes nothing of it, or it is too long for the model;
                nothing is kept of ``text`` then.
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
        """The conversation as the model reads it, up to where its answer begins."""
        assert self.loaded.template is not None
        ids = self.loaded.tokenizer.encode(self.loaded.template.render(messages), specials=True)
        if not len(ids):
            raise DataError("the template makes an empty prompt of this conversation; a prompt has one token or more.")
        return [int(i) for i in ids]

    def _params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens, temperature=self.temperature, seed=(self.seed + len(self.messages)) % SEEDS
        )

    def _answer(self, ids: list[int], room: int) -> Iterator[str]:
        # A conversation that outgrows its engine gets a larger one.
        if self._llm is None or self._llm.engine.max_len < len(ids) + room:
            self._llm = LLM(self.loaded, for_one(self.loaded, max(2048, len(ids) + room)))
        for piece in self._llm.stream(ids, self._params(room)):
            if piece.text:
                yield piece.text
