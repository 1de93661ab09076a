"""Kills a saving process by SIGKILL at a random moment and checks the checkpoints that remain."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

from jaxllm.checkpoint import Checkpointer
from tests import environment
from tests.checkpoint.states import assert_same, make_state


def kill_while_saving(directory: Path, seed: int, kills: int = 1) -> None:
    """Runs the child of `saver.py` and kills it, `kills` times in a row into the same directory.

    Asserts after each kill: the newest checkpoint verifies and resumes to the bits that were saved, nothing that was
    on disk before is lost, no leftovers stay, and a fresh process can go on.
    """
    moments = random.Random(seed)
    first = 1
    for _ in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.saver", str(directory), str(seed), str(first)],
            cwd=environment.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        child.stdout.readline()  # the first save has begun
        time.sleep(moments.uniform(0.0, 0.4))
        child.kill()
        output, errors = child.communicate()
        assert child.returncode == -9, errors
        promised = max([int(n) for n in re.findall(r"on disk (\d+)", output)], default=0)
        first = 1 + _check(directory, seed, max(promised, first - 1))


def _check(directory: Path, seed: int, promised: int) -> int:
    """Returns the step that resuming starts from; 0 if nothing was ever on disk."""
    with Checkpointer(directory, read_only=True) as reader:
        listed = reader.steps()
    with Checkpointer(directory) as checkpointer:
        names = {p.name.split("_")[0] for p in directory.iterdir()}
        assert names <= {".lock", "step"}, names
        assert checkpointer.steps() == listed
        for step in listed:
            checkpointer.verify(step)
        found = checkpointer.resume(make_state(seed, 1, width=64))
        if found is None:
            assert promised == 0
            return 0
        assert found.step == listed[-1] >= promised
        assert_same(found.state, make_state(seed, found.step, width=64))
        assert found.meta == {"cursor": found.step * 7}
        return found.step
