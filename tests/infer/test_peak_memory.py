"""Memory of a process that serves with streamed weights, as the system counts it, against the formula of tiers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def measured(layers: int, tier: str, window: int, folder: Path) -> tuple[int, int]:
    """(bytes of a layer, most bytes of a process of its own)."""
    command = [sys.executable, "-m", "tests.infer.peak_memory", str(layers), tier, str(window), str(folder)]
    # What is freed leaves the process: else the C library keeps buffers of such sizes, by thread.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    size, peak = done.stdout.split()
    return int(size), int(peak)


@pytest.mark.drawn(3)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say a process's peak of memory")
def test_memory_is_the_windows_and_the_hosts_layers(tmp_path):
    """Layers of 22 MiB, while tokens are served: eight more in files take no memory, where all in memory would take
    eight; a window of three more takes three; in host memory all twelve are there, in the place of the window's one."""
    size, few = measured(4, "files", 1, tmp_path)
    peaks = {(tier, window): measured(12, tier, window, tmp_path)[1] for tier, window in
             (("files", 1), ("files", 4), ("host", 1))}  # fmt: skip
    many = peaks["files", 1]
    assert abs(many - few) < 1.5 * size
    assert (peaks["files", 4] - many) / size == pytest.approx(3, abs=1.5)
    assert (peaks["host", 1] - many) / size == pytest.approx(11, abs=1.5)
