"""OpenAI's own client drives `/v1/responses` over a tiny random model; over SmolLM2 in `make proof apis`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import responses as published

from jaxllm.serve import ServeConfig
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.responses import response_requests as ours
from jaxllm.serve.responses.response_store import ResponseStore, StoredResponse
from jaxllm.serve.responses.response_translation import messages_of
from jaxllm.text import ChatTemplate
from tests.serve import servers
from tests.serve.response_features import RESPONSE_FEATURES

PUBLISHED: dict[Any, Any] = {
    ours.ResponseRequest: published.response_create_params.ResponseCreateParamsStreaming,
    ours.InputTokensRequest: published.InputTokenCountParams,
    ours.FunctionTool: published.FunctionToolParam,
    ours.FunctionCallItem: published.ResponseFunctionToolCallParam,
    ours.FunctionOutputItem: published.response_input_param.FunctionCallOutput,
    ours.ReasoningItem: published.ResponseReasoningItemParam,
    ours.InputText: published.ResponseInputTextParam,
}
OURS = {"seed", "top_k", "min_p", "ignore_eos", "priority", "cache_salt", "chat_template_kwargs"}
REASONING = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        servers.running(servers.tiny_backend, ServeConfig(port=0, name="tiny", tool_parser="hermes")) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as made,
    ):
        yield made


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("feature", RESPONSE_FEATURES)
def test_feature(client, feature):
    RESPONSE_FEATURES[feature](client)


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda m: m.__name__)
def test_every_published_field_is_honoured_or_refused_by_name(model):
    names = set(PUBLISHED[model].__annotations__)
    known = {field.alias or name for name, field in model.model_fields.items()}
    assert names <= known
    assert known - names <= (OURS if model is ours.ResponseRequest else set())


def test_reasoning_is_an_item():
    backend = servers.FixedRate(0.0, says="<think>one two</think>three", template=REASONING)
    with (
        servers.running(servers.opener(backend)) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        made = client.responses.create(model="tiny", input="hi")
        assert [item.type for item in made.output] == ["reasoning", "message"]
        assert made.output[0].content[0].text == "one two"  # type: ignore[union-attr,index]
        assert made.output_text == "three"
        assert made.usage is not None
        assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
        kinds = [event.type for event in client.responses.create(model="tiny", input="hi", stream=True)]
        assert kinds.count("response.reasoning_text.done") == kinds.count("response.output_text.done") == 1
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        count = client.responses.input_tokens.count
        plain, off = (
            count(model="tiny", input="hi", **f).input_tokens for f in ({}, {"reasoning": {"effort": "none"}})
        )
        assert off == plain + len("<think></think>")
        more = count(model="tiny", input="x", previous_response_id=made.id).input_tokens
        assert more == len("<user>hi<assistant>one twothree<user>x")


def test_an_error_in_a_stream_is_a_failed_response():
    config = ServeConfig(port=0, name="tiny", request_seconds=0.2)
    with (
        servers.running(servers.opener(servers.FixedRate(0.05)), config) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        *_, last = client.responses.create(model="tiny", input="hi", stream=True)
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert "0.2 s" in last.response.error.message


def test_items_that_follow_each_other_are_one_message():
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": "{}"}

    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        call("f"),
        call("g"),
        {"type": "function_call_output", "call_id": "call_f", "output": "d"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "e"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    found = messages_of(items)
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "assistant", "assistant"]
    assert (found[1]["reasoning_content"], found[1]["content"]) == ("b", "c")
    assert [c["id"] for c in found[1]["tool_calls"]] == ["f", "g"]
    assert (found[2]["tool_call_id"], found[4]["content"]) == ("f", "no")


def test_the_store_is_bounded_and_says_what_it_dropped():
    def stored(text: str, owner: str = "") -> StoredResponse:
        return StoredResponse({"text": text}, (), (), owner)

    size = stored("a").bytes
    store = ResponseStore(count=3, size=100 * size)
    for name in "abc":
        store.put(name, stored(name))
    store.get("a", "")
    store.put("d", stored("d"))  # b is the least recently used
    assert store.get("a", "").body == {"text": "a"}
    with pytest.raises(ApiError, match=r"dropped as the least recently used one.*at most 3 responses"):
        store.get("b", "")
    with pytest.raises(ApiError, match="never stored"):
        store.get("x", "")
    store.put("mine", stored("m", owner="1"))
    with pytest.raises(ApiError, match="another server or key"):
        store.get("mine", "")
    small = ResponseStore(count=100, size=2 * size)
    for name in "abc":
        small.put(name, stored(name))
    assert len(small) == 2
    small.put("large", stored("x" * 100))
    assert len(small) == 0
    with pytest.raises(ApiError, match="dropped"):
        small.get("large", "")


def test_keys_do_not_see_each_others_responses():
    config = ServeConfig(port=0, name="tiny", api_keys=("one", "two"))
    with servers.running(servers.opener(servers.FixedRate(0.0)), config) as (_, url):
        one, two = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        made = one.responses.create(model="tiny", input="hi", max_output_tokens=3)
        assert one.responses.retrieve(made.id).id == made.id
        with pytest.raises(openai.NotFoundError):
            two.responses.retrieve(made.id)
        one.close()
        two.close()
