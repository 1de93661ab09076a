"""Memory of a test worker, a pytest plugin: compiled programs are forgotten when they have grown by ``GROWTH``.

JAX keeps every program that a test compiled, and the collector leaves cycles of large objects (engines and their
arrays) for long: a worker of the whole suite would hold 10 GB in the end, and machines have less for two.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

import jax
import pytest

GROWTH = 2**31
"""Bytes of growth since the last time, between two modules."""

_least = 0


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    global _least
    if sys.platform != "linux" or nextitem is None or nextitem.path == item.path or resident() < _least + GROWTH:
        return
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _least = resident()
