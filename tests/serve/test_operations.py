"""Server operations: clients that disconnect, wait or do not read; overload; shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from jaxllm.infer import Engine
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.runner.runner_protocol import StepFailedError
from jaxllm.infer.scheduling.policies import Priority
from jaxllm.serve import Backend, ServeConfig, Server
from tests.infer.engines import check_books
from tests.serve import servers

HI = [{"role": "user", "content": "hi"}]


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def fake(seconds: float = 0.01, sequences: int = 4, **fields: Any) -> Iterator[tuple[servers.FixedRate, Server, str]]:
    backend = servers.FixedRate(seconds, sequences)
    config = ServeConfig(**{"port": 0, "name": "tiny", **fields})
    with servers.running(servers.opener(backend), config) as (server, url):
        yield backend, server, url


def text(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "a", "max_tokens": tokens, **fields}


def test_a_step_that_fails_is_answered_and_the_server_goes_on(monkeypatch):
    """Such as a layer that cannot be read, or a part of the KV cache: status 503 says which; the next request gets what
    it got before."""
    engine, codes = servers.tiny_engine(), iter(("weights_unavailable", "kv_cache_unavailable"))

    def fails(*_: Any) -> Any:
        raise StepFailedError("layer 3 cannot be read", code)

    with servers.running(servers.tiny_backend) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        asked = text(6, ignore_eos=True, temperature=0)
        want = client.post("/v1/completions", json=asked).json()["choices"]
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "run", fails)
            for n, code in zip((1, 2), codes, strict=True):
                answer = client.post("/v1/completions", json=asked | {"n": n, "best_of": 2})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (503, code)
                assert error["message"] == "layer 3 cannot be read"
        assert client.post("/v1/completions", json=asked).json()["choices"] == want
    check_books(engine)


def test_the_highest_priority_goes_first(monkeypatch):
    """Eight requests for four places; servers with another policy refuse priorities by name."""
    engine = servers.tiny_engine()
    monkeypatch.setattr(engine.scheduler.policy_state, "policy", Priority())
    with servers.running(servers.tiny_backend) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        engine.pause()
        ended: list[int] = []

        def ask(level: int) -> None:
            asked = text(6, ignore_eos=True, priority=level * 1000, seed=0)
            assert httpx.post(f"{url}/v1/completions", json=asked, timeout=60).status_code == 200
            ended.append(level)

        levels = [3, -1, 7, 2, 6, 0, 4, 1]
        threads = [threading.Thread(target=ask, args=(level,)) for level in levels]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.scheduler.waiting) == 8)
        ranks: list[int] = []
        engine.step = functools.partial(_noting, engine, engine.step, ranks)
        try:
            engine.resume()
            client.post("/v1/completions", json=text(1))  # wakes the engine
            for thread in threads:
                thread.join(60)
        finally:
            del engine.step
        assert sorted(ended) == sorted(levels)
        firsts = [level for level in ranks if level != 0][:4]
        assert sorted(firsts) == [3000, 4000, 6000, 7000]
    monkeypatch.setattr(engine.scheduler.policy_state, "policy", None)
    with servers.running(servers.tiny_backend) as (_, url):
        for route, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HI})):
            body = {"model": "tiny", "max_tokens": 1, **prompt}
            refused = httpx.post(f"{url}/v1/{route}", json={**body, "priority": 1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
            assert httpx.post(f"{url}/v1/{route}", json={**body, "priority": 0}, timeout=60).status_code == 200


def _noting(engine: Engine, step: Callable[[], list[OutputDelta]], ranks: list[int]) -> list[OutputDelta]:
    """A step of the engine; those that end are noted."""
    out = step()
    ranks += [piece.request.service.priority for piece in out if piece.finish is not None]
    return out


@pytest.mark.parametrize("keys", [("one", "two"), ()])
def test_policies_know_whose_a_request_is(keys):
    with fake(api_keys=keys) as (backend, _, url):
        seen = []
        for key in ("two", "one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{url}/v1/completions", json=text(1), headers=headers).status_code == 200
            seen.append(backend.services[-1].key)
    assert seen == (["1", "0", "1"] if keys else [""] * 3)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(stream):
    with fake() as (backend, server, url):
        with httpx.Client(base_url=url) as client, contextlib.suppress(httpx.ReadTimeout):
            asked = client.build_request("POST", "/v1/completions", json=text(4000, stream=stream, n=2), timeout=0.5)
            answer = client.send(asked, stream=True)
            next(answer.iter_bytes())
            answer.close()
        wait_until(lambda: backend.begun == backend.closed == 1)
        assert server.service.dispatcher is not None
        wait_until(lambda: server.service.dispatcher.open == 0)
        assert 'finished_reason="abort",model_name="tiny"} 1.0' in httpx.get(f"{url}/metrics").text


def test_pages_of_clients_that_leave_are_free_again():
    engine = servers.tiny_engine()
    with servers.running(servers.tiny_backend) as (_, url), httpx.Client(base_url=url) as client:
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=text(100, stream=True, ignore_eos=True)) as answer:
                next(answer.iter_bytes())
        wait_until(lambda: engine.scheduler.idle and not engine.busy)
    check_books(engine)
    assert all(pages.available == pages.count for pages in engine.scheduler.pages)


def test_too_many_are_told_when_to_come_back():
    with fake(sequences=1, queue=2) as (backend, _, url), httpx.Client(base_url=url) as client:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(client.stream("POST", "/v1/completions", json=text(4000, stream=True)))
            answer = client.post("/v1/completions", json=text(1))
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
            assert client.post("/v1/embeddings", json={"model": "tiny", "input": "a"}).status_code == 429
            assert client.get("/health").status_code == 200
        wait_until(lambda: backend.closed == backend.begun)
        assert client.post("/v1/completions", json=text(1)).status_code == 200
        assert client.post("/v1/completions", json=text(1, n=4)).json()["error"]["param"] == "n"
        assert 'requests_refused_total{model_name="tiny"} 2.0' in client.get("/metrics").text


def test_requests_that_take_too_long():
    with fake(request_seconds=0.3) as (backend, _, url), httpx.Client(base_url=url) as client:
        answer = client.post("/v1/completions", json=text(4000))
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        with client.stream("POST", "/v1/completions", json=text(4000, stream=True)) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        wait_until(lambda: backend.closed == 2)


def test_readers_that_do_not_read():
    """Unread data is bounded by the sockets' buffers; then the connection is cut."""
    with fake(0.0001, write_seconds=0.3) as (backend, _, url), socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        reader.connect((host, int(port)))
        body = json.dumps(text(4000, stream=True, n=60)).encode()
        reader.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: backend.closed == 1, 60)
        with contextlib.suppress(ConnectionResetError):
            while reader.recv(65536):
                pass
        assert httpx.get(f"{url}/health").status_code == 200


def test_the_server_answers_before_the_model_is_there():
    gate = asyncio.Event()

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[Backend]:
        await gate.wait()
        yield servers.FixedRate()

    server = Server(ServeConfig(port=0, name="tiny"), slow)

    async def main() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/health")).status_code == 200
            for path in ("/ready", "/v1/models", "/config"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            for stage, done, counted in (("loading", 3, 0), ("compiling", 1, 1)):
                server.service.start(stage, done, 14)
                answer = await client.get("/ready")
                assert answer.headers["retry-after"] == "5"
                found = {name: answer.json()[name] for name in ("status", "programs_done", "programs")}
                assert found == {"status": stage, "programs_done": counted, "programs": 14 * counted}
            gate.set()
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
            server.service.start("ready", 2, 14)
            assert (await client.get("/ready")).json() == {"status": "ready", "programs_done": 2, "programs": 14}
            assert (await client.post("/v1/completions", json=text(1))).status_code == 200
            server.service.draining = True
            answer = await client.get("/ready")
            assert (answer.status_code, answer.json()["status"]) == (503, "stopping")
        server.should_exit = True
        await task

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_ends_the_server():
    @contextlib.asynccontextmanager
    async def broken() -> AsyncIterator[Backend]:
        raise FileNotFoundError("no such model")
        yield

    server = Server(ServeConfig(port=0), broken)
    server.run()
    assert isinstance(server.failure, FileNotFoundError)


@pytest.mark.parametrize(("tokens", "grace", "ends"), [(60, 20, True), (4000, 1, False)])
def test_what_is_under_way_may_end_within_the_grace_time(tokens, grace, ends):
    with fake(grace_seconds=grace) as (backend, server, url), httpx.Client(base_url=url, timeout=30) as client:
        with client.stream("POST", "/v1/completions", json=text(tokens, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.handle_exit(15, None)
            started, rest = time.monotonic(), []
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                rest = [line for line in lines if line]
            assert ("data: [DONE]" in rest) == ends
            assert time.monotonic() - started < 25
        wait_until(lambda: backend.closed == 1)


def test_the_log_has_no_prompts_unless_asked(caplog):
    def lines() -> list[dict[str, Any]]:
        return [json.loads(r.getMessage()) for r in caplog.records if r.name == "jaxllm.serve"]

    asked = text(3, user="me", prompt="a secret")
    for wanted in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "jaxllm.serve"), fake(log_prompts=wanted) as (_, _, url):
            httpx.post(f"{url}/v1/completions", json=asked, headers={"x-request-id": "one"})
            wait_until(lambda: any(line["path"] == "/v1/completions" for line in lines()))
        (line,) = [line for line in lines() if line["path"] == "/v1/completions"]
        want = {"id": "one", "user": "me", "status": 200, "completion_tokens": 3, "finish": "length", "stream": None}
        assert want.items() <= line.items()
        assert ("a secret" in json.dumps(line)) == wanted
