"""Settings of XLA that it reads when it starts: no search for accelerators that are not there, host memory for GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Device files of NVIDIA, AMD, WSL and TPU (old and new drivers).
DEVICE_FILES = ("nvidiactl", "nvidia0", "kfd", "dxg", "accel0", "vfio/0", "vfio/vfio")


def prefer_cpu_without_accelerator() -> None:
    """Sets JAX_PLATFORMS=cpu on Linux machines without an accelerator, unless the user has set it.

    The TPU and GPU compilers that ``jaxllm[tpu,aot-gpu]`` installs would otherwise look for their devices at the first
    use of jax and fail with pages of warnings.
    """
    if sys.platform.startswith("linux") and not any(Path("/dev", name).exists() for name in DEVICE_FILES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def lift_host_memory_limit() -> None:
    """Lets GPUs pin as much host memory as there is, unless the user has set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB.

    XLA pins 64 GiB at most by default, and what is offloaded beyond that fails. Nothing is reserved by the limit.
    """
    if sys.platform.startswith("linux"):
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, gib)))
