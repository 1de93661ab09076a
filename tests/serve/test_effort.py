"""Effort policies over HTTP: model names, what is returned and counted, and what is refused."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from jaxllm.cli.commands.serve import read_policies
from jaxllm.cli.errors import UsageError
from jaxllm.effort import AdaptiveBestOfK, ArithmeticVerifier, BestOfN, Revision, SuccessProbe, save_policy
from jaxllm.serve import ServeConfig
from tests.serve import servers

EFFORTS = (
    ("sharp", BestOfN(3, ArithmeticVerifier())),
    ("again", Revision(2, 3, ArithmeticVerifier(), accept=1.0)),
    ("probed", AdaptiveBestOfK(SuccessProbe((0.0,) * 8, 0.0), 0.2, ArithmeticVerifier())),
    ("wide", BestOfN(500)),
    ("foreign", BestOfN(2, model="adapter")),
)


@pytest.fixture(scope="module")
def served():
    """(the stub engine, a client)."""
    backend = servers.FixedRate(0.001, 8, says="46")
    config = ServeConfig(port=0, name="tiny", efforts=EFFORTS)
    with (
        servers.running(servers.opener(backend), config) as (_, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield backend, client


def ask(client: httpx.Client, model: str, prompt: str = "12+34=", **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 5, **fields})


@pytest.mark.parametrize(
    ("model", "prompt", "requests", "tokens"),
    [
        ("sharp", "12+34=", 1, 6),
        ("again", "12+34=", 1, 4),  # accepted at once
        ("again", "12+35=", 7, 16),  # two chains, never
        ("probed", "12+34=", 1, 4),  # gains of 1/2 and 1/4
    ],
)
def test_a_policy_is_a_model_whose_usage_counts_all_tokens(served, model, prompt, requests, tokens):
    backend, client = served
    begun = backend.begun
    body = ask(client, model, prompt).json()
    assert (body["model"], body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (model, "46", "stop")
    assert body["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
    assert backend.begun - begun == requests


def test_policies_are_listed_and_streamed_and_chatted_with(served):
    _, client = served
    cards = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", *(name for name, _ in EFFORTS)]
    assert client.get("/v1/models/sharp").json()["parent"] == "tiny"
    with client.stream("POST", "/v1/completions", json={"model": "sharp", "prompt": "12+34=", "stream": True}) as found:
        lines = [line for line in found.iter_lines() if line]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == "46"
    chat = client.post("/v1/chat/completions", json={"model": "sharp", "messages": [{"role": "user", "content": "?"}]})
    assert chat.json()["choices"][0]["message"]["content"] == "46"
    several = ask(client, "sharp", prompt=["12+34=", "1+1="]).json()  # type: ignore[arg-type]
    assert [one["text"] for one in several["choices"]] == ["46", "46"]
    assert several["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        ("sharp", {"n": 2}, "n = 2 does not go with an effort policy"),
        ("sharp", {"echo": True}, "echo = True does not go"),
        ("wide", {}, "the policy runs 500 completions at a time"),
        ("foreign", {}, "samples from the adapter 'adapter', and this server has none"),
        ("blunt", {}, "effort policies: sharp, again"),
    ],
)
def test_what_does_not_go_is_refused_by_name(served, model, fields, said):
    response = ask(served[1], model, **fields)
    assert response.status_code in (400, 404)
    assert said in response.json()["error"]["message"]


def test_embeddings_are_of_the_model_alone(served):
    response = served[1].post("/v1/embeddings", json={"model": "sharp", "input": "a"})
    assert response.status_code == 404
    assert "'sharp' is an effort policy" in response.json()["error"]["message"]


def test_a_client_that_leaves_ends_all_its_requests():
    backend = servers.FixedRate(0.01, 8)
    config = ServeConfig(port=0, name="tiny", efforts=(("sharp", BestOfN(3, ArithmeticVerifier(), wave=1)),))
    with servers.running(servers.opener(backend), config) as (_, url):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"model": "sharp", "prompt": "?", "max_tokens": 4000}, timeout=0.3)
        end = time.monotonic() + 20
        while backend.closed < 1:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert backend.begun == backend.closed == 1


def test_policies_of_the_command_line_are_read(tmp_path):
    save_policy(BestOfN(3), tmp_path / "policy.json")
    assert read_policies((f"a={tmp_path}/policy.json",)) == (("a", BestOfN(3)),)
    for wrong, said in ((f"{tmp_path}/policy.json", "give NAME=FILE"), (f"a={tmp_path}/none.json", "cannot be read")):
        with pytest.raises(UsageError, match=said):
            read_policies((wrong,))
    with pytest.raises(ValueError, match="are not unique"):
        ServeConfig(name="a", efforts=(("a", BestOfN(3)),))
