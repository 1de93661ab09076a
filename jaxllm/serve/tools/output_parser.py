"""Incremental parser of generated text: reasoning, content and tool calls, as OpenAI's streaming deltas.

``OutputParser`` takes text as it is generated and returns deltas; a whole message is their sum (``merge_deltas``).
Inside it is one generator that consumes the text and yields None where it needs more of it.
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
    """Parser settings: the tool-call format and the reasoning section to look for in generated text.

    Attributes:
        call_format: tool-call format; None: calls are not parsed.
        functions: names of the functions that may be called.
        forced: a grammar guarantees that the text is calls, so their arguments are streamed as they are generated.
        parallel: several calls count; otherwise text after the first call is dropped.
        reasoning: "none"; "optional": the text may begin with a reasoning section; "open": it begins inside one.
    """

    call_format: ToolCallFormat | None = None
    functions: Collection[str] = ()
    forced: bool = False
    parallel: bool = True
    reasoning: Literal["none", "optional", "open"] = "none"


class OutputParser:
    """Incremental parser of one completion.

    Args:
        options: what to look for.

    Attributes:
        calls: number of tool calls emitted so far.
    """

    def __init__(self, options: ParserOptions):
        self._options = options
        self._held, self._last = "", False
        self.calls = 0
        self._steps = self._read()

    def push(self, text: str, last: bool = False) -> list[Delta]:
        """Deltas that become certain with some more text; ``last`` says that the text ends here."""
        self._held += text
        self._last = last
        out: list[Delta] = []
        for delta in self._steps:
            if delta is None:
                break
            out.append(delta)
        return out

    def _read(self) -> Steps:
        options = self._options
        if options.reasoning != "none":
            yield from self._reasoning()
        if options.call_format is None:
            yield from self._content()
        elif options.forced:
            yield from self._forced_calls(options.call_format)
        else:
            yield from self._calls_in_text(options.call_format)

    # Pieces of text

    def _take(self, many: int) -> str:
        taken, self._held = self._held[:many], self._held[many:]
        return taken

    def _space(self) -> Steps:
        """Drops white space; returns whether any text follows."""
        while not (found := self._held.lstrip()) and not self._last:
            yield None
        self._held = found
        return bool(found)

    def _until(self, field: str, marker: str) -> Steps:
        """Emits text up to a marker, without white space around markers; returns whether the marker was found.

        Text that may be the beginning of the marker is held back.
        """
        while (at := self._held.find(marker)) < 0 and not self._last:
            if text := self._take(len(self._held[: len(self._held) - marker_overlap(self._held, marker)].rstrip())):
                yield {field: text}
            yield None
        text = self._take(len(self._held) if at < 0 else at)
        if at >= 0 or self.calls or field != "content":
            text = text.rstrip()
        if text:
            yield {field: text}
        return at >= 0

    def _content(self) -> Steps:
        """Emits all further text as content."""
        while self._held or not self._last:
            if self._held:
                yield {"content": self._take(len(self._held))}
            if not self._last:
                yield None

    def _reasoning(self) -> Steps:
        if self._options.reasoning == "optional":
            while not (found := self._held.lstrip()).startswith(REASONING_START):
                if self._last or not REASONING_START.startswith(found):
                    return
                yield None
            self._held = found[len(REASONING_START) :]
        yield from self._space()
        if (yield from self._until("reasoning_content", REASONING_END)):
            self._take(len(REASONING_END))
        yield from self._space()

    # Tool calls in free text

    def _calls_in_text(self, call_format: ToolCallFormat) -> Steps:
        if not call_format.exclusive:
            while self._more_calls_allowed and (yield from self._until("content", call_format.start_marker)):
                yield from self._call_list(call_format)
            yield from self._ignore()
            return
        while not (found := self._held.lstrip()) and not self._last:
            yield None
        if found.startswith(call_format.start_marker):
            self._held = found
            yield from self._call_list(call_format)
            if self.calls:
                yield from self._space()
        yield from self._content() if self._more_calls_allowed else self._ignore()

    @property
    def _more_calls_allowed(self) -> bool:
        """Whether another call would count."""
        return self._options.parallel or not self.calls

    def _ignore(self) -> Steps:
        while not self._last:
            self._held = ""
            yield None

    def _call_list(self, call_format: ToolCallFormat) -> Steps:
        """Parses from a start marker to the end of its calls; text that is not a call is emitted as content."""
        at = yield from self._match(call_format.begin, 0)
        if at < 0:
            yield {"content": self._take(len(call_format.start_marker))}
        while at >= 0:
            found, at = yield from self._call(call_format, at)
            if found is None:
                yield {"content": self._take(max(at, len(call_format.start_marker)))}
                return
            self._take(at)
            yield self._call_delta(found[0], json.dumps(found[1], ensure_ascii=False))
            if not self._more_calls_allowed or not (call_format.begin or call_format.exclusive):
                return  # every call has a start marker of its own
            at = yield from self._after_call(call_format)

    def _after_call(self, call_format: ToolCallFormat) -> Steps:
        """After a call: position of the next one, or -1 after the last."""
        if call_format.end and (at := (yield from self._match(call_format.end, 0))) >= 0:
            self._take(at)
            return -1
        if not (yield from self._space()):
            return -1
        return (yield from self._match(call_format.between, 0))

    def _call(self, call_format: ToolCallFormat, at: int) -> Steps:
        """((name, arguments), its end), or (None, the end of the text that is not a call)."""
        held = at
        at = yield from self._match(call_format.open, held)
        name = ""
        if call_format.name_separator is not None and at >= 0:
            marker = call_format.name_separator.strip()
            while (end := self._held.find(marker, at)) < 0 and not self._last:
                yield None
            if end < 0:
                return None, len(self._held)
            name, at = self._held[at:end].strip(), end + len(marker)
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
        found = _json_object(self._held[begin:end])
        if call_format.name_separator is None and found is not None:
            name = found.get("name")
            found = found.get(call_format.arguments_key)
        if not isinstance(found, dict) or not isinstance(name, str) or name not in self._options.functions:
            return None, end
        at = yield from self._match(call_format.close, end)
        return ((name, found), at) if at >= 0 else (None, end)

    def _match(self, text: str, at: int) -> Steps:
        """End of ``text`` in the held text from ``at`` on, ignoring white space; -1 where it does not match."""
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

    # Tool calls that a grammar forces

    def _forced_calls(self, call_format: ToolCallFormat) -> Steps:
        while True:
            for marker in (call_format.name_prefix, call_format.arguments_prefix):
                while (at := self._held.find(marker)) < 0:
                    if self._last:
                        return
                    yield None
                name = self._take(at)
                self._take(len(marker))
            yield self._call_delta(name)
            scan, end = JsonObjectScanner(), -1
            while end < 0:
                end = scan.feed(self._held)
                if text := self._take(len(self._held) if end < 0 else end):
                    yield self._arguments_delta(text)
                if end < 0:
                    if self._last:
                        return
                    yield None

    def _call_delta(self, name: str, arguments: str = "") -> Delta:
        # Chat templates of Mistral models require ids of nine letters and digits.
        head = {"index": self.calls, "id": secrets.token_hex(5)[:9], "type": "function"}
        self.calls += 1
        return {"tool_calls": [{**head, "function": {"name": name, "arguments": arguments}}]}

    def _arguments_delta(self, text: str) -> Delta:
        return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": text}}]}


def marker_overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of a text that is a prefix of the marker."""
    many = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((n for n in many if marker.startswith(text[-n:])), 0)


class JsonObjectScanner:
    """Incremental scanner that finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def feed(self, text: str, at: int = 0) -> int:
        """End of the object in ``text``, of which characters before ``at`` were scanned; -1 while it is incomplete."""
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


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def merge_deltas(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Message that is the sum of deltas."""
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
