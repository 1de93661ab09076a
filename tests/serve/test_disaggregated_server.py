"""Server whose decode pool is a process of its own: started by its command line, killed, and started again."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.parallel.supervisor import free_port
from tests.infer.test_load_from_elsewhere import save
from tests.serve.started import ServeProcess
from tests.serve.test_streamed_server import events

SIZES = ["--max-len", "256", "--max-sequences", "2", "--max-batched-tokens", "32"]
POOLS = ["--pools", "prefill=tensor:1, decode=tensor:1"]
ASKED: dict[str, Any] = {"model": "model", "prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def pool_process(folder: Path, mode: str, bootstrap: str, *words: str) -> ServeProcess:
    secret = str(folder / "secret")
    options = [
        "--disaggregation-mode",
        mode,
        "--disaggregation-bootstrap",
        bootstrap,
        "--disaggregation-secret",
        secret,
    ]
    return ServeProcess(str(folder / "model"), *POOLS, *SIZES, *options, *words, cache=folder / "cache")


@pytest.mark.drawn(0.1)
def test_a_killed_decode_process_ends_its_requests_and_another_serves(tmp_path):
    save(tmp_path / "model", num_hidden_layers=1)
    port, bootstrap = free_port(), f"127.0.0.1:{free_port()}"
    started = [pool_process(tmp_path, "prefill", bootstrap, "--port", str(port))]
    try:
        started[0].wait_for(lambda line: f"decode processes connect to {bootstrap}" in line)
        assert os.stat(tmp_path / "secret").st_mode & 0o077 == 0, "nobody else reads it"
        started.append(pool_process(tmp_path, "decode", bootstrap))
        started[1].wait_for(lambda line: f"ready: a decode engine, for the prefill process at {bootstrap}" in line)
        started[0].wait_for(lambda line: line.startswith("ready: "))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            want = client.post("/v1/completions", json=ASKED).json()["choices"]
            body = ASKED | {"max_tokens": 240, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                said = []
                for text in answer.iter_text():
                    if not said:
                        started[1].process.send_signal(signal.SIGKILL)
                    said.append(text)
            error = events("".join(said))[-1]["error"]
            assert error["code"] == "decode_pool_lost"
            assert "was lost while it generated this completion" in error["message"]
            assert client.get("/health").status_code == 200
            assert connected(client) == 0
            started.append(pool_process(tmp_path, "decode", bootstrap))
            assert client.post("/v1/completions", json=ASKED).json()["choices"] == want
            assert connected(client) == 1
        started[0].end(signal.SIGTERM, seconds=30)
        ended = started[2].wait_for(lambda line: "the connection to the prefill process" in line)
        assert ended.endswith("the connection was closed there")
        assert started[2].process.poll() is None, "it waits for the next prefill process"
    finally:
        for process in started:
            process.kill()
    assert not any("Traceback" in line for process in started for line in process.lines)


def connected(client: httpx.Client) -> int:
    """Decode engines that have a process, as ``/metrics`` says."""
    (found,) = re.findall(r"^jaxllm:decode_engines_connected\S* (\S+)$", client.get("/metrics").text, re.M)
    return int(float(found))
