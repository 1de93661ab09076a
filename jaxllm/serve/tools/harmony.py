"""Harmony, the response format of gpt-oss: every message has a channel, and calls are messages to a function.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>``. The channel "analysis" is reasoning, "final" is the answer, and
"commentary" without a recipient is said to the user before calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxllm.serve.tools.call_format import Schemas
from jaxllm.serve.tools.json_calls import JsonCallFormat, parsed
from jaxllm.serve.tools.text_reader import ReadCall, Steps, TextReader

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_BEGINS = re.compile(r"(?:assistant\b\s*)?(?:to=[\w.-]+\s*)?" + re.escape(CHANNEL))
_MAY_BEGIN = re.compile(r"(?:assistant\s*)?(?:t|to|to=[\w.-]*\s*)?(?:<[|\w]*)?")


@dataclass(frozen=True)
class HarmonyFormat(JsonCallFormat):
    """Harmony's messages; a forced call is one message to a function."""

    @property
    def markers(self) -> str:
        """All texts that may be special tokens of the vocabulary."""
        return "".join((START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS))

    def read_messages(self, reader: TextReader, functions: Schemas) -> Steps:
        """Reads all messages: yields (field, text), ``ReadCall``, and None for more."""
        while (yield from reader.space()):
            head, channel, recipient = "", "final", None
            if (yield from _begins(reader)):
                if (end := (yield from reader.find(MESSAGE, 0))) < 0:
                    yield "content", reader.take(len(reader.text))
                    return
                head = reader.take(end + len(MESSAGE))
                found, to = _CHANNEL.search(head), _RECIPIENT.search(head)
                channel, recipient = found[1] if found else "final", to[1] if to else None
            if recipient is None:
                field = "reasoning_content" if channel == "analysis" else "content"
                yield from _body(reader, field)
                continue
            end = yield from _end_of_body(reader)
            body = reader.take(end)
            value = parsed(body)
            if recipient in functions and isinstance(value, dict):
                yield ReadCall(recipient, value)
            else:
                yield "content", head + body
            _take_end(reader)


def _begins(reader: TextReader) -> Steps:
    """Whether a message's header comes first; text without one is the answer, as a grammar forces it."""
    heads = (START, CHANNEL, "assistant")
    while not reader.last and (
        any(one.startswith(reader.text) for one in heads) or _MAY_BEGIN.fullmatch(reader.text) is not None
    ):
        yield None
    return reader.text.startswith((START, CHANNEL)) or _BEGINS.match(reader.text) is not None


def _end_of_body(reader: TextReader) -> Steps:
    while True:
        found = [at for mark in ENDS if (at := reader.text.find(mark)) >= 0]
        if found or reader.last:
            return min(found, default=len(reader.text))
        yield None


def _body(reader: TextReader, field: str) -> Steps:
    """Yields the text of a message as it comes."""
    while True:
        found = [at for mark in ENDS if (at := reader.text.find(mark)) >= 0]
        if found or reader.last:
            if text := reader.take(min(found, default=len(reader.text))):
                yield field, text
            _take_end(reader)
            return
        if text := reader.take(len(reader.text) - reader.held_back(ENDS)):
            yield field, text
        yield None


def _take_end(reader: TextReader) -> None:
    for mark in ENDS:
        if mark != START and reader.text.startswith(mark):
            reader.take(len(mark))
            return
