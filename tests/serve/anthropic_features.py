"""Anthropic's own client against a server, feature by feature; for any model behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

MESSAGE_FEATURES: dict[str, Callable[[anthropic.Anthropic], None]] = {}
HELLO: Any = [{"role": "user", "content": "Say hello."}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "system": "Be brief."}
GREEDY = {"temperature": 0, "ignore_eos": True}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "no"]}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "say", "description": "Say a word.", "input_schema": SCHEMA},
    {
        "name": "check",
        "input_schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
        "cache_control": {"type": "ephemeral"},
    },
]
CALLING: dict[str, Any] = {**ASKED, "tools": TOOLS, "max_tokens": 100, "extra_body": {"seed": 4}}


def feature(check: Callable[[anthropic.Anthropic], None]) -> Callable[[anthropic.Anthropic], None]:
    MESSAGE_FEATURES[check.__name__] = check
    return check


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def streamed(client: anthropic.Anthropic, **asked: Any) -> tuple[Any, list[Any]]:
    """(message that the client put together, raw events)."""
    with client.messages.stream(**asked) as stream:
        events = [event for event in stream if event.type not in ("text", "input_json", "thinking")]
        return stream.get_final_message(), events


@feature
def a_message_has_the_published_form(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**ASKED, extra_body=GREEDY)
    assert (made.type, made.role, made.model) == ("message", "assistant", "tiny")
    assert made.id.startswith("msg_")
    assert (made.stop_reason, made.stop_sequence) == ("max_tokens", None)
    assert made.usage.output_tokens == 12
    assert made.usage.input_tokens > 0


@feature
def a_streamed_message_is_a_whole_one(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED, extra_body=GREEDY)
    made, events = streamed(client, **ASKED, extra_body=GREEDY)
    assert text_of(made) == text_of(whole) != ""
    assert (made.stop_reason, made.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0].message.content == []
    assert events[0].message.stop_reason is None


@feature
def raw_events_are_named(client: anthropic.Anthropic) -> None:
    body = {**ASKED, **GREEDY, "stream": True}
    answer = httpx.post(f"{str(client.base_url).rstrip('/')}/v1/messages", json=body, timeout=600)
    assert answer.headers["content-type"].startswith("text/event-stream")
    for one in answer.text.strip().split("\n\n"):
        name, data = one.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


@feature
def the_system_prompt_is_text_or_blocks(client: anthropic.Anthropic) -> None:
    blocks: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    texts = {
        text_of(client.messages.create(**{**ASKED, "system": system}, extra_body=GREEDY))
        for system in ("Be brief.", blocks)
    }
    assert len(texts) == 1
    counts = [
        client.messages.count_tokens(model="tiny", messages=HELLO, system=system).input_tokens
        for system in ("Be brief.", blocks, "Be very brief, please.")
    ]
    assert counts[0] == counts[1] < counts[2]


@feature
def content_is_text_or_blocks(client: anthropic.Anthropic) -> None:
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]
    made = [client.messages.create(**{**ASKED, "messages": asked}, extra_body=GREEDY) for asked in (HELLO, blocks)]
    assert text_of(made[0]) == text_of(made[1])


@feature
def stop_sequences_end_a_message(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(**ASKED, extra_body=GREEDY))
    word = text[len(text) // 2 : len(text) // 2 + 2]
    made = client.messages.create(**ASKED, stop_sequences=["never that", word], extra_body=GREEDY)
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", word)
    assert text_of(made) == text[: text.index(word)]
    again, _ = streamed(client, **ASKED, stop_sequences=[word], extra_body=GREEDY)
    assert (again.stop_reason, again.stop_sequence, text_of(again)) == ("stop_sequence", word, text_of(made))


@feature
def a_tool_that_must_be_called(client: anthropic.Anthropic) -> None:
    for tool in TOOLS:
        made = client.messages.create(**CALLING, tool_choice={"type": "tool", "name": tool["name"]})
        (call,) = made.content
        assert (call.type, call.name) == ("tool_use", tool["name"])
        assert call.id.startswith("toolu_")
        jsonschema.validate(call.input, tool["input_schema"])


@feature
def any_tool_must_be_called(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**CALLING, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (call,) = made.content
    assert (call.type, made.stop_reason) == ("tool_use", "tool_use")
    jsonschema.validate(call.input, {tool["name"]: tool["input_schema"] for tool in TOOLS}[call.name])


@feature
def a_streamed_call_is_a_whole_one(client: anthropic.Anthropic) -> None:
    asked = {**CALLING, "tool_choice": {"type": "tool", "name": "say"}}
    whole = client.messages.create(**asked).content[0]
    made, events = streamed(client, **asked)
    assert (made.content[0].name, made.content[0].input) == (whole.name, whole.input)
    parts = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert json.loads("".join(parts)) == whole.input


@feature
def tools_as_the_model_likes(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**CALLING, tool_choice={"type": "auto"})
    assert (made.stop_reason == "tool_use") <= any(block.type == "tool_use" for block in made.content)
    none = client.messages.create(**CALLING, tool_choice={"type": "none"})
    without = client.messages.create(**{**CALLING, "tools": []})
    assert text_of(none) == text_of(without)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**{**CALLING, "tools": []}, tool_choice={"type": "any"})


@feature
def tool_results_are_read(client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "toolu_abc", "name": "say", "input": {"word": "yes"}}
    counts = []
    for result in ("done", [{"type": "text", "text": "done"}], "it is done and could be much longer"):
        told: Any = [
            *HELLO,
            {"role": "assistant", "content": [{"type": "text", "text": "I call."}, call]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_abc", "content": result},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ]
        counts.append(client.messages.count_tokens(model="tiny", messages=told, tools=TOOLS).input_tokens)
        assert client.messages.create(**{**ASKED, "messages": told}, tools=TOOLS).role == "assistant"
    assert counts[0] == counts[1] < counts[2]
    told[-1]["content"][0]["is_error"] = True
    assert client.messages.count_tokens(model="tiny", messages=told, tools=TOOLS).input_tokens > counts[2]


@feature
def an_answer_can_be_given_back(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**ASKED, extra_body=GREEDY)
    more: Any = [*HELLO, made.to_param(), {"role": "user", "content": "Again."}]
    assert client.messages.create(**{**ASKED, "messages": more}).content is not None


@feature
def an_answer_continues_its_beginning(client: anthropic.Anthropic) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "He"}]
    whole = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    assert client.messages.count_tokens(model="tiny", messages=begun).input_tokens > whole
    made = client.messages.create(**{**ASKED, "messages": begun}, extra_body=GREEDY)
    assert made.usage.output_tokens == 12
    call = {"type": "tool_use", "id": "toolu_abc", "name": "say", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="results"):
        client.messages.create(**{**ASKED, "messages": [*HELLO, {"role": "assistant", "content": [call]}]})


@feature
def tokens_are_counted(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**ASKED, extra_body=GREEDY)
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.")
    assert counted.input_tokens == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    with_tools = client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.", tools=TOOLS)
    assert with_tools.input_tokens > counted.input_tokens
    long: Any = [{"role": "user", "content": "word " * 2000}]
    assert client.messages.count_tokens(model="tiny", messages=long).input_tokens > 1000


@feature
def the_prefix_cache_is_counted(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "The same long beginning of a prompt. " * 4}]}
    client.messages.create(**asked)
    usage = client.messages.create(**asked).usage
    assert (usage.cache_read_input_tokens or 0) > usage.input_tokens > 0
    salted = client.messages.create(**asked, extra_body={"cache_salt": "mine alone"}).usage
    assert (salted.cache_read_input_tokens or 0) < (usage.cache_read_input_tokens or 0)


@feature
def a_schema_forms_the_answer(client: anthropic.Anthropic) -> None:
    output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    made = client.messages.create(**{**ASKED, "max_tokens": 60}, output_config=output)
    jsonschema.validate(json.loads(text_of(made)), SCHEMA)


@feature
def seeds_repeat_a_message(client: anthropic.Anthropic) -> None:
    texts = [
        text_of(client.messages.create(**ASKED, extra_body={"seed": seed, "ignore_eos": True, "temperature": 1}))
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


@feature
def refusals_are_the_clients_own_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASKED, "model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    for fields in (
        {"speed": "fast"},
        {"container": "c"},
        {"output_config": {"effort": "high"}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**{**ASKED, **fields})  # type: ignore[arg-type]
        error = refused.value.body["error"]  # type: ignore[index]
        assert error["type"] == "invalid_request_error"
        assert next(iter(fields)) in error["message"]
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(**{**ASKED, "max_tokens": 10_000})
    with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
        client.messages.create(**ASKED, extra_headers={"anthropic-version": "2020-01-01"})
    client.messages.create(**ASKED, extra_headers={"anthropic-version": "2023-06-01"})


@feature
def thinking_is_refused_by_name(client: anthropic.Anthropic) -> None:
    """By a model whose chat template marks no reasoning; to turn it off changes nothing there."""
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        with pytest.raises(anthropic.BadRequestError, match="thinking"):
            client.messages.create(**ASKED, thinking=thinking)  # type: ignore[arg-type]
    client.messages.create(**ASKED, thinking={"type": "disabled"})


@feature
def leaving_a_stream_ends_it(client: anthropic.Anthropic) -> None:
    url = str(client.base_url).rstrip("/")
    with client.messages.stream(**{**ASKED, "max_tokens": 80}, extra_body=GREEDY) as stream:
        next(iter(stream))
    for _ in range(200):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        if 'jaxllm:num_requests_running{model_name="tiny"} 0.0' in lines:
            return
    raise AssertionError("the request goes on")
