"""Anthropic's own client drives `/v1/messages` over a tiny random model; over SmolLM2 in `make proof apis`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from jaxllm.serve import ServeConfig
from jaxllm.serve.messages.message_requests import (
    ClientTool,
    CountTokensRequest,
    MessageRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from jaxllm.text import ChatTemplate
from tests.serve import servers
from tests.serve.anthropic_features import MESSAGE_FEATURES

PUBLISHED: dict[Any, Any] = {
    MessageRequest: anthropic.types.message_create_params.MessageCreateParamsStreaming,
    CountTokensRequest: anthropic.types.message_count_tokens_params.MessageCountTokensParams,
    ClientTool: anthropic.types.ToolParam,
    TextBlock: anthropic.types.TextBlockParam,
    ToolUseBlock: anthropic.types.ToolUseBlockParam,
    ToolResultBlock: anthropic.types.ToolResultBlockParam,
    ThinkingBlock: anthropic.types.ThinkingBlockParam,
}
IN_HEADERS = {"user_profile_id", "workspace_id"}
"""Parameters that the client sends as headers."""
OURS = {"seed", "ignore_eos", "priority", "cache_salt", "chat_template_kwargs", "temperature", "top_k", "top_p"}
REASONING = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    with (
        servers.running(servers.tiny_backend, ServeConfig(port=0, name="tiny", tool_parser="hermes")) as (_, url),
        anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as made,
    ):
        yield made


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("feature", MESSAGE_FEATURES)
def test_feature(client, feature):
    MESSAGE_FEATURES[feature](client)


@pytest.mark.parametrize("schema", [{}, {"properties": {}}, {"type": "string"}])
def test_the_input_of_a_tool_is_an_object(schema):
    with pytest.raises(ValueError, match=r"a tool's input is an object: give .*type.*object"):
        ClientTool.model_validate({"name": "f", "input_schema": schema})
    assert ClientTool.model_validate({"name": "f", "input_schema": {"type": "object"}}).name == "f"


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda m: m.__name__)
def test_every_published_field_is_honoured_or_refused_by_name(model):
    published = set(PUBLISHED[model].__annotations__) - IN_HEADERS
    assert published <= set(model.model_fields)
    assert set(model.model_fields) - published <= (OURS if model is MessageRequest else set())


@pytest.fixture
def reasoner() -> Iterator[str]:
    """A model that reasons before it answers."""
    backend = servers.FixedRate(0.0, says="<think>one two</think>three", template=REASONING)
    with servers.running(servers.opener(backend)) as (_, url):
        yield url


def test_reasoning_is_a_thinking_block(reasoner):
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
    with anthropic.Anthropic(base_url=reasoner, api_key="-", max_retries=0) as client:
        made = client.messages.create(**body, thinking={"type": "adaptive"})
        assert [(block.type, getattr(block, "thinking", None) or block.text) for block in made.content] == [
            ("thinking", "one two"),
            ("text", "three"),
        ]
        with client.messages.stream(**body) as stream:
            kinds = [event.type for event in stream]
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
        back = {**body, "messages": [*body["messages"], made.to_param(), {"role": "user", "content": "more"}]}
        assert client.messages.create(**back).content
        counts = [
            client.messages.count_tokens(model="tiny", messages=body["messages"], thinking={"type": kind}).input_tokens  # type: ignore[arg-type]
            for kind in ("adaptive", "disabled")
        ]
        assert counts[1] == counts[0] + len("<think></think>")


def test_errors_have_anthropics_shape_wherever_they_arise():
    backend = servers.FixedRate()
    with servers.running(servers.opener(backend), ServeConfig(port=0, api_keys=("k",), max_body=2000)) as (_, url):
        there = f"{url}/v1/messages"
        body = {"model": "model", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        key = {"authorization": "Bearer k"}
        for answer, status, kind in (
            (httpx.post(there, json=body), 401, "authentication_error"),
            (httpx.post(there, json={**body, "system": "x" * 3000}, headers=key), 413, "request_too_large"),
            (httpx.post(there, content=b"{", headers=key), 400, "invalid_request_error"),
            (httpx.get(there, headers=key), 405, "invalid_request_error"),
            (httpx.get(f"{there}/x", headers=key), 404, "not_found_error"),
        ):
            assert (answer.status_code, answer.json()["type"]) == (status, "error")
            assert answer.json()["error"]["type"] == kind
        for header in (key, {"x-api-key": "k"}):
            assert httpx.post(there, json=body, headers=header).status_code == 200
