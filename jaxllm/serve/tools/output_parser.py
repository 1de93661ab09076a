"""Incremental parser of generated text: reasoning, content and tool calls, as OpenAI's streaming deltas.

``OutputParser`` takes text as it is generated and returns deltas; a whole message is their sum (``merge_deltas``).
Inside it is one generator that consumes the text and yields None where it needs more of it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.serve.tools.call_format import ToolCallFormat
from jaxllm.serve.tools.harmony import HarmonyFormat
from jaxllm.serve.tools.json_calls import read_bare
from jaxllm.serve.tools.text_reader import BracketScanner, ReadCall, TextReader

REASONING_START, REASONING_END = "<think>", "</think>"
Delta = dict[str, Any]
Steps = Generator[Delta | None, None, Any]
_LINE_START = re.compile(r"(?:\A\s*|\n[ \t]*)(```|[\[{])")
_LATER_LINE_START = re.compile(r"\n[ \t]*(```|[\[{])")
_LINE_MAY_START = re.compile(r"(?:\A|\n)[ \t]*`{0,2}\Z")


@dataclass(frozen=True)
class ParserOptions:
    """Parser settings: the tool-call format and the reasoning section to look for in generated text.

    Attributes:
        call_format: tool-call format; None: calls are not parsed.
        functions: JSON schemas of the arguments, by name of the functions that may be called.
        legal: whether a call's arguments are legal, for functions that are strict; others are text.
        forced: a grammar guarantees that the text is calls, so their arguments are streamed as they are generated.
        parallel: several calls count; otherwise text after the first call is dropped.
        reasoning: "none"; "optional": the text may begin with a reasoning section; "open": it begins inside one.
    """

    call_format: ToolCallFormat | None = None
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    legal: Callable[[str, dict[str, Any]], bool] | None = None
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
        self._options, self._reader = options, TextReader()
        self._space, self._at_line_start, self._has_said = "", True, False
        self.calls = 0
        self._steps = self._read()

    def push(self, text: str, last: bool = False) -> list[Delta]:
        """Deltas that become certain with some more text; ``last`` says that the text ends here."""
        self._reader.text += text
        self._reader.last = last
        out: list[Delta] = []
        for delta in self._steps:
            if delta is None:
                break
            out.append(delta)
        return out

    def _read(self) -> Steps:
        options, call_format = self._options, self._options.call_format
        if isinstance(call_format, HarmonyFormat) and not options.forced:
            yield from self._messages(call_format)
            return
        if options.reasoning != "none":
            yield from self._reasoning()
        if call_format is None:
            yield from self._content()
        elif options.forced and call_format.streams:
            yield from self._forced_calls(call_format)
        else:
            yield from self._calls_in_text(call_format)

    # Reasoning and content

    def _until(self, field: str, marker: str) -> Steps:
        """Emits text up to a marker, without white space around markers; returns whether the marker was found.

        Text that may be the beginning of the marker is held back.
        """
        reader = self._reader
        while (at := reader.text.find(marker)) < 0 and not reader.last:
            if text := reader.take(len(reader.text[: len(reader.text) - reader.held_back([marker])].rstrip())):
                yield {field: text}
            yield None
        text = reader.take(len(reader.text) if at < 0 else at)
        if at >= 0 or self.calls or field != "content":
            text = text.rstrip()
        if text:
            yield {field: text}
        return at >= 0

    def _content(self) -> Steps:
        """Emits all further text as content."""
        reader = self._reader
        while reader.text or not reader.last:
            if reader.text:
                yield {"content": reader.take(len(reader.text))}
            if not reader.last:
                yield None

    def _reasoning(self) -> Steps:
        reader = self._reader
        if self._options.reasoning == "optional":
            while not (found := reader.text.lstrip()).startswith(REASONING_START):
                if reader.last or not REASONING_START.startswith(found):
                    return
                yield None
            reader.text = found[len(REASONING_START) :]
        yield from reader.space()
        if (yield from self._until("reasoning_content", REASONING_END)):
            reader.take(len(REASONING_END))
        yield from reader.space()

    def _messages(self, call_format: HarmonyFormat) -> Steps:
        for found in call_format.read_messages(self._reader, self._options.functions):
            if not isinstance(found, ReadCall):
                yield None if found is None else {found[0]: found[1]}
            elif self._more_calls_allowed:
                yield self._delta_of(found)

    # Tool calls in free text

    def _calls_in_text(self, call_format: ToolCallFormat) -> Steps:
        reader, options = self._reader, self._options
        while self._more_calls_allowed and (bare := (yield from self._next_start(call_format))) is not None:
            if bare:
                found = read_bare(reader, options.functions, options.legal)
            else:
                found = call_format.read(reader, options.functions)
            for one in found:
                if isinstance(one, ReadCall):
                    self._space = ""
                    yield self._delta_of(one)
                    if not self._more_calls_allowed:
                        break
                elif one is None:
                    yield None
                else:
                    yield self._said(one)
            if self.calls and not self._space:
                yield from reader.space()
        if not self._more_calls_allowed:
            yield from self._ignore()

    def _next_start(self, call_format: ToolCallFormat) -> Steps:
        """Emits content up to where a call may begin; returns whether it is a bare one, or None at the end of the text.

        Text that may be the beginning of a call is held back, and so is white space, which calls have none around.
        """
        reader, markers = self._reader, call_format.start_markers
        while True:
            starts: list[tuple[int, bool]] = []
            if not call_format.exclusive:
                starts += [(at, False) for marker in markers if (at := reader.text.find(marker)) >= 0]
            elif not self._has_said and reader.text.lstrip().startswith(markers):
                starts.append((len(reader.text) - len(reader.text.lstrip()), False))
            begins = _LINE_START if self._at_line_start else _LATER_LINE_START
            if found := begins.search(reader.text):
                starts.append((found.start(1), True))
            at, bare = min(starts, default=(len(reader.text), None))
            rest = reader.text[at:]
            undecided = bare is True and not reader.last and any(marker.startswith(rest) for marker in markers)
            if bare is not None and not undecided:
                before = reader.take(at)
                if text := before.rstrip():
                    yield self._said(text)
                self._space += before[len(text) :]
                return bare
            if reader.last:
                if text := reader.text.rstrip() if self.calls else reader.text:
                    yield self._said(text)
                reader.text = ""
                return None
            held = [len(reader.text) - (0 if call_format.exclusive else reader.held_back(markers))]
            begun = reader.text.lstrip()
            if not self._has_said and call_format.exclusive and any(marker.startswith(begun) for marker in markers):
                held.append(0)
            if may := _LINE_MAY_START.search(reader.text):
                held.append(may.start())
            if text := reader.take(len(reader.text[: min(held)].rstrip())):
                yield self._said(text)
            yield None

    def _said(self, text: str) -> Delta:
        """Content, after the white space that was held back before it."""
        text, self._space = self._space + text, ""
        self._has_said = self._has_said or bool(text.strip())
        self._at_line_start = text.rstrip(" \t").endswith("\n")
        return {"content": text}

    @property
    def _more_calls_allowed(self) -> bool:
        """Whether another call would count."""
        return self._options.parallel or not self.calls

    def _ignore(self) -> Steps:
        while not self._reader.last:
            self._reader.text = ""
            yield None

    # Tool calls that a grammar forces

    def _forced_calls(self, call_format: ToolCallFormat) -> Steps:
        reader = self._reader
        while True:
            name = ""
            for marker in (call_format.name_prefix, call_format.arguments_prefix):
                if (at := (yield from reader.find(marker, 0))) < 0:
                    return
                name = reader.take(at)
                reader.take(len(marker))
            yield self._call_delta(name)
            scan, end = BracketScanner(), -1
            while end < 0:
                end = scan.feed(reader.text)
                if text := reader.take(len(reader.text) if end < 0 else end):
                    yield self._arguments_delta(text)
                if end < 0:
                    if reader.last:
                        return
                    yield None

    def _delta_of(self, call: ReadCall) -> Delta:
        return self._call_delta(call.name, json.dumps(call.arguments, ensure_ascii=False))

    def _call_delta(self, name: str, arguments: str = "") -> Delta:
        # Chat templates of Mistral models require ids of nine letters and digits.
        head = {"index": self.calls, "id": secrets.token_hex(5)[:9], "type": "function"}
        self.calls += 1
        return {"tool_calls": [{**head, "function": {"name": name, "arguments": arguments}}]}

    def _arguments_delta(self, text: str) -> Delta:
        return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": text}}]}


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
