"""Requests that must be refused; the server goes on serving after each."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
import pytest

from jaxllm.serve import ServeConfig, Server
from tests.serve import servers

KEY = "sk-right"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, httpx.Client]]:
    config = ServeConfig(port=0, name="tiny", max_body=20_000, body_seconds=0.5, api_keys=("other", KEY))
    with (
        servers.running(servers.opener(servers.FixedRate(0.001)), config) as (server, url),
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as client,
    ):
        yield server, client


@pytest.fixture
def client(served) -> Iterator[httpx.Client]:
    """The server answers before and after."""
    yield served[1]
    answer = served[1].post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "bc"


def refused(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error, which has OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    return error


def raw(client: httpx.Client, sent: bytes, *, close: bool = True) -> bytes:
    """Response to bytes that no client would send."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as to:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            to.sendall(sent)
            if close:
                to.shutdown(socket.SHUT_WR)
        out = b""
        with contextlib.suppress(ConnectionResetError):  # it closed without reading all
            while more := to.recv(65536):
                out += more
        return out


def head(path: str = "/v1/completions", *lines: str, method: str = "POST") -> bytes:
    first = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {KEY}", *lines]
    return ("\r\n".join(first) + "\r\n\r\n").encode()


def test_keys(client):
    for given in (
        None,
        "Bearer wrong",
        "Bearer",
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        "Bearer \u00e9",
        f"Bearer {KEY[:-1]}",
    ):
        headers = {} if given is None else {"authorization": given.encode("latin-1")}
        with httpx.Client(base_url=client.base_url, headers=headers) as stranger:
            for path in ("/v1/models", "/metrics", "/config", "/v1/chat/completions"):
                answer = stranger.get(path)
                assert refused(answer, 401)["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
            for path in ("/health", "/ready", "/version", "/openapi.json"):
                assert stranger.get(path).status_code == 200
    two = raw(client, head("/v1/models", f"authorization: Bearer {KEY}", "connection: close", method="GET"))
    assert two.startswith(b"HTTP/1.1 401")
    assert KEY not in client.get("/config").text
    assert client.get("/v1/models", headers={"authorization": "Bearer other"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "legal"),
    [
        ("/tokenize", {"prompt": "a"}, True),
        ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": "a"}]}, True),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, False),
        ("/tokenize", {}, False),
        ("/v1/embeddings", {"input": "1", "dimensions": 8}, True),
        ("/v1/embeddings", {"input": "1", "dimensions": 9}, False),
        ("/v1/completions", {"prompt": "a", "stream_options": None}, True),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, False),
        ("/v1/completions", {"prompt": "a", "stream_options": {}, "stream": True}, True),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 0}, False),
    ],
)
def test_the_published_schema_says_what_is_refused(client, path, body, legal):
    schema = client.get("/openapi.json").json()
    content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = {"model": schema["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["schema"]["enum"][0], **body}
    validator = jsonschema.Draft202012Validator({**content, "components": schema["components"]})
    assert validator.is_valid(body) == legal
    assert (client.post(path, json=body).status_code == 200) == legal


def test_paths_and_methods(client):
    refused(client.get("/v1/nothing"), 404)
    refused(client.post("/v1/models/"), 405)
    refused(client.get("/v1/models/other"), 404, "model")
    answer = client.delete("/v1/chat/completions")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert refused(client.post("/v1/completions", json={"model": "gpt", "prompt": "a"}), 404, "model")["code"] == (
        "model_not_found"
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"nothing",
        b"\xff\xfe\x00",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 6000 + b"}",
        b"[" * 10_000,
        b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
        b'{"model": "tiny", "prompt": "a", "max_tokens": true}',
        b'{"model": "tiny", "prompt": []}',
        b'{"model": "tiny", "prompt": [[]]}',
        b'{"model": "tiny", "prompt": [1, "a"]}',
        b'{"model": "tiny", "prompt": [99999999]}',
        b'{"model": "tiny", "prompt": "a", "surprise": 1}',
        b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_bodies(client, body):
    answer = client.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_fields_are_named(client):
    def param(**fields: Any) -> Any:
        answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": [], **fields})
        assert answer.status_code == 400
        return answer.json()["error"]["param"]

    hi = {"role": "user", "content": "hi"}
    assert param() == "messages"
    assert param(messages=[{"role": "nobody", "content": ""}]) == "messages[0]"
    assert param(messages=[hi, {"role": "user"}]) == "messages[1].content"
    assert param(messages=[{"role": "user", "content": [{"type": "image_url"}]}]).startswith("messages[0].content")
    assert param(messages=[hi], audio={}) == "audio"
    assert param(messages=[hi], stream_options={"include_usage": True}) == "stream_options"
    assert param(messages=[hi], max_tokens=10**6) == "messages"


def test_sizes(client):
    refused(client.post("/v1/completions", content=b"x" * 20_001, headers=JSON), 413)

    def pieces() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 1000

    refused(client.post("/v1/completions", content=pieces(), headers=JSON), 413)
    many = client.post("/v1/completions", json={"model": "tiny", "prompt": ["a"] * 65})
    refused(many, 400, "prompt")
    refused(client.post("/v1/completions", json={"model": "tiny", "prompt": "a" * 5000}), 400, "prompt")
    big = raw(client, head("/v1/models", "x: " + "y" * 40_000, method="GET"))
    assert big.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    # One that promises a body and does not send it is not waited for.
    started = time.monotonic()
    slow = raw(client, head("/v1/completions", "content-length: 10"), close=False)
    assert slow.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - started < 20


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        head("/v1/completions", "content-length: 5", "content-length: 6") + b"aaaaaa",
        head("/v1/completions", "content-length: 5", "transfer-encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
        head("/v1/completions", "transfer-encoding: chunked, identity") + b"0\r\n\r\n",
        head("/v1/completions", "transfer-encoding: xchunked") + b"0\r\n\r\n",
        head("/v1/completions", "content-length: +5") + b"aaaaa",
        head("/v1/completions", "content-length: 0x5") + b"aaaaa",
        head("/v1/completions", "content-length : 5") + b"aaaaa",
        head("/v1/completions", "transfer-encoding: chunked") + b"zz\r\nabc\r\n0\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        head("/v1/mo\x00dels", method="GET"),
        head("/v1/models", "x: a\x00b", method="GET"),
        head("/v1/models", " folded: y", "x y: z", method="GET"),
    ],
    ids=lambda sent: repr(sent.split(b"\r\n", 3)[-1][:30]),
)
def test_smuggling(client, sent):
    out = raw(client, sent)
    # At most one answer, a refusal; what comes after it is not taken for a request.
    assert out.count(b"HTTP/1.1 ") <= 1
    assert out == b"" or out[9:10] == b"4", out[:100]


def test_headers_cannot_be_injected(client):
    for given in ("a\tb", "x" * 200, "a b", "%0d%0aset-cookie:x=1", '"><script>'):
        answer = client.get("/v1/models", headers={"x-request-id": given})
        assert answer.headers["x-request-id"] != given
        assert "set-cookie" not in answer.headers
    assert client.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    out = raw(client, head("/v1/models", "x-request-id: a\r\nb: c", "connection: close", method="GET"))
    assert b"\r\nb: c" not in out


def test_templates_cannot_be_injected(client):
    def text(content: str) -> str:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        return client.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"]

    for content in ("{{ 7 * 7 }}", "{% for x in range(10**9) %}{% endfor %}", "{{ ''.__class__.__mro__ }}", "{#"):
        assert text(content) == f"<user>{content}\n<assistant>"
    for name in ("messages", "tools", "add_generation_prompt"):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: []}}
        refused(client.post("/v1/chat/completions", json=body), 400, "chat_template_kwargs")


def test_unicode(client):
    tricks = [
        "\u202e\u0000\ufeff",
        "a\u0301" * 200,
        "\U0001f469\u200d\U0001f4bb",
        "\ufffd\uffff",
        "\r\n\r\ndata: [DONE]\n\n",
    ]
    for text in tricks:
        sent = {"model": "tiny", "prompt": text, "max_tokens": 1, "echo": True}
        answer = client.post("/v1/completions", json=sent).json()
        assert answer["choices"][0]["text"] == text + "b"
        with client.stream("POST", "/v1/completions", json={**sent, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines)
        got = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
        assert got == text + "b"


def test_browsers_of_other_origins_get_nothing(client):
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.get("/v1/models", headers=asked).headers
    assert client.options("/v1/models", headers=asked).status_code in (401, 405)


def test_origins_that_are_let_in():
    config = ServeConfig(port=0, name="tiny", origins=("https://mine.example",), api_keys=(KEY,))
    with servers.running(servers.opener(servers.FixedRate()), config) as (_, url):
        asked = {"origin": "https://mine.example", "access-control-request-method": "POST"}
        assert (
            httpx.options(f"{url}/v1/models", headers=asked).headers["access-control-allow-origin"] == asked["origin"]
        )
        other = {**asked, "origin": "https://evil.example"}
        assert "access-control-allow-origin" not in httpx.options(f"{url}/v1/models", headers=other).headers


def test_configurations_that_are_refused():
    for fields in ({"port": 70000}, {"queue": -1}, {"api_keys": ("",)}, {"api_keys": ("a\nb",)}, {"write_seconds": 0}):
        with pytest.raises(ValueError, match="serve:"):
            ServeConfig(**fields)
    assert ServeConfig().host == "127.0.0.1"
    assert urlsplit("http://127.0.0.1").hostname == ServeConfig().host
