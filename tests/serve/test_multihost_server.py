"""Server over two real processes of two devices each: process 0 answers, and the other ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.parallel.distributed import DistributedError, ProcessGroup
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mesh_of_one_process_is_refused_in_every_process(rank):
    class Engine:
        runner = type("", (), {"mesh": None})

    class OneDevice:
        engine = Engine()

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(DistributedError, match="the mesh has devices of one: give --mesh"):
            serve_group(ServeConfig(port=0), OneDevice, Alone(rank))  # type: ignore[arg-type]
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)
