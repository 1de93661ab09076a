"""The path of a new user: every command of README.md does what it says, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from tests.docs.readme import COMMANDS
from tests.environment import ROOT
from tests.proofs.harness import proof


@proof("front", cases=tuple(COMMANDS), sample=1)
def new_user(command: str) -> None:
    """As printed, made small; what comes before it is done first."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environ.pop("XLA_FLAGS", None)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.docs.readme", str(COMMANDS.index(command))],
            cwd=folder, env=environ, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
