"""Shims around JAX: what it has no public name for. Each says which versions need it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any


def share_compiled_programs_of_cpus() -> None:
    """Gives a program of several CPU processes one key in the persistent compilation cache, whichever process looks.

    JAX 0.10.2 hashes the topology as a process sees it, in which a CPU process differs from the others, and only
    process 0 writes to the cache. So the others would compile every program again at each start. The key still has the
    program, the compiler's options, the assignment of devices to processes, and the processor's instruction sets.
    A JAX without that function is left as it is: this only saves time.
    """
    from jax._src import cache_key

    original = getattr(cache_key, "_hash_accelerator_config", None)
    if original is None or getattr(original, "of_all_processes", False):
        return

    @functools.wraps(original)
    def hash_devices(hash_obj: Any, accelerators: Any) -> None:
        devices = list(accelerators.flat)
        if any(device.platform != "cpu" for device in devices):
            original(hash_obj, accelerators)
            return
        hash_obj.update(repr([(d.device_kind, d.process_index, d.id) for d in devices]).encode() + _instructions())

    hash_devices.of_all_processes = True  # pyright: ignore[reportAttributeAccessIssue]
    cache_key._hash_accelerator_config = hash_devices


@functools.cache
def _instructions() -> bytes:
    """Digest of the instruction sets of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return b""
    return hashlib.sha256(next((s for s in lines if s.startswith(("flags", "Features"))), "").encode()).digest()
