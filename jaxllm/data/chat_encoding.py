"""Conversations to tokens through a chat template, trained on what the assistant says and on nothing else.

What an assistant message adds to the text is found by rendering: the conversation up to it, with the beginning of the
model's turn, and the conversation with it. That needs no marks in the template, but the text so far must not change as
messages follow; a template that rewrites earlier turns (some drop thoughts) is refused where it does. The message's end
of turn is trained, the whitespace after it is not: generation has ended there.

The whole text is encoded at once, as transformers does, and a token belongs to the message in which its first byte
lies.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxllm.files import DataError, digest
from jaxllm.text import ChatTemplate, Tokenizer


class EncodedDocument(NamedTuple):
    """A document's tokens, int32. trained: which of them are targets; None is all of them."""

    ids: Int[np.ndarray, " tokens"]
    loss_mask: Bool[np.ndarray, " tokens"] | None = None


class TextEncoder:
    """Plain text: the tokens of each document between the ids that begin and end one."""

    has_loss_mask = False

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        return self.tokenizer.fingerprint

    def encode(self, texts: Sequence[str]) -> list[EncodedDocument]:
        """Raises DataError for a text that cannot be spelled, without saying which."""
        return [EncodedDocument(ids) for ids in self.tokenizer.encode_batch(texts, bos=True, eos=True)]


class ChatEncoder:
    """Conversations, each the JSON of {"messages": [...], "tools": [...]}."""

    has_loss_mask = True

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self.tokenizer, self.template = tokenizer, template

    @cached_property
    def fingerprint(self) -> str:
        return digest(["chat", 1, self.tokenizer.fingerprint, self.template.fingerprint])

    def encode(self, texts: Sequence[str]) -> list[EncodedDocument]:
        """Raises DataError for a conversation that cannot be used, without saying which."""
        chats = [self._render(**json.loads(text)) for text in texts]
        ids = self.tokenizer.encode_batch([text for text, _ in chats], specials=True)
        return [self._with_loss_mask(text, spans, one) for (text, spans), one in zip(chats, ids, strict=True)]

    def encode_answer(
        self, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tools: Any = None
    ) -> EncodedDocument:
        """`prompt` and `answer` as one conversation, trained on the assistant's part of the answer alone."""
        text, spans = self._render([*prompt, *answer], tools)
        said = sum(message["role"] == "assistant" for message in answer)
        if said == 0:
            raise DataError("the answer has no message of the assistant")
        return self._with_loss_mask(text, spans[-said:], self.tokenizer.encode(text, specials=True))

    def _render(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where in it the assistant speaks."""
        whole, spans = self.template.render(messages, tools, add_generation_prompt=False), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.template.render(messages[:number], tools, add_generation_prompt=True)
            after = self.template.render(messages[: number + 1], tools, add_generation_prompt=False)
            if not after.startswith(before) or not whole.startswith(after):
                raise DataError(
                    f"the chat template is not prefix-stable: the text before or of message {number + 1} changes as "
                    "messages follow, so what the assistant says in it cannot be told from the rest. Train on "
                    "conversations that end with the assistant's only message, or use another template"
                )
            said = after[len(before) :]
            if said.rstrip().endswith(self._stop_strings):
                said = said.rstrip()
            spans.append((len(before), len(before) + len(said)))
        if not spans:
            raise DataError("no message of the assistant, so there is nothing to learn")
        return whole, spans

    def _with_loss_mask(
        self, text: str, spans: list[tuple[int, int]], ids: Int[np.ndarray, " tokens"]
    ) -> EncodedDocument:
        spelled = self.tokenizer.decode_bytes(ids, specials=True)
        lead = len(spelled) - len(text.encode())
        if lead not in (0, self.tokenizer.prefix_space) or spelled[lead:] != text.encode():
            raise DataError("the tokenizer changes the text (it normalises it), so its parts cannot be found again")
        lengths = self._token_bytes[ids]
        begins = np.cumsum(lengths) - lengths - lead  # first byte of each token
        trained = np.zeros(len(ids), bool)
        ascii_only = text.isascii()
        for begin, end in spans:
            if not ascii_only:
                begin, end = len(text[:begin].encode()), len(text[:end].encode())
            trained[np.searchsorted(begins, begin) : np.searchsorted(begins, end)] = True
        return EncodedDocument(ids, trained)

    @cached_property
    def _stop_strings(self) -> tuple[str, ...]:
        names = self.tokenizer.special_names
        return tuple(names[one] for one in self.tokenizer.stop_ids if one in names)

    @cached_property
    def _token_bytes(self) -> Int[np.ndarray, " V"]:
        lengths = self.tokenizer.token_lengths.copy()
        for index, name in self.tokenizer.special_names.items():
            lengths[index] = len(name.encode())
        return lengths


Encoder = TextEncoder | ChatEncoder
