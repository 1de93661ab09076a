"""Pools in several processes: what goes over a link, what must agree, and what the loss of a decode process ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cli.main import main
from jaxllm.config import ConfigError
from jaxllm.infer import Engine, Request, SamplingParams
from jaxllm.infer.pools import pool_link
from jaxllm.infer.pools.decode_listener import DecodeListener
from jaxllm.infer.pools.decode_process import DecodeProcess
from jaxllm.infer.pools.pool_facts import difference, weight_fingerprint
from jaxllm.infer.pools.pool_link import PoolLink, PoolLinkError, accept, connect, parse_address
from jaxllm.infer.pools.remote_engine import LOST, DecodeProcessLostError, DecodeSession
from tests.infer import engines, pool_processes
from tests.infer.test_pools import PAGE, asked, moved
from tests.infer.test_verification import equal, plainly_sampled

WAY, MODEL, POOLS = "tight, recompute", "llama", "prefill=tensor:1, decode=tensor:2"
CONFIG = dataclasses.replace(engines.ENGINES[WAY], pools=POOLS)


# Links


@contextlib.contextmanager
def links(first: bytes = b"one", second: bytes = b"one", silent: float = 10.0) -> Iterator[list[Any]]:
    """Both ends of a link, the accepting one first; or what either has raised."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        found: list[Any] = [None, None]

        def accepting() -> None:
            try:
                found[0] = accept(server.accept()[0], first, silent)
            except OSError as error:
                found[0] = error

        thread = threading.Thread(target=accepting)
        thread.start()
        try:
            found[1] = connect(server.getsockname(), second, silent)
        except OSError as error:
            found[1] = error
        thread.join()
        yield found
        for one in found:
            if isinstance(one, PoolLink):
                one.close()


def test_messages_arrive_as_they_were_sent():
    arrays = [
        np.arange(6, dtype=np.float64).reshape(1, 2, 3),
        np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
        np.arange(4, dtype=np.int8)[::2],
        np.empty((0, 3), np.int32),
        np.asarray(7, np.float32),
    ]
    with links() as (one, other):
        one.send("some", 1, [2, "x"], arrays=arrays)
        other.send("back")
        message = next(other.messages())
        assert (message.name, message.values) == ("some", [1, [2, "x"]])
        for got, want in zip(message.arrays, arrays, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
        assert next(one.messages()).name == "back"
        one.close()
        assert list(other.messages()) == []
        assert other.reason == "the connection was closed there"


def test_another_secret_is_noticed_at_both_ends():
    with links(b"one", b"other") as (one, other):
        assert isinstance(one, PoolLinkError)
        assert isinstance(other, PoolLinkError)
        assert "does not know the secret" in str(one)
        assert "give both the same file" in str(other)


def test_an_end_that_is_silent_counts_as_gone(monkeypatch):
    monkeypatch.setattr(PoolLink, "_say_alive", lambda self: None)
    with links(silent=0.2) as (one, _):
        assert list(one.messages()) == []
        assert one.reason == "nothing came for 0.2 s"


def test_signs_of_life_keep_a_link_open(monkeypatch):
    monkeypatch.setattr(pool_link, "BEAT", 0.05)
    with links(silent=0.5) as (one, other):
        threading.Timer(1.2, lambda: other.send("at last")).start()
        assert next(one.messages()).name == "at last"


def test_a_stranger_is_not_listened_to():
    listener = pool_processes.listening()
    listener.expect({})
    with socket.create_connection(listener.address) as stranger:
        stranger.settimeout(5)
        assert len(stranger.recv(64)) == 32
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n".ljust(64))
        assert stranger.recv(64) == bytes(32)
        assert stranger.recv(64) == b""
    assert listener.take() is None
    listener.close()


@pytest.mark.parametrize("text", ["", "host", ":1", "host:port", "host:70000"])
def test_what_is_no_address_is_named(text):
    with pytest.raises(ConfigError, match="is no address: write HOST:PORT"):
        parse_address(text)


# Facts


def test_what_differs_between_processes_is_named(float64):
    one = {"engine.max_sequences": 4, "weights": "x"}
    assert difference(one, dict(one)) is None
    said = difference(one, {**one, "engine.max_sequences": 8})
    assert said is not None
    assert said.startswith("engine.max_sequences is 4 in the prefill process and 8 in the decode process: start both")
    params = [engines.params_of(MODEL, "float64", seed) for seed in (4, 4, 5)]
    first, again, other = map(weight_fingerprint, params)
    assert first == again != other


def test_a_decode_process_of_another_model_is_refused(float64):
    process = decode_engine()
    listener = pool_processes.listening()
    listener.expect({**process._facts, "weights": "others"})
    with pytest.raises(ConfigError, match=r"weights is others in the prefill process and .* in the decode process"):
        process.serve(pool_processes.address_of(listener), pool_processes.SECRET.encode())
    with pytest.raises(ConfigError, match="has another secret: give both the same file"):
        process.serve(pool_processes.address_of(listener), b"other")
    listener.close()


# Engines


@functools.cache
def decode_engine() -> DecodeProcess:
    return pool_processes.decoding(CONFIG, MODEL)


@functools.cache
def colocated() -> Engine:
    return engines.build(engines.ENGINES[WAY], MODEL, "float64")


@contextlib.contextmanager
def apart(patience: float = 60.0) -> Iterator[tuple[Engine, DecodeListener, Callable[[], None]]]:
    """An engine whose decode engine is in a thread that talks over the network; its listener; what ends the thread."""
    listener = pool_processes.listening(patience)
    with pool_processes.in_thread(decode_engine(), listener) as thread:
        engine = pool_processes.prefilling(CONFIG, MODEL, listener)

        def lose() -> None:
            decode_engine().stop()
            thread.join(30)

        yield engine, listener, lose
        engine.close()


def submit(engine: Engine, prompt: list[int], tokens: int = 30) -> Request:
    return engine.submit(prompt, SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True))


def run_until(engine: Engine, holds: Any, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        engine.step()
        engines.check_books(engine)


@pytest.mark.drawn(1)
def test_tokens_over_the_network_are_those_of_one_engine(float64, rng):
    requests = engines.traffic(rng, CONFIG, 6)
    requests = [{**one, "cancel": None} for one in requests] + plainly_sampled(rng)
    want = engines.serve(colocated(), requests)
    with apart() as (engine, _, _):
        got = engines.serve(engine, requests)
        equal(got, want)
        assert engine.pools is not None
        assert engine.metrics.moved_bytes == engine.metrics.moved_pages * PAGE
        first = list(range(1, 12))
        assert moved(engine, asked(first)) == (3, 3 * PAGE, 0)
        assert moved(engine, asked(first)) == (1, PAGE, 2)
        with pytest.raises(ConfigError, match="start them, and this one, again with the new weights"):
            engine.swap(engines.params_of(MODEL, "float64", 5))


@pytest.mark.drawn(1)
def test_a_lost_engine_ends_its_requests_alone(float64):
    """Those in the prefill pool wait, and go on with the next process; its pages are found again."""
    prompt, other = list(range(1, 13)), [7, 7, 7, 7, 7, 7]
    want = [engines.serve(colocated(), asked(one, tokens=30))[0] for one in (prompt, other)]
    with apart() as (engine, listener, lose):
        assert engine.pools is not None
        lost = submit(engine, prompt)
        run_until(engine, lambda: len(lost.sequences[0].tokens) >= len(prompt) + 6)
        lose()
        run_until(engine, lambda: lost.sequences[0].finish)
        assert lost.sequences[0].finish == "error"
        assert isinstance(lost.failure, DecodeProcessLostError)
        assert lost.failure.code == LOST
        assert re.search(
            r"decode process at 127.0.0.1:\d+ was lost .*closed there.*send the request again", str(lost.failure)
        )
        assert engine.pools.connected == 0
        hits = engine.scheduler.hit_tokens
        waiting = [submit(engine, prompt), submit(engine, other)]
        one = submit(engine, [3, 2, 1], tokens=1)
        (prefill,) = engine.pools.prefill
        run_until(engine, lambda: len(prefill.handed_over) == 2 and one.sequences[0].finish)
        assert one.sequences[0].finish == "length", "a completion of one token needs no decode engine"
        assert engine.scheduler.hit_tokens == hits + len(prompt) - 1, (
            "the prefill pool has kept the prompt's whole pages"
        )
        assert engine.busy
        with pool_processes.in_thread(decode_engine(), listener):
            run_until(engine, lambda: all(request.sequences[0].finish for request in waiting))
        equal(waiting, want)
        assert all(pages.available == pages.count for pages in engine.pools.pages)


def test_requests_wait_for_a_process_for_some_time_alone(float64):
    with apart(patience=0.3) as (engine, listener, lose):
        lose()
        assert engine.pools is not None
        run_until(engine, lambda: engine.pools.connected == 0)  # type: ignore[union-attr]
        request, began = submit(engine, [1, 2, 3, 4, 5]), time.monotonic()
        run_until(engine, lambda: request.sequences[0].finish)
        assert time.monotonic() - began > 0.25
        assert isinstance(request.failure, DecodeProcessLostError)
        where = pool_processes.address_of(listener)
        assert f"no decode process has been connected to {where} for 0.3 s" in str(request.failure)
        assert not engine.busy


@pytest.mark.drawn(1)
def test_a_leaving_engine_ends_what_it_has(float64, caplog: pytest.LogCaptureFixture):
    """Its completions run to their end, others wait for the next process, and the place is free at once."""
    prompt, other = list(range(1, 13)), [7, 7, 7, 7, 7, 7]
    want = [engines.serve(colocated(), asked(one, tokens=30))[0] for one in (prompt, other)]
    caplog.set_level(logging.INFO, "jaxllm.infer.pools")
    with apart() as (engine, listener, _):
        assert engine.pools is not None
        first = submit(engine, prompt)
        run_until(engine, lambda: len(first.sequences[0].tokens) >= len(prompt) + 6)
        decode_engine().leave()
        (decode,) = engine.runner.decode  # type: ignore[union-attr]
        run_until(engine, lambda: decode.session.leaving)
        second = submit(engine, other)
        run_until(engine, lambda: first.sequences[0].finish)
        equal([first], want[:1])
        assert second.sequences[0].finish is None
        assert engine.pools.prefill[0].handed_over == [second.sequences[0]]
        run_until(engine, lambda: decode.session is None)
        assert engine.pools.connected == 0
        assert "has let go of the process at 127.0.0.1:" in caplog.text
        with pool_processes.in_thread(decode_engine(), listener):
            run_until(engine, lambda: second.sequences[0].finish)
        equal([second], want[1:])
        assert all(pages.available == pages.count for pages in engine.pools.pages)


@pytest.mark.parametrize("used", [False, True])
def test_an_engine_without_requests_leaves_at_once(float64, used: bool):
    """Nobody calls ``step`` then; as soon as there is nothing to do, the process is known to have nothing."""
    listener = pool_processes.listening()
    with pool_processes.in_thread(decode_engine(), listener) as thread:
        engine = pool_processes.prefilling(CONFIG, MODEL, listener)
        if used:
            request = submit(engine, [1, 2, 3], 4)
            run_until(engine, lambda: request.sequences[0].finish)
        while engine.busy:
            engine.step()
        decode_engine().leave()
        thread.join(30)
        assert not thread.is_alive()
        engine.close()


def test_a_process_that_is_stopped_while_it_connects_ends(float64, monkeypatch):
    """``stop`` comes when both connections are made and ``serve`` does not have them yet."""
    listener = pool_processes.listening()
    listener.expect(decode_engine()._facts)
    join = decode_engine()._join

    def joined(*where: Any) -> Any:
        links = join(*where)
        decode_engine().stop()
        return links

    monkeypatch.setattr(decode_engine(), "_join", joined)
    with pool_processes.in_thread(decode_engine(), listener) as thread:
        thread.join(5)
        assert not thread.is_alive()
    listener.close()


def test_a_spare_process_may_leave(float64):
    """One that waits for an engine's place goes, and the next request does not get it."""
    listener = pool_processes.listening()
    listener.expect(decode_engine()._facts)
    with pool_processes.in_thread(decode_engine(), listener) as thread:
        while not listener.waiting:
            time.sleep(0.01)
        decode_engine().leave()
        thread.join(30)
        assert not thread.is_alive()
        assert listener.take() is None
    listener.close()


def test_a_program_that_fails_is_told(float64, monkeypatch):
    """The decode process ends with the error, and the prefill process's requests say it."""
    process, failed = decode_engine(), list[BaseException]()
    listener = pool_processes.listening()

    def serving() -> None:
        try:
            process.serve(pool_processes.address_of(listener), pool_processes.SECRET.encode())
        except RuntimeError as error:
            failed.append(error)

    process._stopped.clear()
    process._leaving.clear()
    thread = threading.Thread(target=serving)
    thread.start()
    engine = pool_processes.prefilling(CONFIG, MODEL, listener)

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(process.runner, "run", broken)
    request = submit(engine, [1, 2, 3])
    run_until(engine, lambda: request.sequences[0].finish)
    thread.join(30)
    assert "RuntimeError: out of memory" in str(request.failure)
    assert [str(error) for error in failed] == ["out of memory"]
    engine.close()


def test_what_was_said_last_arrives_though_messages_are_unread():
    """A connection that is closed with unread bytes is reset; ``end_sending`` leaves that to the other end."""
    with links() as (near, far):
        for number in range(100):
            near.send("run", number, arrays=[np.zeros(10)])
        far.send("failed", "out of memory")
        far.end_sending()
        far.send("alive")  # is not sent, and closes nothing
        assert far.open
        time.sleep(0.2)
        assert [one.values for one in near.messages()] == [["out of memory"]]
        assert near.reason == "the connection was closed there"
        assert [one.values[0] for one in far.messages()] == list(range(100))


def test_what_a_process_said_last_is_told_though_its_pages_end_first():
    """The two connections end in any order; a failure that is on its way is waited for, but not for ever."""
    for said in ("RuntimeError: out of memory", ""):
        with links() as steps, links() as pages:
            session = DecodeSession(steps[0], pages[0], (1,))
            pages[1].close()
            while not session.lost:
                time.sleep(0.01)
            if said:
                threading.Timer(0.2, steps[1].send, ["failed", said]).start()
            begin = time.monotonic()
            assert (said or "the connection was closed there") in str(session.failure())
            assert time.monotonic() - begin < 5
            assert session.lost


@pytest.mark.drawn(0.5)
def test_a_killed_process_is_replaced(float64, rng):
    """Two real processes: one is killed while it decodes, and the next one serves what the first would have."""
    prompts = [rng.integers(0, engines.VOCAB, 11).tolist() for _ in range(2)]
    want = engines.serve(colocated(), asked(*prompts, tokens=40))
    listener = pool_processes.listening()
    processes = [pool_processes.started(listener, WAY, MODEL, CONFIG)]
    try:
        engine = pool_processes.prefilling(CONFIG, MODEL, listener)
        requests = [submit(engine, one, 40) for one in prompts]
        run_until(engine, lambda: all(len(request.sequences[0].tokens) > 14 for request in requests))
        processes[0].send_signal(signal.SIGKILL)
        run_until(engine, lambda: all(request.sequences[0].finish for request in requests))
        assert all(isinstance(request.failure, DecodeProcessLostError) for request in requests)
        processes.append(pool_processes.started(listener, WAY, MODEL, CONFIG))
        hits = engine.scheduler.hit_tokens
        requests = [submit(engine, one, 40) for one in prompts]
        run_until(engine, lambda: all(request.sequences[0].finish for request in requests), 120)
        equal(requests, want)
        assert engine.scheduler.hit_tokens >= hits + 2 * 8
        engine.close()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.drawn(0.5)
def test_a_process_that_is_told_to_end_ends_its_requests(float64, rng):
    """SIGTERM while it decodes: the completion is whole, and the exit status 0."""
    prompt = rng.integers(0, engines.VOCAB, 11).tolist()
    want = engines.serve(colocated(), asked(prompt, tokens=40))
    listener = pool_processes.listening()
    process = pool_processes.started(listener, WAY, MODEL, CONFIG)
    try:
        engine = pool_processes.prefilling(CONFIG, MODEL, listener)
        request = submit(engine, prompt, 40)
        run_until(engine, lambda: len(request.sequences[0].tokens) > 14)
        process.send_signal(signal.SIGTERM)
        run_until(engine, lambda: request.sequences[0].finish)
        equal([request], want)
        while engine.busy:
            engine.step()
        assert process.wait(60) == 0
        engine.close()
    finally:
        process.kill()
        process.communicate()


# Command line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--disaggregation-mode", "decode"), "say which with --pools"),
        (("--pools", POOLS, "--disaggregation-mode", "prefill"), "give --disaggregation-secret FILE"),
        (("--pools", POOLS, "--disaggregation-secret", "x"), "give --disaggregation-mode"),
        (
            ("--pools", POOLS, "--disaggregation-mode", "prefill", "--disaggregation-secret", "x",
             "--disaggregation-bootstrap", "here"),
            "'here' is no address",
        ),
        (
            ("--pools", "model=tensor:1, attention=tensor:1", "--disaggregation-mode", "prefill",
             "--disaggregation-secret", "x"),
            "only prefill and decode pools may have several",
        ),
        (
            ("--pools", "prefill=tensor:1, decode=tensor:9", "--disaggregation-mode", "decode",
             "--disaggregation-secret", "x"),
            "need 9 devices for an engine of the decode pool",
        ),
        (
            ("--pools", POOLS, "--disaggregation-mode", "decode", "--disaggregation-secret", "no-such-file"),
            "No such file or directory; the prefill process writes it",
        ),
    ],
)  # fmt: skip
def test_the_command_refuses_before_it_loads_a_model(capsys, options, words):
    assert main(["serve", "no-such-model", "--port", "0", *options]) == 2
    assert re.search(words, capsys.readouterr().err.replace("\n", " "))


def test_swaps_to_the_host_do_not_go_with_several_processes(float64):
    listener = pool_processes.listening()
    config = dataclasses.replace(CONFIG, preemption="swap")
    with pytest.raises(ConfigError, match="preemption = 'swap' does not go with a decode pool in other processes"):
        pool_processes.prefilling(config, MODEL, listener)
    listener.close()
