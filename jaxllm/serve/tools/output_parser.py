"""An answer's text as it comes, taken apart: what was thought, what is said, which functions are called.

A ``OutputParser`` is fed text and gives deltas in OpenAI's shape; a whole answer is what they add up to. Inside it is one
generator that reads on through the text, and gives None where it needs more of it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from jaxllm.serve.tools.tool_formats import ToolCallFormat

REASONING_START, REASONING_END = "<think>", "</think>"
Delta = dict[str, Any]
Steps = Generator[Delta | None, None, Any]


@dataclass(frozen=True)
class ParserOptions:
    """How an answer is to be read.

    Attributes:
        form: of calls; None: all is text.
        names: of functions that may be called.
        forced: a grammar sees to it that the text is calls, so they are given out as they come.
        many: several calls count; otherwise what follows the first is left out.
        thinks: "no"; "may": the text may begin with a thought; "does": it begins within one.
    """

    form: ToolCallFormat | None = None
    names: Collection[str] = ()
    forced: bool = False
    many: bool = True
    thinks: Literal["no", "may", "does"] = "no"


class OutputParser:
    """One answer.

    Args:
        way: see there.

    Attributes:
        calls: that were given out.
    """

    def __init__(self, way: ParserOptions):
        self._way = way
        self._held, self._last = "", False
        self.calls = 0
        self._steps = self._read()

    def push(self, text: str, last: bool = False) -> list[Delta]:
        """What can be told after some more text, which may be the last."""
        self._held += text
        self._last = last
        out: list[Delta] = []
        for delta in self._steps:
            if delta is None:
                break
            out.append(delta)
        return out

    def _read(self) -> Steps:
        way = self._way
        if way.thinks != "no":
            yield from self._thought()
        if way.form is None:
            yield from self._rest()
        elif way.forced:
            yield from self._forced(way.form)
        else:
            yield from self._free(way.form)

    # Pieces of text

    def _take(self, many: int) -> str:
        taken, self._held = self._held[:many], self._held[many:]
        return taken

    def _space(self) -> Steps:
        """Leaves space out; whether anything follows."""
        while not (found := self._held.lstrip()) and not self._last:
            yield None
        self._held = found
        return bool(found)

    def _until(self, field: str, mark: str) -> Steps:
        """Gives text out, less space around marks and less what may begin this one; whether the mark came."""
        while (at := self._held.find(mark)) < 0 and not self._last:
            if text := self._take(len(self._held[: len(self._held) - marker_overlap(self._held, mark)].rstrip())):
                yield {field: text}
            yield None
        text = self._take(len(self._held) if at < 0 else at)
        if at >= 0 or self.calls or field != "content":
            text = text.rstrip()
        if text:
            yield {field: text}
        return at >= 0

    def _rest(self) -> Steps:
        """All that comes is said."""
        while self._held or not self._last:
            if self._held:
                yield {"content": self._take(len(self._held))}
            if not self._last:
                yield None

    def _thought(self) -> Steps:
        if self._way.thinks == "may":
            while not (found := self._held.lstrip()).startswith(REASONING_START):
                if self._last or not REASONING_START.startswith(found):
                    return
                yield None
            self._held = found[len(REASONING_START) :]
        yield from self._space()
        if (yield from self._until("reasoning_content", REASONING_END)):
            self._take(len(REASONING_END))
        yield from self._space()

    # Calls among free text

    def _free(self, form: ToolCallFormat) -> Steps:
        if not form.alone:
            while self._open and (yield from self._until("content", form.mark)):
                yield from self._block(form)
            yield from self._ignore()
            return
        while not (found := self._held.lstrip()) and not self._last:
            yield None
        if found.startswith(form.mark):
            self._held = found
            yield from self._block(form)
            if self.calls:
                yield from self._space()
        yield from self._rest() if self._open else self._ignore()

    @property
    def _open(self) -> bool:
        """Whether another call counts."""
        return self._way.many or not self.calls

    def _ignore(self) -> Steps:
        while not self._last:
            self._held = ""
            yield None

    def _block(self, form: ToolCallFormat) -> Steps:
        """From a mark to the end of its calls; what is none is said."""
        at = yield from self._match(form.begin, 0)
        if at < 0:
            yield {"content": self._take(len(form.mark))}
        while at >= 0:
            found, at = yield from self._call(form, at)
            if found is None:
                yield {"content": self._take(max(at, len(form.mark)))}
                return
            self._take(at)
            yield self._begun(found[0], json.dumps(found[1], ensure_ascii=False))
            if not self._open or not (form.begin or form.alone):
                return  # each has a mark of its own
            at = yield from self._ended(form)

    def _ended(self, form: ToolCallFormat) -> Steps:
        """After a call: where the next one begins, or -1 where it was the last."""
        if form.end and (at := (yield from self._match(form.end, 0))) >= 0:
            self._take(at)
            return -1
        if not (yield from self._space()):
            return -1
        return (yield from self._match(form.between, 0))

    def _call(self, form: ToolCallFormat, at: int) -> Steps:
        """((name, arguments), where it ends), or (None, how far it can be read)."""
        held = at
        at = yield from self._match(form.open, held)
        name = ""
        if form.bare is not None and at >= 0:
            mark = form.bare.strip()
            while (end := self._held.find(mark, at)) < 0 and not self._last:
                yield None
            if end < 0:
                return None, len(self._held)
            name, at = self._held[at:end].strip(), end + len(mark)
        if at < 0:
            return None, held
        begin = yield from self._match("{", at)
        if begin < 0:
            return None, at
        scan, begin = JsonObjectScanner(), begin - 1
        at = begin
        while (end := scan.feed(self._held, at)) < 0:
            at = len(self._held)
            if self._last:
                return None, at
            yield None
        found = _object(self._held[begin:end])
        if form.bare is None and found is not None:
            name = found.get("name")
            found = found.get(form.key)
        if not isinstance(found, dict) or not isinstance(name, str) or name not in self._way.names:
            return None, end
        at = yield from self._match(form.close, end)
        return ((name, found), at) if at >= 0 else (None, end)

    def _match(self, text: str, at: int) -> Steps:
        """Where this text ends that is held from there on, however it is spaced; -1 where it is another."""
        for letter in "".join(text.split()):
            while not (rest := self._held[at : at + 1]) or rest.isspace():
                if not rest and self._last:
                    return -1
                if rest:
                    at += 1
                else:
                    yield None
            if rest != letter:
                return -1
            at += 1
        return at

    # Calls that a grammar has written

    def _forced(self, form: ToolCallFormat) -> Steps:
        while True:
            for mark in (form.head, form.middle):
                while (at := self._held.find(mark)) < 0:
                    if self._last:
                        return
                    yield None
                name = self._take(at)
                self._take(len(mark))
            yield self._begun(name)
            scan, end = JsonObjectScanner(), -1
            while end < 0:
                end = scan.feed(self._held)
                if text := self._take(len(self._held) if end < 0 else end):
                    yield self._more(text)
                if end < 0:
                    if self._last:
                        return
                    yield None

    def _begun(self, name: str, arguments: str = "") -> Delta:
        # Templates of Mistral's models want ids of nine letters and digits.
        head = {"index": self.calls, "id": secrets.token_hex(5)[:9], "type": "function"}
        self.calls += 1
        return {"tool_calls": [{**head, "function": {"name": name, "arguments": arguments}}]}

    def _more(self, text: str) -> Delta:
        return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": text}}]}


def marker_overlap(text: str, mark: str) -> int:
    """How many of the last letters of a text may begin a mark."""
    many = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in many if mark.startswith(text[-n:])), 0)


class JsonObjectScanner:
    """Finds where a JSON object ends."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def feed(self, text: str, at: int = 0) -> int:
        """The end of the object in a text whose letters before ``at`` were seen; -1 where it goes on."""
        for place in range(at, len(text)):
            letter = text[place]
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return -1


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def merge_deltas(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The message that deltas add up to."""
    texts: dict[str, list[str]] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                texts.setdefault(name, []).append(value)
                continue
            for call in value:
                if "id" in call:
                    calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    out: dict[str, Any] = {name: "".join(parts) for name, parts in texts.items()}
    return {**out, "tool_calls": calls} if calls else out
