"""Wheels for a machine without a network that has Python 3.12 and jax, and none of jaxllm's other requirements."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PRESENT = re.compile(r"(jax|jaxlib|jax-cuda.*|nvidia-.*|libtpu|numpy|scipy|ml-dtypes|opt-einsum)$")
"""Packages that come with jax."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def needed() -> dict[str, str]:
    """Name -> version of jaxllm's requirements and theirs, as installed here, without what comes with jax."""
    found: dict[str, str] = {}
    names = ["jaxllm"]
    for name in names:
        for line in metadata.requires(name) or ():
            requirement, _, marker = line.partition(";")
            other = re.split(r"[\s\[<>=!~(]", requirement.strip())[0].lower().replace("_", "-")
            if "extra ==" in marker or PRESENT.match(other) or other in names:
                continue
            try:
                found[other] = metadata.version(other)
            except metadata.PackageNotFoundError:  # of another platform or Python
                continue
            names.append(other)
    return found


def download(folder: Path) -> int:
    """Downloads a wheel of each for Python 3.12 on Linux; returns an exit status."""
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    wanted = [f"{name}=={version}" for name, version in sorted(needed().items())]
    return subprocess.run([*command, *platforms, "--implementation", "cp", "-d", str(folder), *wanted]).returncode
