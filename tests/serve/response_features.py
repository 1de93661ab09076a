"""OpenAI's own client on the Responses API, feature by feature; for any model behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import openai
import pytest

RESPONSE_FEATURES: dict[str, Callable[[openai.OpenAI], None]] = {}
ASKED: dict[str, Any] = {"model": "tiny", "input": "Say hello.", "max_output_tokens": 12}
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "no"]}},
    "required": ["word"],
    "additionalProperties": False,
}
NUMBERS = {**SCHEMA, "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TOOLS: Any = [
    {"type": "function", "name": "say", "description": "Say a word.", "parameters": SCHEMA, "strict": None},
    {"type": "function", "name": "check", "parameters": NUMBERS, "strict": None},
]
CALLING: dict[str, Any] = {**ASKED, "tools": TOOLS, "max_output_tokens": 100, "extra_body": {"seed": 4}}


def feature(check: Callable[[openai.OpenAI], None]) -> Callable[[openai.OpenAI], None]:
    RESPONSE_FEATURES[check.__name__] = check
    return check


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[Any, list[Any]]:
    """(last event's response, events), whose numbers and nesting are checked."""
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    opened: list[int] = []
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert event.output_index == len(opened)
            opened.append(event.output_index)
        assert event.output_index == opened[-1], "an event of an item that has ended"
    return events[-1].response, events


@feature
def a_response_has_the_published_form(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED, **GREEDY, metadata={"a": "b"}, instructions="Be brief.")
    assert made.id.startswith("resp_")
    assert (made.object, made.model, made.status) == ("response", "tiny", "incomplete")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert (made.metadata, made.instructions) == ({"a": "b"}, "Be brief.")
    assert made.usage is not None
    assert made.usage.output_tokens == 12
    assert made.usage.total_tokens == made.usage.input_tokens + 12
    (item,) = made.output
    assert (item.type, item.status) == ("message", "incomplete")


@feature
def a_streamed_response_is_a_whole_one(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, **GREEDY)
    made, events = streamed(client, **ASKED, **GREEDY)
    assert made.output_text == whole.output_text != ""
    assert made.usage.output_tokens == 12
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds[2:] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


@feature
def the_clients_stream_helper_follows(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    asked: dict[str, Any] = {**ASKED, "max_output_tokens": 60, "text": form}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        made = stream.get_final_response()
    jsonschema.validate(json.loads(made.output_text), SCHEMA)
    assert kinds[-1] == "response.completed"


@feature
def input_is_text_or_messages(client: openai.OpenAI) -> None:
    inputs: list[Any] = [
        "Say hello.",
        [{"role": "user", "content": "Say hello."}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}],
    ]
    texts = {client.responses.create(**{**ASKED, "input": given}, **GREEDY).output_text for given in inputs}
    assert len(texts) == 1
    counts = [client.responses.input_tokens.count(model="tiny", input=given).input_tokens for given in inputs]
    assert len(set(counts)) == 1


@feature
def instructions_are_a_system_message(client: openai.OpenAI) -> None:
    apart = client.responses.create(**ASKED, **GREEDY, instructions="Be brief.")
    told: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    within = client.responses.create(**{**ASKED, "input": told}, **GREEDY)
    assert apart.output_text == within.output_text
    assert apart.usage is not None
    assert within.usage is not None
    assert apart.usage.input_tokens == within.usage.input_tokens


@feature
def a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, temperature=0)
    then = client.responses.create(**{**ASKED, "input": "More."}, temperature=0, previous_response_id=first.id)
    told: Any = [
        {"role": "user", "content": "Say hello."},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": "More."},
    ]
    whole = client.responses.create(**{**ASKED, "input": told}, temperature=0)
    assert then.output_text == whole.output_text
    assert then.usage is not None
    assert whole.usage is not None
    assert then.usage.input_tokens == whole.usage.input_tokens > 0
    assert then.previous_response_id == first.id


@feature
def responses_are_retrieved_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED, **GREEDY)
    again = client.responses.retrieve(made.id)
    assert again.to_dict() == made.to_dict()
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(made.id)
        assert caught.value.code == "response_not_found"


@feature
def input_items_are_listed(client: openai.OpenAI) -> None:
    told: Any = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    made = client.responses.create(**{**ASKED, "input": told})
    items = list(client.responses.input_items.list(made.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == ["a", "b", "c"]  # type: ignore[union-attr,index]
    newest = client.responses.input_items.list(made.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (items[-1].id, True)


@feature
def what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED, store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError, match="store = false"):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(**ASKED, previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"


@feature
def a_function_that_must_be_called(client: openai.OpenAI) -> None:
    for tool in TOOLS:
        made = client.responses.create(**CALLING, tool_choice={"type": "function", "name": tool["name"]})
        (call,) = made.output
        assert call.type == "function_call"
        assert (call.name, call.status) == (tool["name"], "completed")
        assert call.call_id.startswith("call_")
        jsonschema.validate(json.loads(call.arguments), tool["parameters"])
    only: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "check"}]}
    (call,) = client.responses.create(**CALLING, tool_choice=only, parallel_tool_calls=False).output
    assert call.type == "function_call"
    assert call.name == "check"


@feature
def a_streamed_call_is_a_whole_one(client: openai.OpenAI) -> None:
    asked = {**CALLING, "tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = client.responses.create(**asked).output
    made, events = streamed(client, **asked)
    assert made.output[0].name == whole.name  # type: ignore[union-attr]
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(parts) == done.arguments == whole.arguments  # type: ignore[union-attr]


@feature
def what_functions_gave_is_read(client: openai.OpenAI) -> None:
    asked = {**CALLING, "tool_choice": {"type": "function", "name": "say"}}
    first = client.responses.create(**asked)
    call: Any = first.output[0]
    counts = []
    for output in ("done", [{"type": "input_text", "text": "done"}], "it has failed and will never work"):
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": output}]
        fields: Any = {"model": "tiny", "input": result, "previous_response_id": first.id, "tools": TOOLS}
        counts.append(client.responses.input_tokens.count(**fields).input_tokens)
        assert client.responses.create(**fields, max_output_tokens=5).output
    assert counts[0] == counts[1] < counts[2]


@feature
def a_schema_forms_the_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "max_output_tokens": 60}
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}
    made = client.responses.create(**asked, text=form)
    jsonschema.validate(json.loads(made.output_text), SCHEMA)
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.type == "json_schema"


@feature
def log_probabilities(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    made = client.responses.create(**ASKED, **GREEDY, include=include, top_logprobs=3)
    part: Any = made.output[0].content[0]  # type: ignore[union-attr,index]
    assert len(part.logprobs) == 12
    assert all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in part.logprobs)
    _, events = streamed(client, **ASKED, **GREEDY, include=include)
    found = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert found == [one.token for one in part.logprobs]
    assert client.responses.create(**ASKED, **GREEDY).output[0].content[0].logprobs == []  # type: ignore[union-attr,index]


@feature
def truncation_leaves_out_the_oldest_turns(client: openai.OpenAI) -> None:
    word = "A long turn of the conversation, which goes on and on. " * 5
    told: Any = [{"role": "user", "content": f"{number}. {word}"} for number in range(200)]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ASKED, "input": told})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    made = client.responses.create(**{**ASKED, "input": told}, **GREEDY, truncation="auto")
    assert made.truncation == "auto"
    last = client.responses.create(**{**ASKED, "input": told[-1:]}, **GREEDY)
    assert made.usage is not None
    assert last.usage is not None
    assert made.usage.input_tokens >= last.usage.input_tokens > 0


@feature
def the_prefix_cache_is_counted(client: openai.OpenAI) -> None:
    asked = {**ASKED, "input": "Another long beginning of a prompt, again and again. " * 4}
    client.responses.create(**asked)
    usage = client.responses.create(**asked).usage
    assert usage is not None
    assert usage.input_tokens > usage.input_tokens_details.cached_tokens > usage.input_tokens // 2


@feature
def seeds_repeat_a_response(client: openai.OpenAI) -> None:
    texts = [
        client.responses.create(**ASKED, temperature=1, extra_body={"seed": seed, "ignore_eos": True}).output_text
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


@feature
def refusals_are_the_clients_own_errors(client: openai.OpenAI) -> None:
    fields: Any
    for fields, param in (
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{**ASKED, **fields})
        assert (caught.value.param or "").startswith(param.split("[")[0])
    client.responses.create(**ASKED, reasoning={"effort": "high"}, service_tier="auto", background=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**ASKED, "model": "gpt"})


@feature
def leaving_a_stream_ends_it(client: openai.OpenAI) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    stream = client.responses.create(**{**ASKED, "max_output_tokens": 80}, **GREEDY, stream=True)
    next(iter(stream))
    stream.close()
    for _ in range(200):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        if 'jaxllm:num_requests_running{model_name="tiny"} 0.0' in lines:
            return
    raise AssertionError("the request goes on")
