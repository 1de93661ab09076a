"""Batches survive kills: a server process gets SIGKILL in mid-batch, is started again, and answers each line once."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai

from tests import environment
from tests.proofs.harness import proof
from tests.serve.batch_features import begun, ended, line, rows_of

KILLS, LINES, TOKENS, SECONDS = 4, 90, 20, 0.01
"""Kills of a trial; lines of its batch, tokens of each, seconds of each token. Six lines are answered at a time, so
that the batch takes three seconds, more than pass before all kills."""
LATEST = 0.6


@functools.cache
def forking_process() -> subprocess.Popen[str]:
    """Process that forks servers; it lives as long as this one."""
    command = [sys.executable, "-m", "tests.serve.forked", str(SECONDS)]
    made = subprocess.Popen(command, cwd=environment.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(made.kill)
    return made


class StubServers:
    """Stub servers, one at a time, each in a process that is forked and can be killed.

    Args:
        folder: of their batches.
    """

    def __init__(self, folder: str):
        self._folder, self._pid, self._parent = folder, 0, forking_process()

    def start(self) -> None:
        """Starts a server; it is not ready yet."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(f"{self._folder}\n")
        self._parent.stdin.flush()
        while len(words := self._read()) != 1:
            pass  # the port of a server that was killed before it was asked for
        self._pid = int(words[0])

    def client(self) -> openai.OpenAI:
        """Client of the server, once that is ready."""
        while (words := self._read())[0] != str(self._pid):
            pass
        return openai.OpenAI(base_url=f"http://127.0.0.1:{words[1]}/v1", api_key="-", max_retries=0)

    def kill(self) -> None:
        """Kills the server, and returns once it is gone."""
        os.kill(self._pid, signal.SIGKILL)
        while Path(f"/proc/{self._pid}").exists():
            time.sleep(0.001)
        self._pid = 0

    def close(self) -> None:
        """Kills the server, if there is one."""
        if self._pid:
            self.kill()

    def _read(self) -> list[str]:
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        assert line, "the process that forks servers has ended"
        return line.split()


def has_ended(folder: str, name: str) -> bool:
    """Whether a batch has ended, by its journal."""
    rows = (Path(folder) / "batches" / name / "journal.jsonl").read_text().splitlines()
    return any('"status":"completed"' in row for row in rows)


@proof("apis", count=25, sample=1, bound={"lost": 0, "twice": 0, "wrong": 0, "late": 0})
def killed_batches_answer_each_line_once(seed: int) -> dict[str, float]:
    """Four kills of a batch of 90 lines, two of them bad, at random moments: 100 kills in all.

    Some kills hit the server while it starts, that is, while it reads the journal.
    """
    rng = random.Random(seed)
    rows: list[Any] = [line(number, max_tokens=TOKENS) for number in range(LINES)]
    for number in rng.sample(range(LINES), 2):
        rows[number] = {**rows[number], "method": "GET"}
    bad = {row["custom_id"] for row in rows if row["method"] == "GET"}
    late = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(StubServers(folder)) as servers:
        batch = None
        for _ in range(KILLS):
            servers.start()
            if batch is not None and rng.random() < 0.2:
                time.sleep(rng.uniform(0, 0.1))  # at some moment of its start
            else:
                with servers.client() as client:
                    batch = begun(client, rows) if batch is None else batch
                    time.sleep(rng.uniform(0, LATEST))
            servers.kill()
            assert batch is not None
            late += has_ended(folder, batch.id)
        servers.start()
        with servers.client() as client:
            done = ended(client, batch, seconds=120)
            found = rows_of(client, done.output_file_id), rows_of(client, done.error_file_id)
        journal = (Path(folder) / "batches" / done.id / "journal.jsonl").read_text().splitlines()
    assert done.status == "completed"
    assert done.request_counts.to_dict() == {"total": LINES, "completed": LINES - 2, "failed": 2}
    counts = Counter(row["custom_id"] for part in found for row in part)
    recorded = Counter(row["line"] for row in map(json.loads, journal) if "line" in row)
    texts = {row["response"]["body"]["choices"][0]["text"] for row in found[0]}
    return {
        "lost": sum(counts[row["custom_id"]] == 0 for row in rows),
        "twice": sum(many > 1 for many in (*counts.values(), *recorded.values())),
        "wrong": len(texts ^ {"".join(chr(97 + made % 26) for made in range(1, TOKENS + 1))})
        + len(bad ^ {row["custom_id"] for row in found[1]}),
        "late": late,
    }
