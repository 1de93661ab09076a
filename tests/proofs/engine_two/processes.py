"""An engine over four real processes of two devices each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from tests import environment
from tests.proofs.harness import proof

PROCESSES, DEVICES = 4, 8
LIMIT = 300.0
"""Seconds for anything: two cores start four processes."""
CASES = [
    ("tensor=8", "wide", "roomy"),
    ("data=2,tensor=4", "llama", "tight, swap"),
    ("data=4,tensor=2", "qwen3", "tight, recompute"),
    ("expert=4,tensor=2", "mixtral", "tight, recompute"),
]


@proof("engine_two", cases=CASES, sample=1, parallel=False, bound=1e-10)
def four_processes(case: tuple[str, str, str]) -> float:
    """Process 0 schedules for all: log-probabilities are the training forward's on one device, nothing is compiled."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    common = os.environ | {
        "JAX_ENABLE_X64": "1",
        "SERVED_DEVICES": str(DEVICES // PROCESSES),
        "JAXLLM_COORDINATOR": address,
        "JAXLLM_PROCESSES": str(PROCESSES),
    }
    command = [sys.executable, "-m", "tests.infer.multihost_serve", *case, str(environment.seed())]
    running = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=environment.ROOT,
            env=common | {"JAXLLM_PROCESS_ID": str(rank)},
        )
        for rank in range(PROCESSES)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=LIMIT) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * PROCESSES, [err[-3000:] for _, err in said]
    found = json.loads(said[0][0].splitlines()[-1])  # gloo speaks first
    assert found["tokens"] > 50
    assert found["compiled"] == 0
    return found["error"]
