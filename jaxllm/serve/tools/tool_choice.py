"""From a chat request's tools and tool_choice to what the model is told, how it is held to it, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxllm.infer.grammar import Grammar
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.request_schemas import AllowedTools, ChatRequest, NamedTool
from jaxllm.serve.backend import Backend
from jaxllm.serve.tools.output_parser import REASONING_END, REASONING_START, ParserOptions
from jaxllm.serve.tools.tool_formats import (
    TOOL_CALL_FORMATS,
    ToolCallFormat,
    detect_format,
    marks,
    reasoning_rules,
    supports_tools,
    tools_prompt,
)


@dataclass(frozen=True)
class ChatFormat:
    """How a model's answers are written.

    Attributes:
        backend: whose template and tokenizer say so.
        parser: a name of ``TOOL_CALL_FORMATS``; None: what the template writes.
    """

    backend: Backend
    parser: str | None = None

    @cached_property
    def form(self) -> ToolCallFormat | None:
        """Of calls."""
        template = self.backend.template
        if self.parser is not None:
            return TOOL_CALL_FORMATS[self.parser]
        return None if template is None else detect_format(template)

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template has words for tools; otherwise the prompt tells of them in the words of the format."""
        return self.backend.template is not None and supports_tools(self.backend.template)

    @cached_property
    def thinks(self) -> bool:
        """Whether the model was trained to mark its thoughts."""
        template = self.backend.template
        return template is not None and any(REASONING_END in text for text in template.sources.values())

    @cached_property
    def thought_marks(self) -> tuple[int, ...]:
        """Special tokens that thoughts are marked with."""
        return marks(self.backend.tokenizer, [REASONING_START, REASONING_END]) if self.thinks else ()

    @cached_property
    def call_marks(self) -> tuple[int, ...]:
        """Special tokens that calls are marked with."""
        form = self.form
        return () if form is None else marks(self.backend.tokenizer, [form.write([("f", {}), ("f", {})])])

    def way(self, prompt: str) -> ParserOptions:
        """How an answer to a prompt is read, where nothing is called."""
        if not self.thinks:
            return ParserOptions()
        return ParserOptions(thinks="does" if prompt.rstrip().endswith(REASONING_START) else "may")

    def need(self, what: str) -> ToolCallFormat:
        """The format of calls.

        Raises:
            ApiError: there is none; ``what`` is the field that needs it.
        """
        if self.form is None:
            why = "writes calls in a format that is not known here" if self.knows_tools else "has no words for tools"
            raise ApiError(
                400, f"this model's chat template {why}; serve it with --tool-parser and one of {', '.join(TOOL_CALL_FORMATS)}.",
                param=what,
            )  # fmt: skip
        return self.form

    def messages(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Messages for the template; where it has no words for tools and their calls, as messages of text.

        Raises:
            ApiError: calls are told of, and nobody knows how they are written.
        """
        if self.knows_tools:
            return list(messages)
        out = [self._plain(i, message) for i, message in enumerate(messages)]
        if not tools:
            return out
        words = tools_prompt(tools, self.need("tools"))
        if out and out[0]["role"] == "system":
            return [{**out[0], "content": f"{out[0]['content']}\n\n{words}"}, *out[1:]]
        return [{"role": "system", "content": words}, *out]

    def _plain(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool" and self.form is not None:
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if not message.get("tool_calls"):
            return message
        form = self.need(f"messages[{number}].tool_calls")
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**rest, "content": "\n".join(filter(None, [message["content"], form.write(calls)]))}


@dataclass(frozen=True)
class ToolChoice:
    """What a request asks of calls.

    Attributes:
        tools: that the model is told of; None: of none.
        schemas: of the arguments of functions that it may call, by name.
        forced: it is to call.
        many: several calls in an answer are legal.
        strict: arguments of all calls follow their schemas.
    """

    tools: list[dict[str, Any]] | None = None
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    forced: bool = False
    many: bool = True
    strict: bool = False

    def way(self, chat_format: ChatFormat, prompt: str) -> ParserOptions:
        """How an answer is read."""
        plain = chat_format.way(prompt)
        if not self.schemas:
            return plain
        if not self.forced:
            return replace(plain, form=chat_format.form, names=self.schemas, many=self.many)
        # A form leaves no place for thoughts but one that the prompt has begun.
        thinks = plain.thinks if plain.thinks == "does" else "no"
        return replace(plain, form=chat_format.form, names=self.schemas, forced=True, thinks=thinks)

    def grammar(self, chat_format: ChatFormat, way: ParserOptions) -> Grammar | None:
        """That forces calls, or their arguments."""
        if not (self.forced or self.strict):
            return None
        end = REASONING_END if way.thinks == "does" else None
        assert way.form is not None
        tokenizer, free = chat_format.backend.tokenizer, not self.forced
        return Grammar.ebnf(way.form.rules(self.schemas, tokenizer, many=self.many, thinks=end, free=free))


def resolve_tool_choice(body: ChatRequest, chat_format: ChatFormat) -> ToolChoice:
    """What a request asks of calls.

    Raises:
        ApiError: tools that this model cannot call, a choice that is none of them, schemas that are no objects'.
    """
    given = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice if body.tool_choice is not None else "auto" if given else "none"
    if not given:
        if choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice asks for a call, and there are no tools.", param="tool_choice")
        return ToolChoice()
    schemas: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(given):
        function = tool["function"]
        if function["name"] in schemas:
            raise ApiError(
                400, f"two functions are called {function['name']!r}.", param=f"tools[{number}].function.name"
            )
        schemas[function["name"]] = _schema(function.get("parameters"), number)
    if choice == "none":
        return ToolChoice()
    chat_format.need("tools")
    many = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        return ToolChoice(given, _chosen(schemas, [choice.function.name]), forced=True, many=False)
    forced = choice == "required"
    if isinstance(choice, AllowedTools):
        schemas = _chosen(schemas, [tool.function.name for tool in choice.allowed_tools.tools])
        forced = choice.allowed_tools.mode == "required"
    strict = {tool["function"]["name"] for tool in given if tool["function"].get("strict")} & set(schemas)
    if strict and not forced:  # the grammar is of all calls; those of other functions may have any arguments
        schemas = {name: schema if name in strict else {"type": "object"} for name, schema in schemas.items()}
    return ToolChoice(given, schemas, forced, many, bool(strict))


def _schema(parameters: dict[str, Any] | None, number: int) -> dict[str, Any]:
    """Of arguments; no parameters: none are taken."""
    schema = parameters or {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise ApiError(
            400, f"arguments are an object; parameters.type is {json.dumps(schema['type'])[:100]}.",
            param=f"tools[{number}].function.parameters",
        )  # fmt: skip
    return {**schema, "type": "object"}


def _chosen(schemas: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    if wrong := [name for name in names if name not in schemas]:
        raise ApiError(
            400, f"there is no function {wrong[0]!r}; tools has {', '.join(sorted(schemas))}.", param="tool_choice"
        )
    return {name: schemas[name] for name in names}


def grammar_after_reasoning(grammar: Grammar, backend: Backend) -> Grammar:
    """The form of what follows a thought that the prompt has begun.

    Raises:
        ApiError: a form that cannot be put after another text.
    """
    if grammar.kind != "json_schema":
        raise ApiError(
            400, "this prompt begins a thought, which only response_format and json may follow; see enable_thinking of "
            "the template.", param="structured_outputs",
        )  # fmt: skip
    schema = json.dumps({**json.loads(grammar.text), "x-guidance": {"whitespace_flexible": False}})
    rules = ["start: thought answer", f"answer: %json {schema}", *reasoning_rules(REASONING_END, backend.tokenizer)]
    return Grammar.ebnf("\n".join(rules))
