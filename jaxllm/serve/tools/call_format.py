"""Tool-call format: the syntax in which a family of models writes tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.serve.tools.call_grammar import pattern, reasoning_rules, special_tokens_in, spelt, upto
from jaxllm.serve.tools.text_reader import Steps, TextReader
from jaxllm.text import Tokenizer

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by function name."""


class UnsupportedSchema(ValueError):
    """A schema that a format's grammar cannot hold arguments to."""


@dataclass(frozen=True)
class ToolCallFormat:
    """Syntax of tool calls in generated text: ``begin (open CALL close) between (open CALL close) ... end``.

    Attributes:
        begin, end: text around the list of calls.
        open, close: text around each call.
        between: text between two calls.
        exclusive: an answer is either calls only or text only, because no marker announces a call.
        template_markers: strings that a chat template which writes this format contains, all of them.
        template_exclusions: strings that such a template does not contain.
    """

    begin: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    end: str = ""
    exclusive: bool = False
    template_markers: tuple[str, ...] = ()
    template_exclusions: tuple[str, ...] = ()

    streams = False
    """Whether forced calls are a name and then arguments in JSON, which can be streamed as they are generated."""

    @property
    def name_prefix(self) -> str:
        """Text of a call before the function's name."""
        return self.open

    @property
    def arguments_prefix(self) -> str:
        """Text of a call between the function's name and its arguments."""
        raise NotImplementedError

    @property
    def call_suffix(self) -> str:
        """Text of a call after its arguments."""
        return self.close

    @property
    def start_marker(self) -> str:
        """Marker that announces calls in generated text."""
        return ((self.begin or self.open).split() or ["{"])[0]

    @property
    def start_markers(self) -> tuple[str, ...]:
        """All markers that announce calls; a grammar knows the first one only."""
        return (self.start_marker,)

    @property
    def markers(self) -> str:
        """All texts that may be special tokens of the vocabulary."""
        return self.render([("f", {"a": "b"}), ("f", {})])

    def render_arguments(self, arguments: Any) -> str:
        """Arguments as the model would write them."""
        raise NotImplementedError

    def render(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Calls, each (name, arguments), as the model would write them."""
        each = (
            self.name_prefix + name + self.arguments_prefix + self.render_arguments(value) + self.call_suffix
            for name, value in calls
        )
        return self.begin + self.between.join(each) + self.end

    def read(self, reader: TextReader, functions: Schemas) -> Steps:
        """Reads calls from the start marker on: a generator of ``ReadCall``, text that is no call, and None for more.

        Returns:
            None, once the calls have ended. Further text may have calls again.
        """
        raise NotImplementedError

    def arguments_rules(self, number: int, schema: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, list[str]]:
        """(grammar expression of the arguments of a function, rules that it needs); ``number`` makes names unique.

        Raises:
            UnsupportedSchema: the grammar cannot hold arguments to the schema.
        """
        raise NotImplementedError

    def rules(
        self,
        functions: Schemas,
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

        Raises:
            UnsupportedSchema: see ``arguments_rules``.
        """
        begin, head, within = self.begin, self.name_prefix, self.between if parallel else None
        if allow_text and not self.exclusive:  # the rule of the text before the calls consumes the start marker
            if begin:
                begin = begin.removeprefix(self.start_marker)
            else:
                head, within = head.removeprefix(self.start_marker), None
        calls = "call" if within is None else f"call ({spelt(within, tokenizer)} call)*"
        start, lines = "calls", [f"calls: {spelt(begin, tokenizer)} {calls} {spelt(self.end, tokenizer)}"]
        if allow_text and self.exclusive:
            start = "(calls | said)"
            lines.append(rf"said: /(\s*[^{pattern(self.start_marker[0])}\s](.|\n)*)?\s*/")
        elif allow_text:
            start = f"(said calls){'*' if parallel else '?'} REST"
            lines += upto("said", self.start_marker, tokenizer)
            marker = pattern(self.start_marker)
            special = special_tokens_in(tokenizer, [self.start_marker])
            lines.append("REST: /(.|\\n)*/" + ("" if special else f" & ~/(.|\\n)*{marker}(.|\\n)*/"))
        if reasoning_end is not None:
            start, lines = f"thought {start}", [*lines, *reasoning_rules(reasoning_end, tokenizer)]
        for i, (name, schema) in enumerate(functions.items()):
            arguments, more = self.arguments_rules(i, schema, tokenizer)
            before, after = (spelt(text, tokenizer) for text in (head + name + self.arguments_prefix, self.call_suffix))
            lines += [f"call_{i}: {before} {arguments} {after}", *more]
        return "\n".join([f"start: {start}", *lines, "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))])


def to_json(value: Any) -> str:
    """JSON with characters of all scripts as they are."""
    return json.dumps(value, ensure_ascii=False)
