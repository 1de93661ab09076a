"""Files of the repository that know an addition by name."""

from __future__ import annotations

import re

from tests.environment import ROOT


def files_that_name(name: str) -> set[str]:
    """Python files, relative to the repository, that contain a name: an addition's own file and its tests, no other."""
    found = set()
    for folder in ("jaxllm", "pallas_kernels", "sharding", "recipes", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")):
                found.add(path.relative_to(ROOT).as_posix())
    return found
