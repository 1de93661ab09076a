"""Tool calling: resolves a chat request's ``tools`` and ``tool_choice`` into prompt, grammar and parser options."""

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
from jaxllm.serve.tools.call_format import ToolCallFormat, UnsupportedSchema
from jaxllm.serve.tools.call_grammar import ANY_ARGUMENTS, closed, reasoning_rules, special_tokens_in
from jaxllm.serve.tools.harmony import HarmonyFormat
from jaxllm.serve.tools.output_parser import REASONING_END, REASONING_START, ParserOptions
from jaxllm.serve.tools.tool_formats import TOOL_CALL_FORMATS, detect_format, supports_tools, tools_prompt


@dataclass(frozen=True)
class ChatFormat:
    """Chat format of a model: its tool-call format, its reasoning markers and their special tokens.

    Attributes:
        backend: source of the chat template and the tokenizer.
        parser: a name of ``TOOL_CALL_FORMATS``; None: detected from the chat template.
    """

    backend: Backend
    parser: str | None = None

    @cached_property
    def call_format(self) -> ToolCallFormat | None:
        """Tool-call format; None where the chat template's is unknown or there is no template."""
        template = self.backend.template
        if self.parser is not None:
            return TOOL_CALL_FORMATS[self.parser]
        return None if template is None else detect_format(template)

    @cached_property
    def template_has_tools(self) -> bool:
        """Whether the chat template renders tools; otherwise the system message describes them (``tools_prompt``)."""
        return self.backend.template is not None and supports_tools(self.backend.template)

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template reads a variable."""
        template = self.backend.template
        return template is not None and any(variable in text for text in template.sources.values())

    @cached_property
    def has_reasoning(self) -> bool:
        """Whether the model marks reasoning sections (``<think>``)."""
        template = self.backend.template
        return template is not None and any(REASONING_END in text for text in template.sources.values())

    @cached_property
    def reasoning_tokens(self) -> tuple[int, ...]:
        """Ids of the special tokens that delimit reasoning."""
        return special_tokens_in(self.backend.tokenizer, [REASONING_START, REASONING_END]) if self.has_reasoning else ()

    @cached_property
    def call_tokens(self) -> tuple[int, ...]:
        """Ids of the special tokens that delimit tool calls."""
        if self.call_format is None:
            return ()
        return special_tokens_in(self.backend.tokenizer, [self.call_format.markers])

    @cached_property
    def has_channels(self) -> bool:
        """Whether every answer has the format's markers, also without tools."""
        return isinstance(self.call_format, HarmonyFormat)

    def parser_options(self, prompt: str) -> ParserOptions:
        """Parser options for the answer to a prompt, without tool calls."""
        if self.has_channels:
            return ParserOptions(self.call_format)
        if not self.has_reasoning:
            return ParserOptions()
        return ParserOptions(reasoning="open" if prompt.rstrip().endswith(REASONING_START) else "optional")

    def require_call_format(self, param: str) -> ToolCallFormat:
        """The tool-call format.

        Raises:
            ApiError: it is unknown; ``param`` is the request field that needs it.
        """
        if self.call_format is None:
            why = "writes tool calls in an unknown format" if self.template_has_tools else "does not render tools"
            known = ", ".join(TOOL_CALL_FORMATS)
            message = f"this model's chat template {why}; serve it with --tool-parser and one of {known}."
            raise ApiError(400, message, param=param)
        return self.call_format

    def messages(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Messages for the chat template; tools and calls are written as text where the template does not render them.

        Raises:
            ApiError: messages contain calls or tools, and the tool-call format is unknown.
        """
        if self.template_has_tools:
            return list(messages)
        out = [self._as_text(i, message) for i, message in enumerate(messages)]
        if not tools:
            return out
        words = tools_prompt(tools, self.require_call_format("tools"))
        if out and out[0]["role"] == "system":
            return [{**out[0], "content": f"{out[0]['content']}\n\n{words}"}, *out[1:]]
        return [{"role": "system", "content": words}, *out]

    def _as_text(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool" and self.call_format is not None:
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if not message.get("tool_calls"):
            return message
        call_format = self.require_call_format(f"messages[{number}].tool_calls")
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**rest, "content": "\n".join(filter(None, [message["content"], call_format.render(calls)]))}


@dataclass(frozen=True)
class ToolChoice:
    """Resolved tool choice of a request.

    Attributes:
        tools: tools that the prompt describes; None: none.
        schemas: JSON schemas of the arguments of the functions that may be called, by name.
        forced: the answer must be a call.
        parallel: several calls in one answer are legal.
        strict: functions whose arguments a grammar holds to their schemas, in calls that are not forced.
    """

    tools: list[dict[str, Any]] | None = None
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    forced: bool = False
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    def parser_options(self, chat_format: ChatFormat, prompt: str) -> ParserOptions:
        """Parser options for the answer to a prompt."""
        plain = chat_format.parser_options(prompt)
        if not self.schemas:
            return plain
        if not self.forced:
            legal = self._legal if self.strict else None
            return replace(
                plain, call_format=chat_format.call_format, functions=self.schemas, parallel=self.parallel, legal=legal
            )
        # The grammar of a forced call has no reasoning section, except one that the prompt has opened.
        reasoning = plain.reasoning if plain.reasoning == "open" else "none"
        return replace(
            plain, call_format=chat_format.call_format, functions=self.schemas, forced=True, reasoning=reasoning
        )

    def grammar(self, chat_format: ChatFormat, parser_options: ParserOptions) -> Grammar | None:
        """Grammar that forces calls (``forced``) or the schemas of their arguments (``strict``); None for neither."""
        if not (self.forced or self.strict):
            return None
        end = REASONING_END if parser_options.reasoning == "open" else None
        assert parser_options.call_format is not None
        if chat_format.has_channels and not self.forced:
            message = (
                "this model's answers have channels, which no grammar covers; leave strict out, or force the call."
            )
            raise ApiError(400, message, param="tools")
        # The grammar covers all calls; functions that are not strict may have any arguments.
        held = self.schemas if self.forced else self.strict
        schemas = {name: schema if name in held else ANY_ARGUMENTS for name, schema in self.schemas.items()}
        try:
            rules = parser_options.call_format.rules(
                schemas,
                chat_format.backend.tokenizer,
                parallel=self.parallel,
                reasoning_end=end,
                allow_text=not self.forced,
            )
        except UnsupportedSchema as error:
            raise ApiError(400, f"{error}.", param="tools") from None
        return Grammar.ebnf(rules)

    def _legal(self, name: str, arguments: dict[str, Any]) -> bool:
        """Whether arguments of a call without the format's markers, which no grammar covers, are legal."""
        if name not in self.strict:
            return True
        import jsonschema

        return jsonschema.Draft202012Validator(self.schemas[name]).is_valid(arguments)


def resolve_tool_choice(body: ChatRequest, chat_format: ChatFormat) -> ToolChoice:
    """Resolves ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request.

    Raises:
        ApiError: the model has no tool-call format, the choice names no given tool, or a schema is not an object's.
    """
    given = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice if body.tool_choice is not None else "auto" if given else "none"
    if not given:
        if choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice requires a call, but tools is empty.", param="tool_choice")
        return ToolChoice()
    schemas: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(given):
        function = tool["function"]
        if function["name"] in schemas:
            raise ApiError(
                400, f"two functions are named {function['name']!r}.", param=f"tools[{number}].function.name"
            )
        schemas[function["name"]] = _schema(function.get("parameters"), number)
    if choice == "none":
        return ToolChoice()
    chat_format.require_call_format("tools")
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        return ToolChoice(given, _select(schemas, [choice.function.name]), forced=True, parallel=False)
    forced = choice == "required"
    if isinstance(choice, AllowedTools):
        schemas = _select(schemas, [tool.function.name for tool in choice.allowed_tools.tools])
        forced = choice.allowed_tools.mode == "required"
    strict = {tool["function"]["name"] for tool in given if tool["function"].get("strict")} & set(schemas)
    return ToolChoice(given, schemas, forced, parallel, frozenset(strict))


def _schema(parameters: dict[str, Any] | None, number: int) -> dict[str, Any]:
    """JSON schema of a function's arguments, of which only those are legal that it names, see ``closed``."""
    schema = parameters or {}
    if schema.get("type", "object") != "object":
        raise ApiError(
            400, f'parameters.type is {json.dumps(schema["type"])[:100]}; arguments are an object, so give "object".',
            param=f"tools[{number}].function.parameters",
        )  # fmt: skip
    return closed({**schema, "type": "object"})


def _select(schemas: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    if wrong := [name for name in names if name not in schemas]:
        raise ApiError(
            400, f"there is no function {wrong[0]!r}; tools has {', '.join(sorted(schemas))}.", param="tool_choice"
        )
    return {name: schemas[name] for name in names}


def grammar_after_reasoning(grammar: Grammar, backend: Backend, param: str) -> Grammar:
    """Grammar of the rest of a reasoning section that the prompt has opened, followed by that of a request field.

    Raises:
        ApiError: the grammar is not a JSON schema, the only kind that can follow other text.
    """
    if grammar.kind != "json_schema":
        raise ApiError(
            400, "this prompt opens a reasoning section, after which only response_format and json are supported; "
            "see enable_thinking of the chat template.", param=param,
        )  # fmt: skip
    schema = json.dumps({**json.loads(grammar.text), "x-guidance": {"whitespace_flexible": False}})
    rules = ["start: thought answer", f"answer: %json {schema}", *reasoning_rules(REASONING_END, backend.tokenizer)]
    return Grammar.ebnf("\n".join(rules))
