"""Start of the server: the port before the model, signals while it loads, and what the terminal says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jaxllm.cli.commands.serve import log_to_terminal, serve
from jaxllm.cli.errors import guarded
from jaxllm.infer.start_progress import StartCancelled, StartProgress, terminal_line
from jaxllm.serve import Backend, ServeConfig, Server, backend_factory
from jaxllm.serve.listening import ListenError, listen, url_of
from jaxllm.serve.server import LOADING
from tests.serve import servers
from tests.serve.started import started


def test_a_port_in_use_is_an_error_before_anything_is_loaded(capsys):
    with contextlib.closing(listen("127.0.0.1", 0)[0]) as taken:
        port = taken.getsockname()[1]
        assert guarded(lambda: serve(["no/such/model", "--port", str(port)])) == 2
    assert capsys.readouterr().err == (
        f"error: port {port} of 127.0.0.1 is in use by another process: give another with --port, or 0 for any free "
        "one.\n"
    )


@pytest.mark.parametrize(
    ("host", "words"),
    [("no.such.host.invalid", "there is no such address"), ("203.0.113.7", "is no address of this computer")],
)
def test_an_address_that_is_not_ours_is_named(host, words):
    with pytest.raises(ListenError, match=words):
        listen(host, 0)


def test_sockets_of_a_host_have_one_port_and_clients_may_wait():
    sockets = listen("localhost", 0)
    assert len({one.getsockname()[1] for one in sockets}) == 1
    for one in sockets:
        with socket.create_connection(one.getsockname()[:2], timeout=5):
            assert url_of(one.getsockname()).endswith(f":{one.getsockname()[1]}")
        one.close()


class Slow:
    """A load that nothing interrupts: it ends when it is let, or where it reports its progress."""

    def __init__(self, progress: StartProgress):
        self.progress, self.gate, self.ended = progress, threading.Event(), list[BaseException]()

    def __call__(self) -> Any:
        self.progress("loading", 1, 2)
        self.gate.wait(60)
        try:
            self.progress("loading", 2, 2)
        except StartCancelled as error:
            self.ended.append(error)
            raise
        raise AssertionError("it was not cancelled")


def test_a_signal_while_the_model_is_loaded_ends_the_server_and_frees_its_port():
    progress = StartProgress()
    load = Slow(progress)
    server = Server(ServeConfig(port=0), backend_factory(load), start=progress)
    sockets = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    while not (server.started and progress.done):
        time.sleep(0.01)
    address = sockets[0].getsockname()
    assert httpx.get(f"{url_of(address)}/ready").json()["status"] == "loading"
    server.handle_exit(signal.SIGINT, None)
    thread.join(5)
    assert not thread.is_alive(), "the server waits for nothing"
    assert server.failure is None
    with contextlib.closing(listen(*address)[0]):
        pass
    load.gate.set()
    for one in threading.enumerate():
        if one.name == LOADING:
            one.join(20)
    assert isinstance(load.ended[0], StartCancelled), "the load ends at its next tensor"


def test_a_second_signal_goes_to_whoever_handled_it_before():
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        server = Server(ServeConfig(port=0), servers.opener(servers.FixedRate()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signal, "raise_signal", lambda number: seen.append(-number))
            with server.capture_signals():
                server.handle_exit(signal.SIGINT, None)
                assert (server.should_exit, seen) == (True, [])
                server.handle_exit(signal.SIGINT, None)
                assert seen == [-signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_url_is_told_once_requests_are_answered():
    told: list[tuple[str, bool]] = []
    gate = asyncio.Event()

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[Backend]:
        await gate.wait()
        yield servers.FixedRate()

    server = Server(
        ServeConfig(port=0), slow, on_ready=lambda url: told.append((url, server.service.dispatcher is not None))
    )

    async def main() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        assert told == []
        gate.set()
        while not told and server.failure is None:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        assert told == [(f"http://127.0.0.1:{port}", True)]
        server.should_exit = True
        await task

    asyncio.run(main())


@pytest.fixture
def no_handlers() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("jaxllm")
    loggers = [root, *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    before, level = [list(one.handlers) for one in loggers], ours.level
    for one in loggers:
        one.handlers[:] = []  # those of other tests, whose streams are closed by now
    yield
    for one, handlers in zip(loggers, before, strict=True):
        one.handlers[:] = handlers
    ours.setLevel(level)
    logging.captureWarnings(False)


def test_every_line_of_the_log_is_json(no_handlers, capsys):
    log_to_terminal()
    logging.getLogger("jaxllm.serve").info(json.dumps({"path": "/ready"}))
    logging.getLogger("jax._src.compilation_cache").info("Resetting cache at %s.", "<empty>")
    logging.getLogger("uvicorn.error").info("Started server process [1]")
    logging.getLogger("uvicorn.error").error("in two\nlines")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [{"path": "/ready"}, {"level": "error", "logger": "uvicorn.error", "message": "in two\nlines"}]


def test_the_progress_line_is_for_starts_that_take_long(monkeypatch, capsys):
    now = SimpleNamespace(monotonic=lambda: now.seconds, seconds=0.0)
    monkeypatch.setattr("jaxllm.infer.start_progress.time", now)
    show = terminal_line("smollm2")
    show("loading", 3, 272)
    assert capsys.readouterr().err == ""
    now.seconds = 2.5
    show("loading", 40, 272)
    show("compiling", 1, 15)
    show("ready", 3, 15)
    show("ready", 4, 15)
    start = "\r\x1b[K"
    assert capsys.readouterr().err == (
        f"{start}loading smollm2: 40 of 272, 2 s{start}compiling smollm2: 1 of 15 programs, 2 s{start}"
    )


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_process_loads_ends_it(number):
    """The whole command, at some moment of its start."""
    with started("smollm2", "--port", "0") as one:
        time.sleep(2.0)
        one.end(number)
        assert one.process.returncode in (130, -number)
        assert one.children == []
