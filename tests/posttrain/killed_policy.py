"""An asynchronous run of the tiny policy in a process of its own, so that it can be killed at any moment.

python -m tests.posttrain.killed_policy FOLDER STEPS BOUND    trains, or resumes, and ends when all steps are done
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests import environment  # first: it sets up JAX

from jaxllm.checkpoint import CheckpointConfig  # isort: skip
from jaxllm.posttrain import PolicyRunConfig, train_policy  # isort: skip
from jaxllm.posttrain.policy_training import open_policy_data, with_algorithm  # isort: skip
from tests.posttrain.tiny_policy import policy_run  # isort: skip

LIMIT = 300.0
"""Seconds after which a process that makes no progress has failed."""


def killed_run(folder: Path, steps: int, bound: int) -> PolicyRunConfig:
    """The run: 8 completions a step, a checkpoint every 3 steps."""
    return policy_run(
        folder, steps=steps, max_staleness=bound, group=2, checkpoint=CheckpointConfig(every=3, keep_last=2)
    )


def survives_kills(folder: Path, seed: int, *, steps: int, bound: int, kills: int) -> None:
    """Kills a run at random moments, lets the last process end, and checks the log of every life.

    No completion of a step is lost or doubled, each step has its own prompts, and no token is older than the bound: the
    weights that sampled it are at most so many updates behind those that it trained.
    """
    rng = random.Random(seed)
    config = killed_run(folder, steps, bound)
    log, done = folder / "runs" / config.name / "episodes.jsonl", 0
    for life in range(kills + 1):
        with (folder / f"life{life}.txt").open("w") as said:
            running = subprocess.Popen(
                [sys.executable, "-m", "tests.posttrain.killed_policy", str(folder), str(steps), str(bound)],
                cwd=environment.ROOT, stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            if life < kills:
                # One life in five ends before its first step; the others after some.
                wanted = 0 if rng.random() < 0.2 else done + rng.randint(1, max((steps - done) // (kills - life), 1))
                _wait_for(log, running, wanted)
                time.sleep(rng.uniform(0, 3.0 if wanted == 0 else 0.3))
            else:
                assert running.wait(LIMIT) == 0, (folder / f"life{life}.txt").read_text()[-2000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                running.send_signal(signal.SIGKILL)
            running.wait()
        rows = whole_rows(log)
        done = max((row["step"] for row in rows), default=0)
        check_versions(rows, bound)
    rows = whole_rows(log)
    source = open_policy_data(with_algorithm(config)).source
    for step in range(steps):
        own = Counter(row["prompt"] for row in rows if row["step"] == step + 1)
        want = Counter({prompt.text: config.rollout.group for prompt in source.prompts_at(step)})
        assert own == want, f"step {step + 1}: {own}, not {want}"
    assert max(row["step"] - version for row in rows for version in row["versions"]) == bound
    metrics = whole_rows(log.with_name("metrics.jsonl"))
    assert [row["step"] for row in metrics if "reward" in row] == list(range(1, steps + 1))


def check_versions(rows: list[dict[str, Any]], bound: int) -> None:
    """Checks that no token of a log is older than the bound, or of weights that were not there yet."""
    for row in rows:
        for version in row["versions"]:
            assert 0 <= row["step"] - version <= bound, f"step {row['step']}: a token of version {version}"


def whole_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a log whose last line a kill may have cut."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def _wait_for(log: Path, running: subprocess.Popen[Any], step: int) -> None:
    """Waits until a log has a step, or its process ends."""
    deadline = time.monotonic() + LIMIT
    while step and max((row["step"] for row in whole_rows(log)), default=0) < step and running.poll() is None:
        assert time.monotonic() < deadline, f"no step {step} in {LIMIT} s"
        time.sleep(0.02)


def main() -> None:
    """Trains, or resumes, the run."""
    folder, steps, bound = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    result = train_policy(killed_run(folder, steps, bound))
    sys.exit(0 if result.complete else 1)


if __name__ == "__main__":
    main()
