"""Connections: time for headers, a bound on those that are open, what the log says of refusals, and API keys."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve import servers
from tests.serve.test_operations import fake, text, wait_until


def connect(url: str, sent: bytes = b"") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    made.sendall(sent)
    return made


def rest(opened: socket.socket) -> bytes:
    """What comes until the server closes."""
    out = b""
    with contextlib.suppress(ConnectionResetError):
        while more := opened.recv(65536):
            out += more
    return out


@contextlib.contextmanager
def connections(url: str, many: int, sent: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(url, sent)) for _ in range(many)]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nhost: x\r\nx: "])
def test_headers_that_do_not_come_end_the_connection(sent):
    with fake(header_seconds=0.2) as (_, server, url), connect(url, sent) as slow:
        began = time.monotonic()
        answer = rest(slow)
        assert time.monotonic() - began < 15
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"did not arrive within 0.2 s" in answer
        wait_until(lambda: not server.server_state.connections)


def test_headers_that_trickle_in_have_no_more_time():
    with fake(header_seconds=0.3) as (_, _, url), connect(url) as slow:
        slow.settimeout(0.05)
        answer = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for letter in b"GET /health HTTP/1.1\r\n" + b"x" * 400:
                with contextlib.suppress(TimeoutError):
                    slow.sendall(bytes([letter]))
                    answer += slow.recv(4096)
                if answer:
                    break
        assert answer.startswith(b"HTTP/1.1 408")


def test_answers_may_take_longer_and_connections_are_kept():
    with fake(0.05, header_seconds=0.2) as (_, _, url), httpx.Client(base_url=url) as client:
        for _ in range(2):
            assert client.post("/v1/completions", json=text(10)).status_code == 200
            time.sleep(0.3)  # idle between two requests is not a late header
        with connect(url, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as kept:
            assert kept.recv(4096).startswith(b"HTTP/1.1 200")
            kept.sendall(b"GET /hea")  # the second request of a connection is
            assert b"HTTP/1.1 408" in rest(kept)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"])
def test_slow_connections_make_room(sent):
    """Forty slow ones at a server that holds ten; requests are answered all the while, and running ones go on."""
    with contextlib.ExitStack() as stack:
        _, server, url = stack.enter_context(fake(0.02, max_connections=10))
        running = stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=text(100, stream=True)))
        events = running.iter_lines()
        next(events)
        with connections(url, 40, sent) as slow:
            for _ in range(5):
                assert httpx.post(f"{url}/v1/completions", json=text(1)).status_code == 200
            assert len(server.server_state.connections) <= 12
            closed = rest(slow[0])
            assert closed.startswith(b"HTTP/1.1 408")
            assert b"10 connections are open" in closed
        assert [line for line in events if line][-1] == "data: [DONE]"


def test_a_connection_too_many_is_refused_where_all_are_being_answered():
    with fake(max_connections=2) as (_, _, url), contextlib.ExitStack() as stack:
        kept = []
        for _ in range(2):
            client = stack.enter_context(httpx.Client(base_url=url))
            stream = stack.enter_context(client.stream("POST", "/v1/completions", json=text(4000, stream=True)))
            kept.append(stream.iter_bytes())
            next(kept[-1])
        answer = rest(stack.enter_context(connect(url)))
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nretry-after: 5\r\n" in answer
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "too_many_connections"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.getMessage()) for r in caplog.records if r.name == "jaxllm.serve"]


def test_the_log_says_why_and_not_that_probes_came(caplog):
    with caplog.at_level(logging.INFO, "jaxllm.serve"), fake(request_seconds=0.2) as (_, _, url):
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(f"{url}{path}").status_code == 200
        refused = [
            httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": 5, "surprise": 1}),
            httpx.post(f"{url}/v1/completions", json=text(10**6)),
            httpx.post(f"{url}/v1/completions", content=b"x" * 5_000_000),
            httpx.get(f"{url}/nothing"),
        ]
        with connect(url, b"\x16\x03\x01\r\n\r\n") as other:
            assert rest(other).startswith(b"HTTP/1.1 400")
        stream = httpx.post(f"{url}/v1/completions", json=text(4000, stream=True))
        assert "timeout" in stream.text
        wait_until(lambda: len(lines(caplog)) == 6)
    found = lines(caplog)
    assert not {"/health", "/ready", "/metrics"} & {line.get("path") for line in found}
    for line, answer in zip(found, refused, strict=False):
        error = answer.json()["error"]
        assert (line["status"], line["error"]) == (answer.status_code, error["message"])
        assert (line.get("param"), line.get("code")) == (error["param"], error["code"])
    assert found[0]["error"] == "there is no field 'surprise'; prompt is none of these: a string; a list."
    assert (found[4]["status"], found[4]["client"]) == (400, "127.0.0.1")
    assert (found[5]["status"], found[5]["code"]) == (200, "timeout")
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "jaxllm.serve"), fake() as (_, _, url):
        httpx.get(f"{url}/health")
        wait_until(lambda: [line["path"] for line in lines(caplog)] == ["/health"])


def test_either_header_may_carry_the_key():
    with fake(api_keys=("one", "two")) as (backend, _, url):

        def ask(**headers: str) -> int:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return httpx.post(f"{url}/v1/completions", json=text(1), headers=sent).status_code

        assert ask(x_api_key="two") == ask(authorization="Bearer one") == 200
        assert [service.key for service in backend.services if service] == ["1", "0"]
        assert ask(x_api_key="three") == ask(x_api_key="") == ask() == ask(x_api_key="Bearer one") == 401
        assert ask(x_api_key="one", authorization="Bearer wrong") == 401
        twice = httpx.get(f"{url}/v1/models", headers=[("x-api-key", "one"), ("x-api-key", "two")])
        assert twice.status_code == 401
    with servers.running(servers.opener(servers.FixedRate()), servers.ServeConfig(port=0, api_keys=("k",))) as (_, url):
        assert "x-api-key" in httpx.get(f"{url}/v1/models").json()["error"]["message"]


@pytest.mark.parametrize(("body", "message"), [
    ({"prompt": 5}, "prompt is none of these: a string; a list."),
    ({"prompt": [1, "a"]}, "prompt is none of these: a string; a list in which prompt[1] is an integer; "),
    ({"prompt": "a", "stop": 5}, "stop is none of these: a string; a list."),
    ({"prompt": "a", "n": "5"}, "n must be an integer."),
    ({"prompt": "a", "top_p": 2}, "top_p must be less than or equal to 1."),
    ({"prompt": "a", "a": 1, "b": 2, "top_p": 2}, "there are no fields 'a' and 'b'; top_p must be less than"),
    ({"prompt": "a", "guided_json": 3}, "guided_json is none of these: an object; a string."),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is none of these: a string; a list."),
    ({"messages": [{"role": "x"}]}, "messages[0].role must be one of 'system', 'developer', 'user', 'assistant', "),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content is none of these: a string; a list in which messages[0].content[0].type is one of 'text'",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "function"}},
        "tool_choice is none of these: one of 'none', 'auto' or 'required'; an object with tool_choice.function;",
    ),
    ({f"x{n}": 1 for n in range(12)} | {"prompt": "a"}, "there are no fields 'x0', 'x1', 'x2'"),
])  # fmt: skip
def test_errors_say_what_is_legal(body, message):
    with fake() as (_, _, url):
        path = "chat/completions" if "messages" in body else "completions"
        answer = httpx.post(f"{url}/v1/{path}", json={"model": "tiny", **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(message)
