"""Chitchat source: real conversations from the package chitchat-dataset (MIT), 7,168 chats, 258,145 utterances.

Students' chats of "The Chit-Chat Challenge" of BYU's Perception, Control and Cognition Lab (Myers, Etchart, Fulda 2020,
"Conversational Scaffolding"). Only chats in which two people speak are used. No code of the package is run.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jaxllm.data.sources.documents import BadRecords, Document, Documents, conversation_json
from jaxllm.files import DataError, at, digest, file_sha256

NAME = "chitchat"
MAX_MESSAGES = 12
"""Messages taken from the beginning of a chat; few rows are long enough for more."""
INSTALL_COMMAND = "pip install --no-deps chitchat-dataset==0.9.0"


def find_chitchat() -> Path:
    """Path of the data file in the installed package. Raises DataError with the install command if it is missing."""
    found = importlib.util.find_spec("chitchat_dataset")
    for folder in (found and found.submodule_search_locations) or ():
        if (file := Path(folder) / "dataset.json").is_file():
            return file
    raise DataError(
        f"{NAME}: the package chitchat-dataset, which contains these chats, is not installed: {INSTALL_COMMAND}"
    )


@dataclass(frozen=True)
class Chitchat(Documents):
    """Chats as conversations: the first speaker is the user; successive utterances of one speaker are one message."""

    file: Path
    bad: BadRecords = field(default_factory=BadRecords, compare=False)

    @property
    def name(self) -> str:
        """Name in messages."""
        return NAME

    @cached_property
    def content_hash(self) -> str:
        """Hash of the data file and of the rules that select messages."""
        return digest([NAME, 1, file_sha256(self.file)])

    def __iter__(self) -> Iterator[Document]:
        self.bad.clear()
        try:
            chats = json.loads(self.file.read_bytes())
            for row, chat in enumerate(chats.values(), start=1):
                messages = _messages([piece for turn in chat["messages"] for piece in turn])
                if len(messages) > 1:
                    yield Document(conversation_json(messages), self.file, row)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{at(self.file)}: not the data of version 0.9.0; run {INSTALL_COMMAND}") from None


def _messages(pieces: list[dict[str, str]]) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for piece in pieces:
        role = "user" if piece["sender"] == pieces[0]["sender"] else "assistant"
        if not piece["text"].strip():
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += " " + piece["text"].strip()
        else:
            messages.append({"role": role, "content": piece["text"].strip()})
    messages = messages[:MAX_MESSAGES]
    while messages and messages[-1]["role"] == "user":  # an unanswered message has no target
        messages.pop()
    return messages if messages and messages[0]["role"] == "user" else []
