"""OpenAI's own client drives the server over a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serve import servers

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        servers.running(servers.tiny_backend) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as made,
    ):
        yield made


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat(client):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content


def test_completions(client):
    asked = {"model": "tiny", "prompt": "once", "max_tokens": 9, "temperature": 0}
    whole = client.completions.create(**asked)
    streamed = "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))
    assert streamed == whole.choices[0].text
