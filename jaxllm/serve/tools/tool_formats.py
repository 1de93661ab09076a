"""Tool-call formats of model families: each renders calls for prompts and generates the grammar that forces them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.text import ChatTemplate, Tokenizer


@dataclass(frozen=True)
class ToolCallFormat:
    """Syntax of tool calls in generated text: ``begin (open CALL close) between (open CALL close) ... end``.

    A CALL is a JSON object with the function's name and its arguments. With ``name_separator`` a CALL is the name, the
    separator, and the arguments as a JSON object.

    Attributes:
        begin, end: text around the list of calls.
        open, close: text around each call.
        between: text between two calls.
        arguments_key: key of the arguments, where a CALL is an object.
        name_separator: text between name and arguments; None: a CALL is an object.
        exclusive: an answer is either calls only or text only, because no marker announces a call.
        template_markers: strings that a chat template which writes this format contains, all of them.
        template_exclusions: strings that such a template does not contain.
    """

    begin: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    end: str = ""
    arguments_key: str = "arguments"
    name_separator: str | None = None
    exclusive: bool = False
    template_markers: tuple[str, ...] = ()
    template_exclusions: tuple[str, ...] = ()

    @property
    def name_prefix(self) -> str:
        """Text of a call before the function's name."""
        return self.open if self.name_separator is not None else self.open + '{"name": "'

    @property
    def arguments_prefix(self) -> str:
        """Text of a call between the function's name and its arguments."""
        return self.name_separator if self.name_separator is not None else f'", "{self.arguments_key}": '

    @property
    def call_suffix(self) -> str:
        """Text of a call after its arguments."""
        return self.close if self.name_separator is not None else "}" + self.close

    @property
    def start_marker(self) -> str:
        """Marker that announces calls in generated text."""
        return ((self.begin or self.open).split() or ["{"])[0]

    def render(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Calls, each (name, arguments), as the model would write them."""
        each = (
            self.name_prefix + name + self.arguments_prefix + _json(value) + self.call_suffix for name, value in calls
        )
        return self.begin + self.between.join(each) + self.end

    def rules(
        self,
        functions: Mapping[str, Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        parallel: bool,
        reasoning_end: str | None,
        allow_text: bool = False,
    ) -> str:
        """Grammar in Lark's notation that accepts one call, or with ``parallel`` one or more.

        Args:
            functions: JSON schemas of the arguments, by function name.
            tokenizer: its special tokens are matched by id where the format's markers contain them.
            parallel: several calls are legal.
            reasoning_end: marker that ends a reasoning section before the calls; None: there is no such section.
            allow_text: free text is legal too; after a start marker only calls are.
        """

        def spelt(text: str) -> str:
            return _spelt(text, tokenizer)

        begin, head, within = self.begin, self.name_prefix, self.between if parallel else None
        if allow_text and not self.exclusive:  # the rule of the text before the calls consumes the start marker
            if begin:
                begin = begin.removeprefix(self.start_marker)
            else:
                head, within = head.removeprefix(self.start_marker), None
        calls = "call" if within is None else f"call ({spelt(within)} call)*"
        start, lines = "calls", [f"calls: {spelt(begin)} {calls} {spelt(self.end)}"]
        if allow_text and self.exclusive:
            start = "(calls | said)"
            lines.append(r"said: /(\s*[^{\s](.|\n)*)?\s*/")
        elif allow_text:
            start = f"(said calls){'*' if parallel else '?'} REST"
            lines += _upto("said", self.start_marker, tokenizer)
            marker = _pattern(self.start_marker)
            special = special_tokens_in(tokenizer, [self.start_marker])
            lines.append("REST: /(.|\\n)*/" + ("" if special else f" & ~/(.|\\n)*{marker}(.|\\n)*/"))
        if reasoning_end is not None:
            start, lines = f"thought {start}", [*lines, *reasoning_rules(reasoning_end, tokenizer)]
        for i, (name, schema) in enumerate(functions.items()):
            before, json_schema = spelt(head + name + self.arguments_prefix), json.dumps(_tight(schema))
            lines.append(f"call_{i}: {before} %json {json_schema} {spelt(self.call_suffix)}")
        return "\n".join([f"start: {start}", *lines, "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))])


def _deepseek(words: str) -> str:
    """A special token of DeepSeek's vocabulary, with its full-width bars and lower-block spaces."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL = _deepseek("tool call begin"), _deepseek("tool call end")
_SEP = _deepseek("tool sep")

TOOL_CALL_FORMATS = {
    "hermes": ToolCallFormat(
        open="<tool_call>\n", close="\n</tool_call>", between="\n",
        template_markers=("<tool_call>",), template_exclusions=("<function=",),
    ),
    "llama3_json": ToolCallFormat(
        between="; ", arguments_key="parameters", exclusive=True,
        template_markers=("<|start_header_id|>", '"parameters": ', "tools"),
    ),
    "mistral": ToolCallFormat(
        begin="[TOOL_CALLS] [", between=", ", end="]",
        template_markers=("[TOOL_CALLS]",), template_exclusions=("[ARGS]", "[CALL_ID]"),
    ),
    "mistral_args": ToolCallFormat(
        open="[TOOL_CALLS]", name_separator="[ARGS]",
        template_markers=("[TOOL_CALLS]", "[ARGS]"), template_exclusions=("[CALL_ID]",),
    ),
    "deepseek_v3": ToolCallFormat(
        begin=_CALLS[0], open=f"{_CALL[0]}function{_SEP}", name_separator="\n```json\n", close=f"\n```{_CALL[1]}",
        between="\n", end=_CALLS[1], template_markers=(_CALLS[0], "```json"),
    ),
    "deepseek_v31": ToolCallFormat(
        begin=_CALLS[0], open=_CALL[0], name_separator=_SEP, close=_CALL[1], end=_CALLS[1],
        template_markers=(_CALLS[0],), template_exclusions=("```json",),
    ),
}  # fmt: skip
"""Formats by the names of vLLM's tool parsers; vLLM's ``mistral`` covers both Mistral formats, by tokenizer version."""


def detect_format(template: ChatTemplate) -> ToolCallFormat | None:
    """Tool-call format that a chat template writes; None where it writes no calls or uses an unknown format."""
    text = "\n".join(template.sources.values())
    for one in TOOL_CALL_FORMATS.values():
        present = all(marker in text for marker in one.template_markers)
        if supports_tools(template) and present and not any(marker in text for marker in one.template_exclusions):
            return one
    return None


def supports_tools(template: ChatTemplate) -> bool:
    """Whether a chat template renders the ``tools`` variable."""
    return any(re.search(r"\btools\b", text) for text in template.sources.values())


def special_tokens_in(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[int, ...]:
    """Ids of the special tokens whose names occur in texts; the detokenizer must spell them out for the parser."""
    texts = list(texts)
    return tuple(i for i, name in tokenizer.special_names.items() if any(name in text for text in texts))


def reasoning_rules(end: str, tokenizer: Tokenizer) -> list[str]:
    """Grammar rules of a reasoning section ("thought"): any text up to the end marker, then white space."""
    return ["thought: upto /\\s*/", *_upto("upto", end, tokenizer)]


def _upto(name: str, marker: str, tokenizer: Tokenizer) -> list[str]:
    """Grammar rule: any text up to the first occurrence of the marker, and the marker."""
    if special_tokens_in(tokenizer, [marker]):
        return [f"{name}: /(.|\\n)*/ {_spelt(marker, tokenizer)}"]
    return [f"{name}[lazy]: /(.|\\n)*{_pattern(marker)}/"]


def _pattern(text: str) -> str:
    """Text escaped for a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _spelt(text: str, tokenizer: Tokenizer) -> str:
    """Text in Lark's notation; special tokens in it are matched by id."""
    if not text:
        return ""
    names = {name: i for i, name in tokenizer.special_names.items() if name in text}
    if not names:
        return json.dumps(text, ensure_ascii=False)
    parts = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text)
    return " ".join(f"<[{names[p]}]>" if p in names else json.dumps(p, ensure_ascii=False) for p in parts if p)


def _tight(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema for JSON without white space between tokens."""
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


def tools_prompt(tools: Sequence[Mapping[str, Any]], call_format: ToolCallFormat) -> str:
    """System-message text that describes the functions, for a chat template that does not render ``tools``."""
    lines = [_json(tool["function"]) for tool in tools]
    example = call_format.render([("NAME", {"PARAMETER": "VALUE"})])
    return "\n".join(["You may call these functions:", *lines, "To call one, write:", example])
