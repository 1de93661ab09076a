"""Platform selection: keeps jax quiet on machines with accelerator compilers but no accelerator."""

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
