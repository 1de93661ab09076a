"""The tutorial, how-tos and package pages: their blocks run as printed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from tests.docs.pages import blocks
from tests.environment import ROOT
from tests.proofs.harness import proof

ALSO_COVERS = (
    "docs/tutorial.md",
    "docs/install.md",
    "docs/howto/*.md",
    "docs/packages/*.md",
    "jaxllm/*.py",
    "sharding/*.py",
)

DOCS = ROOT / "docs"
NAMED = [DOCS / "tutorial.md", DOCS / "install.md", *sorted((DOCS / "howto").glob("*.md"))]
PAGES = [*NAMED, *sorted(page for page in (DOCS / "packages").glob("*.md") if blocks(page))]


@proof("front", cases=tuple(page.relative_to(DOCS).as_posix() for page in PAGES), sample=2)
def pages(name: str) -> None:
    """Each page in an empty folder, with one CPU device, as a reader has it."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.docs.pages", str(DOCS / name)],
            cwd=folder, env=environ, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(blocks(DOCS / name))} blocks"
