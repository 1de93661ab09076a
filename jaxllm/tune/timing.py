"""Timing of a jitted function on the device at hand, and the power that it draws where the device reports it."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS = 3
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
"""Energy counter of a CPU package in microjoules; kernels since 5.10 let only the superuser read it."""


def seconds(function: Callable[..., Any], arguments: Sequence[Any], repeats: int, carried: bool = False) -> float:
    """Seconds of one call: the fastest of three rounds of ``repeats`` calls that are queued on the device.

    Args:
        function: jitted function; it is called once before it is timed.
        arguments: its arguments.
        repeats: calls of a round.
        carried: the second result replaces the last argument, which is donated.
    """
    arguments = [*arguments[:-1], jax.tree.map(jnp.copy, arguments[-1])] if carried else list(arguments)

    def call() -> Any:
        result = function(*arguments)
        if carried:
            result, arguments[-1] = result
        return result

    jax.block_until_ready(call())
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        result = None
        for _ in range(repeats):
            result = call()
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - started) / repeats)
    return min(rounds)


def difference(got: Iterable[Any], want: Iterable[Any]) -> float:
    """Largest relative error ``||x - y|| / ||y||`` of the arrays."""
    pairs = ((np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(got, want, strict=True))
    return max(float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)) for x, y in pairs)


def power_source() -> str | None:
    """Source of the default device's power, "nvidia-smi" or "rapl"; None where nothing reports it, as on TPUs."""
    platform = jax.default_backend()
    if platform == "gpu" and shutil.which("nvidia-smi"):
        return "nvidia-smi"
    if platform == "cpu":
        try:
            RAPL.read_text()
        except OSError:
            return None
        return "rapl"
    return None


def watts(run: Callable[[], Any], source: str, duration: float = 0.5) -> float:
    """Mean power while a function is called again and again.

    Args:
        run: the function; it waits for its result.
        source: as ``power_source`` says.
        duration: seconds to call it for.
    """
    samples: list[float] = []
    done = threading.Event()

    def sample() -> None:
        query = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        while not done.wait(0.05):
            samples.append(float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]))

    thread = threading.Thread(target=sample, daemon=True)
    if source == "nvidia-smi":
        thread.start()
    before, started = 0 if source != "rapl" else int(RAPL.read_text()), time.perf_counter()
    while time.perf_counter() - started < duration:
        run()
    took = time.perf_counter() - started
    if source == "rapl":
        return (int(RAPL.read_text()) - before) / 1e6 / took
    done.set()
    thread.join()
    return float(np.mean(samples))
