"""A server that starts is gone within five seconds of a signal, at any moment; a port in use is noticed at once."""

from __future__ import annotations

import contextlib
import itertools
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxllm.serve.listening import listen
from tests.proofs.harness import proof
from tests.serve.started import started

ALSO_COVERS = ("jaxllm/cli", "jaxllm/serve", "jaxllm/infer")
SECONDS = 5.0
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
MOMENTS = tuple(itertools.product(SIGNALS, range(20)))
LONGEST = 30.0
"""Processor seconds of a cold start, about: signals come at moments of all of it."""
ORDINARY = ("{", "ready: ", "weights: ", "packed_matmul: ")
"""Beginnings of lines that a start writes."""


def _processor_seconds(pid: int) -> float:
    """Processor seconds of a process so far, in hundredths; a busy computer only takes longer to get there."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@proof("start", cases=MOMENTS, sample=1, bound={"seconds": SECONDS})
def a_signal_ends_the_start(case: tuple[str, int]) -> dict[str, float]:
    """Twenty moments of a cold start, drawn by its processor time, of each signal: the process is gone, its port is
    free, no process of its session is left, and it says nothing but JSON, how its weights are packed, its ready line
    and that it was interrupted.
    """
    name, number = case
    moment = float(np.random.default_rng([number, *name.encode()]).uniform(0.1, LONGEST))
    with contextlib.closing(listen("127.0.0.1", 0)[0]) as one:
        port = one.getsockname()[1]
    with started("smollm2", "--port", str(port)) as server:
        while _processor_seconds(server.process.pid) < moment and not any("ready:" in x for x in server.lines):
            assert server.process.poll() is None, server.lines
            time.sleep(0.02)
        seconds = server.end(SIGNALS[name], seconds=60)
        assert server.process.returncode in (130, -SIGNALS[name]), server.lines
        assert server.children == []
        odd = [line for line in server.lines if line and line != "interrupted" and not line.startswith(ORDINARY)]
        # Before the command runs, Python itself ends with its traceback.
        assert odd == [] or (moment < 2 and "KeyboardInterrupt" in odd[-1]), odd
        with contextlib.closing(listen("127.0.0.1", port)[0]):
            pass
    return {"seconds": seconds}


@proof("start", cases=("Ctrl-C twice", "SIGTERM after Ctrl-C"), sample=1, bound={"seconds": SECONDS})
def a_second_signal_ends_it_at_once(case: str) -> dict[str, float]:
    """A server that drains a long stream ends at the second signal."""
    import httpx

    second = signal.SIGINT if case == "Ctrl-C twice" else signal.SIGTERM
    with started("smollm2", "--port", "0") as server:
        url = server.wait_for(lambda line: line.startswith("ready: ")).split()[1]
        body = {"model": "smollm2", "prompt": "The sea", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            stream = answer.iter_bytes()  # which would close the connection if it were collected
            next(stream)
            server.process.send_signal(signal.SIGINT)
            time.sleep(1.0)
            assert server.process.poll() is None, ("it lets the stream end", server.lines)
            seconds = server.end(second, seconds=60)
        assert server.process.returncode in (130, -signal.SIGTERM)
        assert server.children == []
    return {"seconds": seconds}


@proof("start", count=10, sample=1, bound={"processor seconds": 2.0})
def a_port_in_use_is_noticed_at_once(seed: int) -> dict[str, float]:
    """An ``error:`` sentence and status 2 within two seconds, of the process's own time."""
    import resource

    def used() -> float:
        found = resource.getrusage(resource.RUSAGE_CHILDREN)
        return found.ru_utime + found.ru_stime

    with contextlib.closing(listen("127.0.0.1", 0)[0]) as taken, tempfile.TemporaryDirectory() as cache:
        before, port = used(), taken.getsockname()[1]
        with started("smollm2", "--port", str(port), cache=Path(cache)) as server:
            server.process.wait(120)
            seconds = used() - before
            server._reader.join(5)
            assert server.process.returncode == 2
            (line,) = server.lines
            assert line.startswith(f"error: port {port} of 127.0.0.1 is in use"), line
            assert list(Path(cache).iterdir()) == []
    return {"processor seconds": seconds}
