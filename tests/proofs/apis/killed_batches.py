"""Batches survive kills: a server process gets SIGKILL in mid-batch, is started again, and answers each line once."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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


@contextlib.contextmanager
def process(folder: str) -> Iterator[subprocess.Popen[str]]:
    """A server in a process; it is killed at the end."""
    command = [sys.executable, "-m", "tests.serve.alone", str(SECONDS), folder]
    made = subprocess.Popen(command, cwd=environment.ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield made
    finally:
        made.kill()
        made.wait()
        assert made.stdout is not None
        made.stdout.close()


def client_of(server: subprocess.Popen[str]) -> openai.OpenAI:
    """Client of a server, once that is ready."""
    assert server.stdout is not None
    return openai.OpenAI(base_url=f"http://127.0.0.1:{int(server.stdout.readline())}/v1", api_key="-", max_retries=0)


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
    with tempfile.TemporaryDirectory() as folder:
        batch = None
        for _ in range(KILLS):
            with process(folder) as server:
                if batch is not None and rng.random() < 0.2:
                    time.sleep(rng.uniform(0, 4))  # at some moment of its start
                else:
                    with client_of(server) as client:
                        batch = begun(client, rows) if batch is None else batch
                        time.sleep(rng.uniform(0, LATEST))
            assert batch is not None
            late += has_ended(folder, batch.id)
        with process(folder) as server, client_of(server) as client:
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
