"""Memory of a test worker, a pytest plugin: between two modules, compiled programs are forgotten once they are many.

JAX keeps every program that a test compiled, and the collector leaves cycles of large objects (engines and their
arrays) for long: a worker of the whole suite would hold 10 GB in the end, and machines have less for two. A program of
the CPU backend also takes some 15 mappings of memory, of which Linux gives a process 65,530: with none left, XLA's
compiler ends in a segmentation fault.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import sys

import jax
import pytest

GROWTH = 2**31
"""Bytes of growth since the last time."""

MAPPINGS = 1 / 2
"""Share of the mappings that a process may have: the module that comes next has the rest."""

LIMIT = pathlib.Path("/proc/sys/vm/max_map_count")

_least = 0


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mappings() -> int:
    """Mappings of this process's memory."""
    with open("/proc/self/maps", "rb") as file:
        return sum(1 for _ in file)


def crowded() -> bool:
    """Whether this process holds so much that its programs should go."""
    return resident() >= _least + GROWTH or mappings() >= MAPPINGS * int(LIMIT.read_text())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    global _least
    if sys.platform != "linux" or nextitem is None or nextitem.path == item.path or not crowded():
        return
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _least = resident()
