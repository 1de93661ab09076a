"""Chat encoding: conversations to tokens through a chat template, with a loss mask over the assistant's messages.

The text that an assistant message adds is found by rendering twice: the conversation before it, with the generation
prompt, and the conversation including it. This needs no markers in the template, but earlier text must not change when
messages follow; a template that rewrites earlier turns (some drop the reasoning) is an error where it does. The
end-of-turn token of a message is trained; the whitespace after it is not, because generation has ended there.

The whole text is encoded at once, as in transformers, and a token belongs to the message that contains its first byte.
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
    """Tokens of a document, int32. loss_mask: True for tokens that are targets; None means all of them."""

    ids: Int[np.ndarray, " tokens"]
    loss_mask: Bool[np.ndarray, " tokens"] | None = None


class TextEncoder:
    """Plain-text encoder: documents begin as prompts do, see `Tokenizer.encode_documents`, and end with eos."""

    has_loss_mask = False

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the encoding: the tokenizer, and whether it begins texts."""
        own = self.tokenizer.fingerprint
        return own if self.tokenizer.adds_bos else digest(["text as it is", own])

    def encode(self, texts: Sequence[str]) -> list[EncodedDocument]:
        """Encodes documents. Raises DataError for a text that cannot be encoded, without saying which one."""
        return [EncodedDocument(ids) for ids in self.tokenizer.encode_documents(texts)]


class ChatEncoder:
    """Chat encoder: conversations, each the JSON of {"messages": [...], "tools": [...]}, through a chat template."""

    has_loss_mask = True

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self.tokenizer, self.template = tokenizer, template

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the encoding: the tokenizer and the chat template."""
        return digest(["chat", 1, self.tokenizer.fingerprint, self.template.fingerprint])

    def encode(self, texts: Sequence[str]) -> list[EncodedDocument]:
        """Encodes conversations. Raises DataError for one that cannot be used, without saying which one."""
        chats = [self._render(**json.loads(text)) for text in texts]
        ids = self.tokenizer.encode_batch([text for text, _ in chats], specials=True)
        return [self._with_loss_mask(text, spans, one) for (text, spans), one in zip(chats, ids, strict=True)]

    def encode_answer(
        self, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tools: Any = None
    ) -> EncodedDocument:
        """Encodes `prompt` and `answer` as one conversation; the loss mask has the assistant's part of the answer only.

        Raises DataError for an answer without a message of the assistant.
        """
        text, spans = self._render([*prompt, *answer], tools)
        said = sum(message["role"] == "assistant" for message in answer)
        if said == 0:
            raise DataError("the answer has no message of the assistant")
        return self._with_loss_mask(text, spans[-said:], self.tokenizer.encode(text, specials=True))

    def _render(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, list[tuple[int, int]]]:
        """(text of a conversation, character spans of the assistant's messages in it)."""
        whole, spans = self.template.render(messages, tools, add_generation_prompt=False), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.template.render(messages[:number], tools, add_generation_prompt=True)
            after = self.template.render(messages[: number + 1], tools, add_generation_prompt=False)
            if not after.startswith(before) or not whole.startswith(after):
                raise DataError(
                    f"the chat template is not prefix-stable: the text before or of message {number + 1} changes when "
                    "messages follow, so the assistant's tokens cannot be located for the loss mask. Train on "
                    "conversations that end with the assistant's only message, or use another template"
                )
            said = after[len(before) :]
            if said.rstrip().endswith(self._stop_strings):
                said = said.rstrip()
            spans.append((len(before), len(before) + len(said)))
        if not spans:
            raise DataError("the conversation has no message of the assistant, so there is nothing to learn")
        return whole, spans

    def _with_loss_mask(
        self, text: str, spans: list[tuple[int, int]], ids: Int[np.ndarray, " tokens"]
    ) -> EncodedDocument:
        spelled = self.tokenizer.decode_bytes(ids, specials=True)
        lead = len(spelled) - len(text.encode())
        if lead not in (0, self.tokenizer.prefix_space) or spelled[lead:] != text.encode():
            raise DataError(
                "the tokenizer normalises the text, so the assistant's tokens cannot be located for the loss mask"
            )
        lengths = self._token_bytes[ids]
        begins = np.cumsum(lengths) - lengths - lead  # offset of each token's first byte
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
