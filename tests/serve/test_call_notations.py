"""Calls as models write them: bare and fenced JSON, XML, Python, harmony; and what is no call."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from jaxllm.infer.grammar import Grammar, Grammars
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.tools.call_grammar import closed
from jaxllm.serve.tools.output_parser import ParserOptions
from jaxllm.serve.tools.tool_choice import ChatFormat
from jaxllm.serve.tools.tool_formats import TOOL_CALL_FORMATS, detect_format
from jaxllm.text import ChatTemplate
from jaxllm.text.byte_tokenizer import ByteTokenizer
from tests import environment
from tests.serve import servers
from tests.serve.test_tools import asked, calls_of, read

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "detailed": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}}, "unit": {"enum": ["C", "F"], "type": "string"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTIONS: dict[str, Any] = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
PARIS = ("weather", {"city": "Paris"})


def message(name: str, text: str, **options: Any) -> dict[str, Any]:
    """The message, the same whole and in pieces."""
    whole = read(ParserOptions(TOOL_CALL_FORMATS[name], FUNCTIONS, **options), text)
    rng = random.Random(environment.derive(environment.seed(), text))
    for _ in range(3):
        pieces = read(ParserOptions(TOOL_CALL_FORMATS[name], FUNCTIONS, **options), text, rng)
        assert (pieces.get("content"), calls_of(pieces)) == (whole.get("content"), calls_of(whole))
    return whole


BARE = '{"name": "weather", "arguments": {"city": "Paris"}}'
WRITTEN = [
    BARE,
    f"\n{BARE}\n",
    f"```json\n{BARE}\n```",
    f"```\n{BARE}\n```\n",
    f"```tool_call\n{BARE}```",
    BARE.replace("arguments", "parameters"),
    '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}',
    '{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}',
    '{"arguments": {"city": "Paris"}, "name": "weather"}',
    '{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',
    json.dumps(json.loads(BARE), indent=2),
    f"[{BARE}]",
]


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_calls_without_markers_are_found(name):
    if name == "harmony":
        pytest.skip("its messages have channels")
    for text in WRITTEN:
        if TOOL_CALL_FORMATS[name].exclusive and text.startswith("["):
            continue
        found = message(name, text)
        assert calls_of(found) == [PARIS], text
        assert "content" not in found, text
    if not TOOL_CALL_FORMATS[name].exclusive:
        told = message(name, f"I will look.\n\n```json\n{BARE}\n```\n")
        assert (told["content"], calls_of(told)) == ("I will look.", [PARIS])
    two = f"{BARE}\n{BARE.replace('Paris', 'Rome')}"
    assert calls_of(message(name, two)) == [PARIS, ("weather", {"city": "Rome"})]
    assert calls_of(message(name, two, parallel=False)) == [PARIS]


@pytest.mark.parametrize("text", [
    BARE.replace("weather", "other"),
    f"```json\n{BARE.replace('weather', 'other')}\n```",
    '{"name": "weather"}',
    '{"name": "weather", "arguments": [1]}',
    '{"name": "weather", "arguments": {"city": "Paris"}, "answer": 42}',
    '{"name": "weather", "arguments": {"city": "Paris"}, "parameters": {}}',
    '{"city": "Paris", "temperature": 20}',
    f"Write {BARE} to call it.",
    f"[{BARE}, 5]",
    "```python\ndef f():\n    return {'a': 1}\n```\n\nThat is it.",
    "```json\n[1, 2, 3]\n```",
    "A list:\n- a\n[1] a footnote\n{braces}\n\n  {more} ``` `x` ",
    '{"name": "weather", "arguments": {"city": "Par',
    "```", "``", "{", '{"na', "[", "\n\n{", "```json\n", "```json\n{",
])  # fmt: skip
def test_what_is_no_call_stays_as_it_is(text):
    for name in ("hermes", "mistral", "qwen3_coder", "gemma3"):
        assert message(name, text) == {"content": text}


XML = """Let me see.
<tool_call>
<function=weather>
<parameter=city>
New
"York" <b>
</parameter>
<parameter=days>
3
</parameter>
<parameter=detailed>
True
</parameter>
<parameter=tags>
["a", "b"]
</parameter>
<parameter=note>
null
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"""
SEVERAL = {"city": 'New\n"York" <b>', "days": 3, "detailed": True, "tags": ["a", "b"], "note": None}


@pytest.mark.parametrize(("name", "text", "calls", "content"), [
    ("qwen3_coder", XML, [("weather", SEVERAL), ("now", {})], "Let me see."),
    ("qwen3_coder", "<function=weather>\n<parameter=city>\n007\n</parameter>\n</function>",
     [("weather", {"city": "007"})], None),
    ("qwen3_coder", XML.replace("weather", "other").split("<tool_call>\n<function=now")[0], [], None),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>2</arg_value>\n</tool_call>", [("weather", {"city": "Paris", "days": 2})], None),
    ("pythonic", "[weather(city='Paris', days=2, detailed=True), now()]",
     [("weather", {"city": "Paris", "days": 2, "detailed": True}), ("now", {})], None),
    ("pythonic", '[weather(city="a ] \' (", tags=["x", "y"], note=None)]',
     [("weather", {"city": "a ] ' (", "tags": ["x", "y"], "note": None})], None),
    ("pythonic", "[weather('Paris')]", [PARIS], None),
    ("pythonic", "[other(city='Paris')]", [], "[other(city='Paris')]"),
    ("pythonic", "[weather(city=input())]", [], "[weather(city=input())]"),
    ("pythonic", "[weather(**{'city': 'Paris'})]", [], "[weather(**{'city': 'Paris'})]"),
    ("pythonic", "[1, 2]", [], "[1, 2]"),
    ("llama4_pythonic", "Sure. <|python_start|>[now()]<|python_end|>", [("now", {})], "Sure."),
    ("gemma3", "I look.\n```tool_code\nprint(weather(city='Paris'))\n```", [PARIS], "I look."),
    ("gemma3", "```tool_code\nimport os\nweather(city='Paris')\n```", [], None),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", [PARIS],
     None),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>New\n\"York\" <b><escape>,days:3,detailed:true,"
     "tags:[<escape>a<escape>,<escape>b<escape>],note:null}<end_function_call>"
     "<start_function_call>call:now{}<end_function_call>", [("weather", SEVERAL), ("now", {})], None),
    ("functiongemma", "I look. <start_function_call>call:weather{city:<escape>a}<end_function_call>, {b:<escape>}"
     "<end_function_call>", [("weather", {"city": "a}<end_function_call>, {b:"})], "I look."),
    ("functiongemma", "<start_function_call>call:other{city:<escape>x<escape>}<end_function_call>", [], None),
    ("functiongemma", "<start_function_call>call:weather{city:Paris}<end_function_call>", [], None),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>Paris<escape>", [], None),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>a<escape>}}<end_function_call>", [], None),
    ("functiongemma", "<start_function_call>call:now{" + "a:{" * 40 + "}" * 41 + "<end_function_call>", [], None),
    ("gemma4", 'Sure.<|tool_call>call:weather{city: <|"|>Paris<|"|>, tags: [ ] }<tool_call|>',
     [("weather", {"city": "Paris", "tags": []})], "Sure."),
    ("mistral_call_id", '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}', [PARIS], None),
])  # fmt: skip
def test_what_models_write(name, text, calls, content):
    found = message(name, text)
    assert calls_of(found) == calls
    assert found.get("content") == (content if content is not None or calls else text)


ANALYSIS = "<|channel|>analysis<|message|>The user wants\nthe weather.<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
FINAL = "<|start|>assistant<|channel|>final<|message|>It is {warm}."


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), [
    (ANALYSIS + CALL, "The user wants\nthe weather.", None, [PARIS]),
    (ANALYSIS + CALL + "<|call|>", "The user wants\nthe weather.", None, [PARIS]),
    (ANALYSIS + FINAL, "The user wants\nthe weather.", "It is {warm}.", []),
    ("<|channel|>final<|message|>Yes.<|return|>", None, "Yes.", []),
    ('<|channel|>commentary<|message|>I look.<|end|>' + CALL, None, "I look.", [PARIS]),
    (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}', None, None, [PARIS]),
    (CALL + "<|call|>" + CALL.replace("Paris", "Rome"), None, None, [PARIS, ("weather", {"city": "Rome"})]),
    (CALL.replace("weather", "other"), None, CALL.replace("weather", "other"), []),
    (CALL[:-3], None, CALL[:-3], []),
    ('{"a": 1}', None, '{"a": 1}', []),
    ("assistant is a word", None, "assistant is a word", []),
    ("<|channel|>analysis<|message|>cut", "cut", None, []),
    ("<|channel|>analysis", None, "<|channel|>analysis", []),
])  # fmt: skip
def test_harmonys_channels(text, reasoning, content, calls):
    found = message("harmony", text)
    assert (found.get("reasoning_content"), found.get("content"), calls_of(found)) == (reasoning, content, calls)


def test_harmony_has_channels_without_tools_too():
    template = ChatTemplate("<|start|><|channel|><|message|> functions {{ tools }} {{ messages[0].content }}")
    assert detect_format(template) is TOOL_CALL_FORMATS["harmony"]
    backend = servers.FixedRate(template=template)
    names = {**backend.tokenizer.special_names, 258: "<|channel|>", 259: "<|message|>", 260: "<|end|>"}
    vars(backend.tokenizer)["special_names"] = names
    assert ChatFormat(backend).has_channels
    handler = asked(template)
    assert handler._parsers[0]._options.call_format is TOOL_CALL_FORMATS["harmony"]
    assert ChatFormat(backend).call_tokens == (258, 259, 260)
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
    with pytest.raises(ApiError, match="leave strict out, or force"):
        asked(template, tools=[tool])
    assert asked(template, tools=[tool], tool_choice="required").jobs[0].params.grammar is not None


@pytest.mark.parametrize(("markers", "name"), [
    ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder"), ("<tool_call><arg_key><arg_value>", "glm45"),
    ("[TOOL_CALLS] [CALL_ID] [ARGS]", "mistral_call_id"), ("<|python_start|>", "llama4_pythonic"),
    ("<start_of_turn> ```tool_code", "gemma3"), ("<tool_call>", "hermes"),
    ("<start_of_turn><start_function_call>call:<escape>", "functiongemma"), ('<|tool_call>call:<|"|>', "gemma4"),
])  # fmt: skip
def test_templates_of_these_notations(markers, name):
    assert detect_format(ChatTemplate("{{ tools }}" + markers)) is TOOL_CALL_FORMATS[name]


# Schemas


def tool(parameters: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": "weather", **given, **fields}}


def accepts(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    guide = Grammars(ByteTokenizer(), 272).guide(grammar)
    for byte in text.encode():
        if guide.mask is None or not guide.mask[byte // 32] >> byte % 32 & 1:
            return False
        guide.advance(byte)
    return guide.accepts


@pytest.mark.parametrize(("parameters", "legal", "junk"), [
    (None, "{}", '{"a":1}'),
    ({}, "{}", '{"a":1}'),
    ({"type": "object"}, "{}", '{"a":1}'),
    ({"type": "object", "properties": {}}, "{}", '{"a":1}'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1}', '{"a":1,"b":2}'),
    ({"type": "object", "properties": {"a": {"type": "object"}}}, '{"a":{}}', '{"a":{"b":1}}'),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"b":1}', '{"b":"x"}'),
    ({"type": "object", "additionalProperties": True}, '{"b":"x"}', "[]"),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": {}}}}}},
     '{"a":[{"b":1}]}', '{"a":[{"c":1}]}'),
])  # fmt: skip
def test_forced_arguments_have_no_junk(parameters, legal, junk):
    grammar = asked(tools=[tool(parameters)], tool_choice="required").jobs[0].params.grammar
    form = TOOL_CALL_FORMATS["hermes"]

    def call(arguments: str) -> str:
        return form.name_prefix + "weather" + form.arguments_prefix + arguments + form.call_suffix

    assert accepts(grammar, call(legal))
    assert not accepts(grammar, call(junk))
    jsonschema.validate(json.loads(legal), parameters or {})


def test_a_closed_schema_allows_no_more_than_the_schema():
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "object"}, {"type": "null"}]}}, "$defs": {
        "x": {"type": "object", "properties": {"b": {}}}
    }, "allOf": [{"properties": {"c": {}}}]}  # fmt: skip
    made = closed(schema)
    assert "additionalProperties" not in made
    assert made["properties"]["a"]["anyOf"][0]["additionalProperties"] is False
    assert made["$defs"]["x"]["additionalProperties"] is False
    assert schema["$defs"]["x"] == {"type": "object", "properties": {"b": {}}}


@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "pythonic", "glm45", "llama4_pythonic", "functiongemma", "gemma4"]
)
def test_strict_holds_from_the_calls_opening_on(name):
    form = TOOL_CALL_FORMATS[name]
    grammar = asked(parser=name, tools=[tool(WEATHER, strict=True)]).jobs[0].params.grammar
    good = form.render([("weather", {"city": "Paris", "unit": "C"})])
    good = good.replace('"city": "Paris", "unit": "C"', '"city":"Paris","unit":"C"')
    bad = good.replace('"C"', '"K"') if '"C"' in good else good.replace("C\n", "K\n").replace("C<", "K<")
    assert bad != good
    said = "" if form.exclusive else "Let me see. "
    assert accepts(grammar, said + good)
    assert accepts(grammar, "no call")
    assert not accepts(grammar, said + bad)
    assert not accepts(grammar, said + good.replace("city", "town"))


def test_grammar_of_nested_arguments_in_gemmas_notation():
    inner = {"type": "object", "properties": {"b": {"type": "string"}}, "additionalProperties": False}
    parameters = {"type": "object", "properties": {"a": {"type": "array", "items": inner}, "n": {"type": "number"}}}
    grammar = asked(parser="gemma4", tools=[tool(parameters)], tool_choice="required").jobs[0].params.grammar
    form = TOOL_CALL_FORMATS["gemma4"]
    for arguments in ({}, {"a": []}, {"a": [{}, {"b": "x,{"}], "n": 1.5}, {"n": -2}):
        text = form.render([("weather", arguments)])
        assert accepts(grammar, text), text
        assert calls_of(read(ParserOptions(form, {"weather": parameters}), text)) == [("weather", arguments)]
    for arguments in ({"a": [5]}, {"a": [{"c": "x"}]}, {"n": "x"}, {"c": 1}, {"n": 1, "a": []}):
        assert not accepts(grammar, form.render([("weather", arguments)])), arguments


def test_strict_holds_for_calls_without_markers():
    for arguments, found in (('{"city": "Paris"}', 1), ('{"town": "Paris"}', 0), ('{"city": 5}', 0), ("{}", 0)):
        text = '{"name": "weather", "arguments": ' + arguments + "}"
        for strict in (True, False):
            handler = asked(tools=[tool(WEATHER, strict=strict)])
            deltas = handler._parsers[0].push(text, last=True)
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert len(calls) == (found if strict else 1)
            if not calls:
                assert "".join(delta["content"] for delta in deltas) == text


def test_schemas_that_a_notation_cannot_be_held_to_are_refused():
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    free = {"type": "object", "additionalProperties": True}
    for name, parameters in (
        ("qwen3_coder", pattern), ("qwen3_coder", free), ("pythonic", free), ("gemma4", pattern), ("gemma4", free),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            asked(parser=name, tools=[tool(parameters)], tool_choice="required")
        assert (caught.value.status, caught.value.param) == (400, "tools")
        assert asked(parser=name, tools=[tool(parameters)]).jobs[0].params.grammar is None
    assert asked(parser="hermes", tools=[tool(pattern)], tool_choice="required").jobs[0].params.grammar is not None


@pytest.mark.parametrize("arguments", ["", "  ", "{}"])
def test_calls_without_arguments_in_earlier_turns(arguments):
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    prompt = (
        asked(messages=[{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]).jobs[0].prompt
    )
    assert b'"arguments": {}' in bytes(prompt)
