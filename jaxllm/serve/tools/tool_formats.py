"""How models write calls of functions: a value for each format, which prompts, grammars and parsers come from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.text import ChatTemplate, Tokenizer


@dataclass(frozen=True)
class ToolCallFormat:
    """Of a text ``begin (open CALL close) between (open CALL close) ... end``.

    A CALL is a JSON object with the function's name and its arguments; with ``bare`` it is the name, this text, and the
    arguments as a JSON object.

    Attributes:
        begin, end: around all calls.
        open, close: around each.
        between: one and the next.
        key: what the arguments are called, where a call is an object.
        bare: see above.
        alone: calls are all of a text or nothing of it, as no mark announces them.
        signs: what a template that writes calls so has; all of them.
        never: and what it has not.
    """

    begin: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    end: str = ""
    key: str = "arguments"
    bare: str | None = None
    alone: bool = False
    signs: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """Before a function's name."""
        return self.open if self.bare is not None else self.open + '{"name": "'

    @property
    def middle(self) -> str:
        """Between name and arguments."""
        return self.bare if self.bare is not None else f'", "{self.key}": '

    @property
    def tail(self) -> str:
        """After arguments."""
        return self.close if self.bare is not None else "}" + self.close

    @property
    def mark(self) -> str:
        """What announces calls in a text."""
        return ((self.begin or self.open).split() or ["{"])[0]

    def write(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Calls, (name, arguments) each, as the model would write them."""
        each = (self.head + name + self.middle + _json(value) + self.tail for name, value in calls)
        return self.begin + self.between.join(each) + self.end

    def rules(
        self,
        functions: Mapping[str, Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        many: bool,
        thinks: str | None,
        free: bool = False,
    ) -> str:
        """A grammar in Lark's notation: a call, or with ``many`` one or more.

        Args:
            functions: schemas of arguments by name.
            tokenizer: whose special tokens the marks may be.
            thinks: the mark that ends thoughts which come first; None: none do.
            free: any text instead, in which nothing but calls follows a mark.
        """

        def spelt(text: str) -> str:
            return _spelt(text, tokenizer)

        begin, head, within = self.begin, self.head, self.between if many else None
        if free and not self.alone:  # the mark is read before
            if begin:
                begin = begin.removeprefix(self.mark)
            else:
                head, within = head.removeprefix(self.mark), None
        calls = "call" if within is None else f"call ({spelt(within)} call)*"
        start, lines = "calls", [f"calls: {spelt(begin)} {calls} {spelt(self.end)}"]
        if free and self.alone:
            start = "(calls | said)"
            lines.append(r"said: /(\s*[^{\s](.|\n)*)?\s*/")
        elif free:
            start = f"(said calls){'*' if many else '?'} REST"
            lines += _upto("said", self.mark, tokenizer)
            mark = _pattern(self.mark)
            lines.append(
                "REST: /(.|\\n)*/" + ("" if marks(tokenizer, [self.mark]) else f" & ~/(.|\\n)*{mark}(.|\\n)*/")
            )
        if thinks is not None:
            start, lines = f"thought {start}", [*lines, *reasoning_rules(thinks, tokenizer)]
        lines += [
            f"call_{i}: {spelt(head + name + self.middle)} %json {json.dumps(_tight(schema))} {spelt(self.tail)}"
            for i, (name, schema) in enumerate(functions.items())
        ]
        return "\n".join([f"start: {start}", *lines, "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))])


def _deepseek(words: str) -> str:
    """A special token of DeepSeek's, with the bars and spaces that they have there."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL = _deepseek("tool call begin"), _deepseek("tool call end")
_SEP = _deepseek("tool sep")

TOOL_CALL_FORMATS = {
    "hermes": ToolCallFormat(
        open="<tool_call>\n", close="\n</tool_call>", between="\n", signs=("<tool_call>",), never=("<function=",)
    ),
    "llama3_json": ToolCallFormat(
        between="; ", key="parameters", alone=True, signs=("<|start_header_id|>", '"parameters": ', "tools")
    ),
    "mistral": ToolCallFormat(
        begin="[TOOL_CALLS] [", between=", ", end="]", signs=("[TOOL_CALLS]",), never=("[ARGS]", "[CALL_ID]")
    ),
    "mistral_args": ToolCallFormat(open="[TOOL_CALLS]", bare="[ARGS]", signs=("[TOOL_CALLS]", "[ARGS]"), never=("[CALL_ID]",)),
    "deepseek_v3": ToolCallFormat(
        begin=_CALLS[0], open=f"{_CALL[0]}function{_SEP}", bare="\n```json\n", close=f"\n```{_CALL[1]}",
        between="\n", end=_CALLS[1], signs=(_CALLS[0], "```json"),
    ),
    "deepseek_v31": ToolCallFormat(
        begin=_CALLS[0], open=_CALL[0], bare=_SEP, close=_CALL[1], end=_CALLS[1], signs=(_CALLS[0],), never=("```json",)
    ),
}  # fmt: skip
"""By the names that vLLM gives them; its ``mistral`` is both of that maker's, by the tokenizer's age."""


def detect_format(template: ChatTemplate) -> ToolCallFormat | None:
    """The one that a template writes calls in; None where it writes none, or one that is not known."""
    text = "\n".join(template.sources.values())
    for one in TOOL_CALL_FORMATS.values():
        if supports_tools(template) and all(s in text for s in one.signs) and not any(s in text for s in one.never):
            return one
    return None


def supports_tools(template: ChatTemplate) -> bool:
    """Whether a template tells the model of functions."""
    return any(re.search(r"\btools\b", text) for text in template.sources.values())


def marks(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[int, ...]:
    """Special tokens whose names are in texts: a text has to have them spelt out to be read."""
    texts = list(texts)
    return tuple(i for i, name in tokenizer.special_names.items() if any(name in text for text in texts))


def reasoning_rules(end: str, tokenizer: Tokenizer) -> list[str]:
    """Rules of ``thought``: any text up to this mark, and space."""
    return ["thought: upto /\\s*/", *_upto("upto", end, tokenizer)]


def _upto(name: str, mark: str, tokenizer: Tokenizer) -> list[str]:
    """A rule: any text up to the first of these marks, and the mark."""
    if marks(tokenizer, [mark]):
        return [f"{name}: /(.|\\n)*/ {_spelt(mark, tokenizer)}"]
    return [f"{name}[lazy]: /(.|\\n)*{_pattern(mark)}/"]


def _pattern(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _spelt(text: str, tokenizer: Tokenizer) -> str:
    """A text in Lark's notation, special tokens in it by number."""
    if not text:
        return ""
    names = {name: i for i, name in tokenizer.special_names.items() if name in text}
    if not names:
        return json.dumps(text, ensure_ascii=False)
    parts = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text)
    return " ".join(f"<[{names[p]}]>" if p in names else json.dumps(p, ensure_ascii=False) for p in parts if p)


def _tight(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema for JSON without spaces."""
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


def tools_prompt(tools: Sequence[Mapping[str, Any]], form: ToolCallFormat) -> str:
    """What a model is told of functions where its template has no words for them."""
    lines = [_json(tool["function"]) for tool in tools]
    example = form.write([("NAME", {"PARAMETER": "VALUE"})])
    return "\n".join(["You may call these functions:", *lines, "To call one, write:", example])
