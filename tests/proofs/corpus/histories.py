"""Histories of preparing a corpus: processes killed and resumed with other numbers of workers give the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxllm.data.prepare.corpus_config import read_corpus_config
from jaxllm.data.prepare.preparation import prepare_corpus
from tests import environment
from tests.proofs.harness import proof

LIMIT = 240


def draw_corpus(folder: Path, rng: np.random.Generator) -> Path:
    """Draws input files with duplicates and bad rows, and settings; returns the settings' file."""
    vocabulary = [f"w{number}" for number in range(500)]
    made: list[str] = []
    for number in range(int(rng.integers(3, 7))):
        lines = []
        for _ in range(int(rng.integers(20, 120))):
            draw = rng.random()
            if made and draw < 0.15:
                listed = made[rng.integers(len(made))].split()
                if draw < 0.1:
                    listed[int(rng.integers(len(listed)))] = "changed"
                text = " ".join(listed)
            else:
                text = " ".join(rng.choice(vocabulary, rng.integers(20, 120)))
            made.append(text)
            lines.append("{" if draw > 0.95 else json.dumps({"text": text}))
        (folder / f"in{number}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "evals.jsonl").write_text(json.dumps({"text": " ".join(made[0].split()[:15])}) + "\n")
    path = folder / "corpus.toml"
    path.write_text(
        f'out = "out"\ntokenizer = "byte"\nshard_tokens = {int(rng.integers(2000, 30000))}\n[pii]\n'
        f"[dedup]\nthreshold = {rng.choice([0.7, 0.8, 0.9])}\n"
        '[decontamination]\nevals = ["evals.jsonl"]\n'
        '[[source]]\nname = "one"\nfiles = ["in0.jsonl"]\nlicense = "CC0"\n'
        '[[source]]\nname = "rest"\nfiles = ["in[1-9].jsonl"]\nlicense = "CC0"\n'
    )
    return path


def contents(folder: Path) -> dict[str, str]:
    """Hash of every file of a folder by its name."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}


def done_tasks(out: Path) -> int:
    """Tasks done so far, about; 0 if a folder is renamed or removed while they are counted."""
    try:
        return sum(1 for path in out.rglob("*") if path.parent.parent.name == ".work" or path.suffix == ".json")
    except OSError:
        return 0


def start(corpus: Path, workers: int) -> subprocess.Popen[bytes]:
    """Process that prepares a corpus, in a group of its own."""
    command = [sys.executable, "-m", "jaxllm.cli", "data", "prepare", str(corpus), "--workers", str(workers)]
    env = os.environ | {"PYTHONPATH": str(environment.ROOT), "JAX_PLATFORMS": "cpu"}
    with (corpus.parent / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=corpus.parent, env=env, stdout=log, stderr=log, start_new_session=True)


@proof("corpus", count=60, sample=1, parallel=False, counts=("kills",))
def killed_runs_give_the_same_bytes(seed: int) -> dict[str, float]:
    """Runs killed by SIGKILL, all processes at once, when a random number of tasks is done, and resumed with 1, 4 or 2
    workers: manifest, shards, tokenizer and report are those of one uninterrupted process, file by file."""
    rng = np.random.default_rng(seed)
    kills = 0
    with tempfile.TemporaryDirectory() as name:
        corpus = draw_corpus(Path(name), rng)
        out = Path(name) / "out"
        prepare_corpus(read_corpus_config(corpus))
        expected = contents(out)
        out.rename(Path(name) / "expected")
        for workers in rng.permutation([1, 4, 2])[: int(rng.integers(1, 4))].tolist():
            process = start(corpus, workers)
            until, end = done_tasks(out) + int(rng.integers(1, 10)), time.monotonic() + LIMIT
            while process.poll() is None and done_tasks(out) < until:
                assert time.monotonic() < end, "nothing is done"
                time.sleep(0.002)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
            process.wait()
        last = start(corpus, int(rng.choice([1, 2])))
        assert last.wait(LIMIT) == 0, (Path(name) / "log").read_text()[-3000:]
        assert contents(out) == expected
    return {"kills": float(kills)}
