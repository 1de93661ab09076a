"""Path of a new user: README.md's commands do what it says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.readme import COMMANDS, path
from tests.environment import ROOT
from tests.proofs.harness import proof

ALSO_COVERS = ("README.md",)


@proof("front", cases=tuple(COMMANDS), sample=1)
def new_user(command: str) -> None:
    """The command as printed, with small settings, in an empty folder; commands that it needs run first."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environ.pop("XLA_FLAGS", None)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.docs.readme", str(COMMANDS.index(command))],
            cwd=folder, env=environ, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


OWN = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS", "MAKEFLAGS", "MAKELEVEL")
"""What this process was told and a newcomer is not, beside what begins with JAX."""


@proof("front", cases=("from a clone to a served model",), sample=1)
def new_user_path(case: str) -> None:
    """Exactly as printed, one after the other in one shell, in a fresh clone with an environment of its own."""
    environ = {name: value for name, value in os.environ.items() if name not in OWN and not name.startswith("JAX")}
    environ |= {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}  # which Python's venv `make` makes
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "jaxllm"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
        *before, ask = path(clone / "README.md")
        script = "\n".join(["set -ex", *before, f"{ask} > answer.json"])
        log = Path(folder) / "log"
        with log.open("w") as file:
            shell = subprocess.Popen(
                ["bash", "-c", script], cwd=clone, env=environ, stdout=file, stderr=file, start_new_session=True
            )
            try:
                status = shell.wait(timeout=5400)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)  # the server, which would serve on
        said = log.read_text()
        assert status == 0, said
        assert "<svg" in (clone / "runs/quickstart/report.html").read_text()
        assert (clone / "smollm2-chats/model.safetensors").is_file()
        answer = json.loads((clone / "answer.json").read_text())
        assert answer["choices"][0]["message"]["content"].strip(), answer
        print(said, answer)
