"""Memory of long reading through the prefetch thread."""

from __future__ import annotations

import json
import subprocess
import sys

from tests import environment
from tests.proofs.harness import proof

EPOCHS = 10
CODE = """
import json, tempfile
from pathlib import Path
from benchmarks.data import memory, write_text
with tempfile.TemporaryDirectory() as folder:
    write_text(Path(folder))
    print(json.dumps(memory(Path(folder), {epochs})))
"""


@proof("data", count=1, sample=1, bound=0.02, parallel=False)
def memory_is_flat(seed: int) -> float:
    """Ten epochs of 12.6 million tokens through the prefetch thread: what the process holds beyond the mapped file
    after the tenth, over after the second, less one."""
    command = [sys.executable, "-c", CODE.format(epochs=EPOCHS)]
    done = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    held = json.loads(done.stdout)
    assert len(held) == EPOCHS
    assert held[0] > 10  # MiB: it was measured
    return max(held[2:]) / held[1] - 1
