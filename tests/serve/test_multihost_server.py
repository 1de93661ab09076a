"""Server over two real processes of two devices each: process 0 answers, and the other ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.parallel.distributed import DistributedError, ProcessGroup, StoppedError
from jaxllm.parallel.supervisor import free_port
from jaxllm.serve import ServeConfig
from jaxllm.serve.multihost_server import serve_group
from tests import environment
from tests.infer.test_load_from_elsewhere import save

SIZES = ["--max-len", "64", "--max-sequences", "2", "--max-batched-tokens", "32"]


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """``jaxllm serve`` in two processes, under the launcher."""
    options = ["-n", "2", "--devices", "2", "--logs", str(folder / "logs")]
    variables = {
        "JAX_PLATFORMS": "cpu", "JAXLLM_CACHE": str(folder / "cache"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxllm.cli", "launch", "local", *options, "--", "serve", *words],
        env=os.environ | variables, cwd=environment.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.drawn(0.1)
def test_two_processes_serve_one_model_and_stop_together(tmp_path):
    model, port = save(tmp_path / "model", num_hidden_layers=1), free_port()
    prompts = [f"prompt {n}" for n in range(5)]
    body: dict[str, Any] = {
        "model": "model", "prompt": prompts, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1,
    }  # fmt: skip
    process = started(tmp_path, model, "--mesh", "data=2,tensor=2", "--port", str(port), *SIZES)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            end = time.monotonic() + 200
            while True:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < end
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            choices = client.post("/v1/completions", json=body).json()["choices"]
            assert len(client.get("/config").json()["backend"]["devices"]) == 4
            refused = client.post("/v1/embeddings", json={"model": "model", "input": "x"})
            assert (refused.status_code, "several processes" in refused.text) == (400, True)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (0, 128 + signal.SIGTERM), said
    assert "Traceback" not in said + (tmp_path / "logs" / "process_1.log").read_text()
    # What one device gives.
    llm = LLM(
        model,
        EngineConfig(max_sequences=4, max_len=64, buckets=(32,), max_batched_tokens=32, samplers=("full",)),
        manifest=None,
    )
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    for choice, alone in zip(choices, llm.generate(prompts, params), strict=True):
        assert choice["text"] == alone.outputs[0].text
        assert np.allclose(
            choice["logprobs"]["token_logprobs"], alone.outputs[0].logprobs, atol=1e-4
        )  # sums in float32


@pytest.mark.drawn(0.3)
def test_two_processes_need_a_mesh_over_both(tmp_path):
    process = started(tmp_path, "smollm2", "--port", "0")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert "2 processes serve one model together: give --mesh" in said


class Alone(ProcessGroup):
    """Process of a group of two that waits for nobody."""

    def __init__(self, rank: int):
        super().__init__(rank, 2)

    def agree(self, topic: str, facts: Any, timeout: float | None = None) -> None:
        """Agrees."""


@pytest.fixture
def kept_handlers():
    """Handlers of signals are after the test what they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mesh_of_one_process_is_refused_in_every_process(rank, kept_handlers):
    class Engine:
        runner = type("", (), {"mesh": None})

    class OneDevice:
        engine = Engine()

    with pytest.raises(DistributedError, match="the mesh has devices of one: give --mesh"):
        serve_group(ServeConfig(port=0), OneDevice, Alone(rank))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_the_model_is_loaded_ends_any_process(rank, number, kept_handlers):
    """Loading may be in a compilation that takes minutes and hears nothing."""
    loading, forever = threading.Event(), threading.Event()

    def load() -> LLM:
        loading.set()
        forever.wait(60)
        raise AssertionError("nobody waits for this")

    def stop() -> None:
        loading.wait(60)
        time.sleep(0.2)  # the server of process 0 has its handlers by now
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(StoppedError, match=f"stopped by {number.name} while it loaded the model") as found:
            serve_group(ServeConfig(port=0), load, Alone(rank))
    finally:
        thread.join()
        forever.set()
    assert found.value.code == 128 + number
    assert time.monotonic() - began < 30, "it waited for the model"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_processes_wait_for_each_other_ends_any(rank, kept_handlers):
    """JAX's handler of SIGTERM, which only notes it, is in force until then."""
    waiting, forever = threading.Event(), threading.Event()

    class Unmet(Alone):
        def agree(self, topic: str, facts: Any, timeout: float | None = None) -> None:
            waiting.set()
            forever.wait(60)

    def stop() -> None:
        waiting.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(StoppedError, match="stopped by SIGTERM while it waited for the other processes"):
            serve_group(ServeConfig(port=0), lambda: pytest.fail("it loads"), Unmet(rank))
    finally:
        thread.join()
        forever.set()


@pytest.mark.drawn(0.1)
@pytest.mark.parametrize("whole", [True, False])
def test_a_signal_ends_two_loading_processes(tmp_path, whole):
    """By the launcher, or to process 1 alone, which the other one hears of. Five seconds are asked, alone."""
    model = save(tmp_path / "model", num_hidden_layers=1)
    process = started(tmp_path, model, "--mesh", "data=2,tensor=2", "--port", "0", *SIZES)
    try:
        log = tmp_path / "logs" / "process_1.log"
        end = time.monotonic() + 100
        while not (log.exists() and "joining as" in log.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        # A process that is still joining is killed by the signal, and the launcher starts all of them again.
        while not all(has_handler(child_of(process.pid, rank)) for rank in "01") and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(2)
        if whole:
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(child_of(process.pid, "1"), signal.SIGTERM)
        began = time.monotonic()
        said, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < 20, said
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert "Traceback" not in said + log.read_text()


def has_handler(pid: int) -> bool:
    """Whether a process handles SIGTERM: JAX has a handler of its own once all processes have joined."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> signal.SIGTERM - 1 & 1)


def child_of(pid: int, rank: str) -> int:
    """Process of a launcher whose rank in the group is this one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(
        int(child) for child in children if f"JAXLLM_PROCESS_ID={rank}\0" in Path(f"/proc/{child}/environ").read_text()
    )
