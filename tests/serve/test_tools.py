"""Tool calls and reasoning: each format describes, forces and parses the calls that a model writes."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import openai
import pytest

from jaxllm.infer.grammar import Grammar, Grammars
from jaxllm.serve import ServeConfig
from jaxllm.serve.api import request_schemas
from jaxllm.serve.api.chat_completions import ChatCompletionHandler
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.generation import RequestDispatcher
from jaxllm.serve.server_metrics import ServerMetrics
from jaxllm.serve.tools.gemma_calls import GemmaCallFormat
from jaxllm.serve.tools.json_calls import JsonCallFormat
from jaxllm.serve.tools.output_parser import OutputParser, ParserOptions, merge_deltas
from jaxllm.serve.tools.tool_formats import TOOL_CALL_FORMATS, detect_format
from jaxllm.serve.tools.xml_calls import XmlCallFormat
from jaxllm.text import ChatTemplate
from jaxllm.text.byte_tokenizer import ByteTokenizer
from jaxllm.text.detokenizer import Detokenizer
from tests import environment
from tests.serve import servers
from tests.serve.driving import TOOLS, answered
from tests.text.templates import BOS, EOS, TEMPLATES

ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, Any] = {"weather": ARGUMENTS, "stop_all": {"type": "object", "additionalProperties": False}}
CALLS = [("weather", {"city": 'a "quoted" } {\\ é 雨', "days": [1, 2]}), ("stop_all", {})]
FORMS = [name for name in TOOL_CALL_FORMATS if name != "harmony"]
"""Formats of calls in free text; harmony's messages have tests of their own."""
FAMILIES = {"qwen3": "hermes", "llama3.1": "llama3_json", "mistral": "mistral"}


def read(way: ParserOptions, text: str, rng: random.Random | None = None) -> dict[str, Any]:
    """Message of a completion that comes in chunks."""
    reading, deltas = OutputParser(way), []
    while text:
        many = len(text) if rng is None else rng.randint(1, 6)
        deltas += reading.push(text[:many])
        text = text[many:]
    out = merge_deltas([*deltas, *reading.push("", last=True)])
    assert len(out.get("tool_calls", ())) == reading.calls
    return out


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_read(name):
    form, rng = TOOL_CALL_FORMATS[name], random.Random(environment.derive(environment.seed(), name))
    text = form.render(CALLS)
    for given in (None, rng):
        for forced in (True, False):
            message = read(ParserOptions(form, FUNCTIONS, forced=forced), text, given)
            assert calls_of(message) == CALLS
            assert set(message) == {"tool_calls"}
        one = read(ParserOptions(form, FUNCTIONS, parallel=False), text, given)
        assert calls_of(one) == CALLS[:1]
        if not form.exclusive:
            said = read(ParserOptions(form, FUNCTIONS), f"I look < it up.\n{text}\n", given)
            assert (said["content"], calls_of(said)) == ("I look < it up.", CALLS)
        thought = read(
            ParserOptions(form, FUNCTIONS, reasoning="optional"),
            f"\n<think>\nHm. {{}} </thin\n</think>\n\n{text}",
            given,
        )
        assert (thought["reasoning_content"], calls_of(thought)) == ("Hm. {} </thin", CALLS)
        assert "content" not in thought
    # However it is spaced; the order of names in an object says nothing.
    if not isinstance(form, JsonCallFormat):
        return
    loose = text.replace("\n", " ") if form.name_separator is None else text.replace("\n", "\n\n")
    assert calls_of(read(ParserOptions(form, FUNCTIONS), loose, rng)) == CALLS
    if form.name_separator is None:
        turned = (
            form.begin
            + form.open
            + json.dumps({form.arguments_key: {}, "name": "stop_all"}, indent=1)
            + form.close
            + form.end
        )
        assert calls_of(read(ParserOptions(form, FUNCTIONS), turned, rng)) == CALLS[1:]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_no_call_is_said(name):
    form, rng = TOOL_CALL_FORMATS[name], random.Random(environment.derive(environment.seed(), name))
    whole = form.render([("weather", {"city": "x"})])
    quote = form.quote if isinstance(form, GemmaCallFormat) else '"'
    broken = [
        form.render([("other", {})]),
        *([form.render([("weather", [1])])] if isinstance(form, JsonCallFormat) else []),
        *(
            []
            if isinstance(form, XmlCallFormat)
            else [whole.replace(f"{quote}x{quote}", other) for other in ("$x", f"{quote}x")]
        ),
        *(whole[:cut] for cut in rng.sample(range(1, len(whole) - len(form.end) - len(form.call_suffix)), 5)),
        form.start_marker,
        f"{form.start_marker} is how calls begin",
        form.start_marker * 300,
        "no call at all, \n\n ",
        "",
    ]
    for text in broken:
        for given in (None, rng):
            assert read(ParserOptions(form, FUNCTIONS), text, given) == ({"content": text} if text else {})
    if not form.exclusive:
        after = read(ParserOptions(form, FUNCTIONS), form.render([("other", {})]) + " " + whole, rng)
        assert calls_of(after) == [("weather", {"city": "x"})]
        assert "other" in after["content"]


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_the_grammar_allows_what_the_parser_reads(name):
    form, tokenizer = TOOL_CALL_FORMATS[name], ByteTokenizer()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)

    def follows(text: str, **fields: Any) -> bool:
        rules = form.rules(FUNCTIONS, tokenizer, **{"parallel": True, "reasoning_end": None, **fields})
        guide = grammars.guide(Grammar.ebnf(rules))
        for byte in text.encode():
            if guide.mask is None or not guide.mask[byte // 32] >> byte % 32 & 1:
                return False
            guide.advance(byte)
        return guide.accepts

    text = form.render(CALLS).replace('"city": ', '"city":').replace(', "days": [1, 2]', ',"days":[1,2]')
    text = text.replace("[1, 2]", "[1,2]")
    one = form.render([("stop_all", {})])
    assert follows(text)
    assert follows(one, parallel=False)
    assert follows(f"Hm. <think> {{\n</think>\n\n{text}", reasoning_end="</think>")
    assert not follows(text, parallel=False)
    assert not follows(text, reasoning_end="</think>")
    assert not follows("I say: " + text)
    assert not follows(form.render([("stop_all", {"city": "x"})]).replace('": ', '":'))
    assert not follows(form.render([("weather", {})]))
    assert not follows(form.render([("other", {})]))
    assert not follows("")
    # Free text, in which only a call follows a mark.
    between = "" if form.exclusive else "I look < it up.\n"
    for said in ("", "no call", between + text, between + one):
        assert follows(said, allow_text=True)
        assert follows(f"Hm.</think>{said}", allow_text=True, reasoning_end="</think>")
    assert not follows(between + form.render([("weather", {})]), allow_text=True)
    assert not follows(between + form.start_marker, allow_text=True)
    assert not follows(between + one.replace("stop_all", "other"), allow_text=True)
    if not form.exclusive:
        assert follows(f"{between}{one} and\n{one} again", allow_text=True)
        assert follows(f"{between}{one} again", allow_text=True, parallel=False)
        assert not follows(f"{between}{one} and\n{one} again", allow_text=True, parallel=False)


def test_special_tokens_that_mark_calls_are_forced_as_tokens(monkeypatch):
    tokenizer = ByteTokenizer()
    names = {**tokenizer.special_names, 258: "[TOOL_CALLS]"}
    monkeypatch.setitem(tokenizer.__dict__, "special_names", names)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    rules = TOOL_CALL_FORMATS["mistral"].rules(FUNCTIONS, tokenizer, parallel=True, reasoning_end=None)
    guide = grammars.guide(Grammar.ebnf(rules))
    assert guide.mask is not None
    assert [i for i in range(tokenizer.vocab_size) if guide.mask[i // 32] >> i % 32 & 1] == [258]


def test_special_tokens_that_are_marks_are_spelt_out():
    names = {258: "[TOOL_CALLS]", 259: "<think>", 260: "</think>", 261: "[INST]"}
    for text, fields, spelt in (
        ("mistral", {"tools": TOOLS}, (258,)),
        ("mistral", {}, ()),
        ("qwen3", {}, (259, 260)),
        ("qwen3", {"tools": TOOLS}, (259, 260)),
    ):
        backend = servers.FixedRate(template=ChatTemplate(TEMPLATES[text], BOS, EOS))
        vars(backend.tokenizer)["special_names"] = {**backend.tokenizer.special_names, **names}
        body = request_schemas.ChatRequest.model_validate({**HELLO, **fields})
        assert (
            ChatCompletionHandler(RequestDispatcher(backend, ServeConfig(), ServerMetrics("m")), body, {}, {})
            .jobs[0]
            .params.spelt
            == spelt
        )
    reader = Detokenizer(backend.tokenizer, spelt=(259,))
    assert [reader.push(token)[0] for token in (97, 259, 260, 98)] == ["a", "<think>", "", "b"]


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_say_how_calls_are_written(family):
    template = ChatTemplate(TEMPLATES[family], BOS, EOS)
    form = detect_format(template)
    assert form == TOOL_CALL_FORMATS[FAMILIES[family]]
    function = {"name": "weather", "arguments": CALLS[0][1]}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "123456789", "type": "function", "function": function}
    ]}]  # fmt: skip
    text = template.render(messages, tools=TOOLS, add_generation_prompt=False)
    begins = text.index(form.begin + form.name_prefix)
    assert calls_of(read(ParserOptions(form, FUNCTIONS), text[begins:].split(EOS)[0].split("<|")[0])) == CALLS[:1]


def test_templates_without_calls_have_no_format():
    assert {name for name, text in TEMPLATES.items() if detect_format(ChatTemplate(text))} == set(FAMILIES)
    assert detect_format(ChatTemplate("{% for t in tools %}<tool_call>\n<function=f>{% endfor %}")) is None


# Over a server

HELLO: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}
SAID = [("say", '{"word": "yes"}'), ("check", '{"ok": false}')]
QWEN = ChatTemplate(TEMPLATES["qwen3"])


@pytest.mark.parametrize("name", FORMS)
def test_calls_among_free_text_reach_the_client(name):
    form = TOOL_CALL_FORMATS[name]
    text = form.render([(name, json.loads(arguments)) for name, arguments in SAID])
    backend = servers.FixedRate(0, says=("" if form.exclusive else "Let me see.\n") + text)
    config = ServeConfig(port=0, name="tiny", tool_parser=name)
    with (
        servers.running(servers.opener(backend), config) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        choice, calls = answered(client, **HELLO, tools=TOOLS)
        assert (calls, choice.finish_reason) == (SAID, "tool_calls")
        assert choice.message.content == (None if form.exclusive else "Let me see.")
        assert answered(client, **HELLO, tools=TOOLS, parallel_tool_calls=False)[1] == SAID[:1]
        plain, none = answered(client, **HELLO, tools=TOOLS, tool_choice="none")
        assert (plain.message.content, none, plain.finish_reason) == (backend.says, [], "stop")


def test_thoughts_reach_the_client():
    backend = servers.FixedRate(0, says="<think>\nFirst\nthis.\n</think>\n\nYes.", template=QWEN)
    with (
        servers.running(servers.opener(backend)) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        message = client.chat.completions.create(**HELLO).choices[0].message
        assert (message.content, message.model_extra) == ("Yes.", {"reasoning_content": "First\nthis."})
        thought = said = ""
        for chunk in client.chat.completions.create(**HELLO, stream=True):
            thought += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
            said += chunk.choices[0].delta.content or ""
        assert (said, thought) == ("Yes.", "First\nthis.")
        cut = client.chat.completions.create(**{**HELLO, "max_tokens": 14}).choices[0]
        assert (cut.message.content, cut.message.model_extra) == ("", {"reasoning_content": "First"})


def asked(template: ChatTemplate = servers.TEMPLATE, parser: str | None = None, **fields: Any) -> ChatCompletionHandler:
    body = request_schemas.ChatRequest.model_validate({**HELLO, "model": "m", **fields})
    dispatcher = RequestDispatcher(
        servers.FixedRate(template=template), ServeConfig(tool_parser=parser), ServerMetrics("m")
    )
    return ChatCompletionHandler(dispatcher, body, {}, {})


def test_a_thought_that_the_prompt_begins():
    opened = ChatTemplate(TEMPLATES["qwen3"] + "{% if add_generation_prompt %}<think>\n{% endif %}")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    tokenizer = ByteTokenizer()
    for fields, text in (
        ({"response_format": form}, "12"),
        ({"tools": TOOLS, "tool_choice": "required"}, TOOL_CALL_FORMATS["hermes"].render([("check", {"ok": True})])),
    ):
        chat = asked(opened, **fields)
        grammar = chat.jobs[0].params.grammar
        assert grammar is not None
        guide = Grammars(tokenizer, tokenizer.vocab_size).guide(grammar)
        for byte in f"Hm.</think>\n{text}".replace('{"ok": ', '{"ok":').encode():
            assert guide.mask is not None
            assert guide.mask[byte // 32] >> byte % 32 & 1
            guide.advance(byte)
        assert guide.accepts
    with pytest.raises(ApiError) as caught:
        asked(opened, structured_outputs={"regex": "a"})
    assert caught.value.param == "structured_outputs"


def test_a_template_without_words_for_tools_is_told_of_them():
    bare = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}")
    with pytest.raises(ApiError, match="--tool-parser") as caught:
        asked(bare, tools=TOOLS)
    assert (caught.value.status, caught.value.param) == (400, "tools")
    called = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "say", "arguments": '{"word": "yes"}'}}
    ]}, {"role": "tool", "tool_call_id": "a", "content": "done"}]  # fmt: skip
    with pytest.raises(ApiError) as caught:
        asked(bare, messages=called)
    assert caught.value.param == "messages[1].tool_calls"
    assert bytes(asked(bare, tool_choice="none", tools=TOOLS).jobs[0].prompt) == b"<user>hi\n"
    for name, form in TOOL_CALL_FORMATS.items():
        text = bytes(asked(bare, name, messages=called, tools=TOOLS).jobs[0].prompt).decode()
        assert all(json.dumps(tool["function"]) in text for tool in TOOLS)
        assert form.render([("say", {"word": "yes"})]) in text
        assert text.startswith("<system>")
        assert "done" in text


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ("tools[1].function.name", {"tools": [TOOLS[0], TOOLS[0]]}),
        (
            "tools[0].function.parameters",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        ),
        ("response_format", {"tools": TOOLS, "response_format": {"type": "json_object"}}),
        ("structured_outputs", {"tools": TOOLS, "structured_outputs": {"regex": "a"}}),
        ("min_tokens", {"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_asked_is_named(param, fields):
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_forced_arguments_are_the_functions_own():
    strict = {"type": "function", "function": {"name": "f", "parameters": ARGUMENTS, "strict": True}}
    grammar = asked(tools=[strict], tool_choice="required").jobs[0].params.grammar
    assert grammar is not None
    assert json.dumps(ARGUMENTS)[:-1] in grammar.text
    loose = {"type": "function", "function": {"name": "g", "parameters": ARGUMENTS}}
    free = asked(tools=[strict, loose]).jobs[0].params.grammar
    assert free is not None
    assert free.text.count(json.dumps(ARGUMENTS)[:-1]) == 1
    assert asked(tools=[loose]).jobs[0].params.grammar is None
    nothing = asked(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required").jobs[0]
    assert nothing.params.grammar is not None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"a": 1}, json.loads(nothing.params.grammar.text.split("%json ")[1].split(' "}')[0]))
    with pytest.raises(ValueError, match="tool_parser"):
        ServeConfig(tool_parser="none")
