"""Notebooks run from the first cell to the last, and draw."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

from notebooks.build import NAMES
from tests.environment import ROOT
from tests.proofs.harness import proof

ALSO_COVERS = ("notebooks/*.py",)


@proof("front", cases=tuple(NAMES), sample=1)
def notebooks(name: str) -> None:
    """Each in an interpreter of its own, since some choose their devices; warnings are for the reader."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-m", "notebooks.build", "run", name, folder],
            cwd=folder, env=environ, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    drawn = re.fullmatch(r"(\d+) figures", done.stdout.splitlines()[-1])
    assert drawn is not None, done.stdout
    assert int(drawn[1]) > 0
