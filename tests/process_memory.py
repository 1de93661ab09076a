"""Memory of a process of its own, as the system counts it (Linux): what it has, and the most that it has had.

A test runs a module with ``numbers_of``; the module calls ``reset_peak`` where what is measured begins, and prints
numbers, ``memory(PEAK)`` among them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOW, PEAK = "VmRSS", "VmHWM"
"""Fields of /proc/self/status: bytes in memory, and the most since ``reset_peak``."""
STATUS = Path("/proc/self/status")

measurable = pytest.mark.skipif(not STATUS.exists(), reason="the system does not say a process's peak of memory")


def memory(field: str) -> int:
    """Bytes of this process, by a field of /proc/self/status."""
    return int(STATUS.read_text().split(f"{field}:")[1].split()[0]) * 1024


def reset_peak() -> None:
    """The peak of this process's memory is what it has now, without what compiling has left behind."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def numbers_of(module: str, *arguments: object, devices: int = 1) -> list[int]:
    """Numbers that a module prints in its last line, run in a process of its own.

    Args:
        module: dotted name.
        arguments: of its command line.
        devices: simulated devices.
    """
    # What is freed leaves the process: else the C library keeps buffers of such sizes, by thread.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    if devices > 1:
        flag = f"--xla_force_host_platform_device_count={devices}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.splitlines()[-1].split()]
