"""Preference records: the formats of preference data, and their completions as tokens.

Paired records ("preference") have "prompt", "chosen" and "rejected"; without "prompt", it is what both completions
begin with. Unpaired ones ("unpaired_preference") have "prompt", "completion" and a "label", true or false; a paired
record counts as two of them. These are TRL's formats.

Each field is a text or a list of messages. With a chat template, a text is a message of the user (prompt) or of the
assistant (completions). Without one, texts are concatenated between the begin-of-text and end-of-text ids. The loss
mask includes the tokens of the completion, not those of the prompt.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxllm.data.chat_encoding import ChatEncoder, EncodedDocument
from jaxllm.data.sources.chitchat import Chitchat
from jaxllm.data.sources.documents import BadRecords
from jaxllm.data.sources.records import RecordFiles, check_messages, check_unicode
from jaxllm.data.sources.remote_files import File, file_format, find_files
from jaxllm.files import DataError, at, digest
from jaxllm.text import ChatTemplate, Tokenizer

PAIRED, UNPAIRED = "preference", "unpaired_preference"
PREFERENCE_CONTENTS = (PAIRED, UNPAIRED)
"""Values of ``data.content`` that are preference data."""
PAIR_FIELDS = ("prompt", "chosen", "rejected")
LABEL_FIELDS = ("prompt", "completion", "label")
CHITCHAT_PAIRS = 2000
"""Chats, from the beginning of the data, that pairs are made of."""


class Example(NamedTuple):
    """A prompt with two completions, as tokens; for labelled data the second one is another prompt's completion.

    key: hash of the prompt; examples of one prompt are held out together. label: 1 good, -1 bad, 0 for pairs.
    """

    first: EncodedDocument
    second: EncodedDocument
    key: int
    label: int


class _Raw(NamedTuple):
    prompt: Any
    completion: Any
    tools: Any
    file: File
    row: int


def preference_records(source: tuple[str, ...], bad: BadRecords) -> Iterator[tuple[File, int, dict[str, Any]]]:
    """(file, row, record) of record files with preferences.

    Raises DataError for files of another format.
    """
    files = find_files(source)
    kind = file_format(files, "auto")
    if kind not in ("jsonl", "parquet", "arrow", "webdataset"):
        raise DataError(f"{at(files[0])}: {kind} files hold no preferences; legal: jsonl, parquet, arrow, tar")
    columns = dict.fromkeys((*PAIR_FIELDS, *LABEL_FIELDS, "tools"))
    yield from RecordFiles(files, kind, "chosen", bad=bad).records(list(columns))


def chitchat_pairs(chats: Chitchat) -> Iterator[tuple[File, int, dict[str, Any]]]:
    """Pairs made of real chats: the chosen completion is the answer to a chat's first message, the rejected one the
    first answer of the next chat, a real answer to something else.
    """
    opened = []
    for number, document in enumerate(chats):
        if number == CHITCHAT_PAIRS:
            break
        opened.append((document, json.loads(document.text)["messages"][:2]))
    for at_chat, (document, messages) in enumerate(opened):
        other = opened[(at_chat + 1) % len(opened)][1]
        yield document.file, document.row, {"prompt": messages[:1], "chosen": messages[1:], "rejected": other[1:]}


def with_prompt(record: dict[str, Any], file: File, row: int) -> dict[str, Any]:
    """A paired record with its prompt: the given one, or what both completions begin with.

    Raises DataError for a record without completions, or whose completions begin differently and have no prompt.
    """
    for name in PAIR_FIELDS[1:]:
        if record.get(name) is None:
            raise DataError(f"{at(file, row)}: no field {name!r}, only {sorted(record)}")
    if record.get("prompt") is not None:
        return record
    chosen, rejected = record["chosen"], record["rejected"]
    if type(chosen) is not type(rejected):
        raise DataError(f"{at(file, row)}: no field 'prompt', and 'chosen' and 'rejected' are not of one kind")
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if isinstance(chosen, str) and chosen[:same].endswith(" "):
        same -= 1  # a space belongs to the word after it
    if same == 0 or same in (len(chosen), len(rejected)):
        raise DataError(
            f"{at(file, row)}: no field 'prompt', and 'chosen' and 'rejected' do not begin alike and end differently; "
            "give the prompt"
        )
    return record | {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def encode_completion(
    raw: dict[str, Any], name: str, tokenizer: Tokenizer, template: ChatTemplate | None, file: File, row: int
) -> EncodedDocument:
    """Tokens of a record's prompt and of one of its completions, with a loss mask over the completion.

    Raises DataError, naming file and row, for fields that cannot be used.
    """
    for field in ("prompt", name):
        if isinstance(raw[field], str):
            check_unicode(raw[field], field, file, row)
        elif template is None:
            raise DataError(f"{at(file, row)}: {field!r} is a {type(raw[field]).__name__}; without a chat template "
                            "it must be text")  # fmt: skip
        else:
            check_messages(raw[field], field, file, row)
    if template is not None:
        prompt, answer = _messages(raw["prompt"], "user"), _messages(raw[name], "assistant")
        try:
            return ChatEncoder(tokenizer, template).encode_answer(prompt, answer, raw.get("tools"))
        except DataError as error:
            raise DataError(f"{at(file, row)}: {error}") from None
    prompt = tokenizer.encode(raw["prompt"], bos=tokenizer.adds_bos or not raw["prompt"])
    answer = tokenizer.encode(raw[name], eos=True)
    if len(prompt) == 0 or len(answer) == 0:
        empty = "prompt" if len(prompt) == 0 else name
        raise DataError(f"{at(file, row)}: {empty!r} is empty, and the tokenizer has no token to put in its place")
    trained = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return EncodedDocument(np.concatenate([prompt, answer]), trained)


def _messages(value: str | list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _key(prompt: Any) -> int:
    return int(digest([prompt])[:15], 16)


def paired_examples(
    records: Iterator[tuple[File, int, dict[str, Any]]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    bad: BadRecords,
) -> list[Example]:
    """Pairs as tokens. Raises DataError for a record that cannot be used, unless those are skipped."""
    found = []
    for file, row, record in records:
        try:
            whole = with_prompt(record, file, row)
            both = [encode_completion(whole, name, tokenizer, template, file, row) for name in PAIR_FIELDS[1:]]
        except DataError as error:
            bad.report(error)
            continue
        found.append(Example(both[0], both[1], _key(whole["prompt"]), 0))
    return found


def labelled_examples(
    records: Iterator[tuple[File, int, dict[str, Any]]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    bad: BadRecords,
) -> list[Example]:
    """Labelled completions as tokens, each beside the next record's completion of its own prompt.

    A pair counts as a good and a bad completion. Raises DataError for a record that cannot be used, unless those are
    skipped, and for fewer than two completions.
    """
    raws: list[tuple[dict[str, Any], int, File, int]] = []
    firsts: list[EncodedDocument] = []
    for file, row, record in records:
        try:
            own = [(one, label) for one, label in _labelled(record, file, row)]
            encoded = [encode_completion(one, "completion", tokenizer, template, file, row) for one, _ in own]
        except DataError as error:
            bad.report(error)
            continue
        raws += [(one, label, file, row) for one, label in own]
        firsts += encoded
    if len(raws) < 2:
        raise DataError(f"{len(raws)} labelled completions; give two or more: each is compared with another one's")
    found = []
    for number, (raw, label, file, row) in enumerate(raws):
        other = raws[(number + 1) % len(raws)][0]
        second = encode_completion(
            raw | {"completion": other["completion"]}, "completion", tokenizer, template, file, row
        )
        found.append(Example(firsts[number], second, _key(raw["prompt"]), label))
    return found


def _labelled(record: dict[str, Any], file: File, row: int) -> list[tuple[dict[str, Any], int]]:
    if "chosen" in record and record.get("completion") is None:
        whole = with_prompt(record, file, row)
        sides = zip(PAIR_FIELDS[1:], (1, -1), strict=True)
        return [({**whole, "completion": whole[name]}, label) for name, label in sides]
    for name in LABEL_FIELDS:
        if record.get(name) is None:
            raise DataError(f"{at(file, row)}: no field {name!r}, only {sorted(record)}")
    if not isinstance(record["label"], bool):
        raise DataError(f"{at(file, row)}: 'label' is {record['label']!r}; it must be true or false")
    return [(record, 1 if record["label"] else -1)]
