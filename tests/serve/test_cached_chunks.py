"""Cached chunks over HTTP: documents are reused at any place, by tenant; what is wrong is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve import servers

DOCUMENTS = "The kettle stands on the second shelf.\n", "Rent is due on the first Monday of a month.\n"
ASKED = {"max_tokens": 5, "temperature": 0, "logprobs": 0}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with servers.running(servers.tiny_backend) as (_, url), httpx.Client(base_url=url, timeout=60) as made:
        yield made


def completed(client: httpx.Client, prompt: str, **body: Any) -> tuple[list[float], int]:
    """Log-probabilities of a completion, and tokens of its prompt that were found."""
    answer = client.post("/v1/completions", json={"model": "tiny", **ASKED, "prompt": prompt, **body})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["logprobs"]["token_logprobs"], cached


def test_documents_are_reused_at_any_place(client: httpx.Client) -> None:
    pages = servers.tiny_engine().scheduler.pages
    one, two = DOCUMENTS
    chunks = {"cache_chunks": [one, two], "cache_chunk_share": 0, "cache_chunk_lead": 0}
    reused = sum(len(text) // 8 * 8 for text in DOCUMENTS)
    _, cached = completed(client, f"Facts:\n{one}{two}What is due?", cache_salt="one tenant", **chunks)
    assert cached == reused
    prompt = f"Other facts:\n{two}And then {one}Where is it?"
    _, again = completed(client, prompt, cache_salt="one tenant", **chunks)
    assert again == reused
    exact, _ = completed(client, prompt, cache_salt="plain")
    whole, none = completed(client, prompt, cache_salt="one tenant", cache_chunks=[one, two], cache_chunk_share=1)
    assert (whole, none) == (pytest.approx(exact, abs=1e-4), 8)  # a page before the first chunk, which any may share
    assert all(not any(pool.ref_counts) for pool in pages)


def test_tenants_share_nothing(client: httpx.Client) -> None:
    prompt, chunks = f"Facts:\n{DOCUMENTS[0]}Where?", {"cache_chunks": [DOCUMENTS[0]]}
    before = servers.tiny_engine().metrics.prompt_tokens
    counts = []
    for salt in ("first tenant", "second tenant", "second tenant"):
        completed(client, prompt, cache_salt=salt, **chunks)
        counts.append(servers.tiny_engine().metrics.prompt_tokens - before)
        before += counts[-1]
    assert counts[0] == counts[1] > counts[2]


def test_chat_completions_have_them_too(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": f"{DOCUMENTS[1]}When?"}]
    body = {"model": "tiny", "max_tokens": 3, "messages": messages, "cache_chunks": [DOCUMENTS[1]]}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 40 - len(DOCUMENTS[1]) // 4


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"cache_chunks": ["not there"]}, "cache_chunks", "chunk 0 (9 tokens) is not in the prompt"),
        ({"cache_chunk_share": 0.5}, "cache_chunk_share", "is for cache_chunks"),
        ({"cache_chunk_lead": 1}, "cache_chunk_lead", "is for cache_chunks"),
        ({"cache_chunks": ["Facts"], "beams": 2}, "cache_chunks", "it goes neither with beams"),
        ({"cache_chunks": ["Facts"], "echo": True}, "cache_chunks", "nor with prompt_logprobs"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    answer = client.post("/v1/completions", json={"model": "tiny", **ASKED, "prompt": "Facts: none.", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
