"""Data cursor: after any kills, on any number of hosts and workers, the same documents in the same order."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data import DataConfig, Prefetcher, SourceConfig, load_dataset, write_tokens
from jaxllm.text import ByteTokenizer
from tests import environment
from tests.proofs.harness import proof

STEPS = 40


class Numbers(ByteTokenizer):
    """A vocabulary in which every document of a test has a token of its own."""

    vocab_size = 1 << 16


def token_file(path: Path, rng: random.Random, first: int) -> int:
    """Documents of random lengths; document d is the token first + d again and again. Returns how many."""
    documents = rng.randint(3, 120)
    lengths = [rng.choice([2, 3, rng.randint(2, 60)]) for _ in range(documents)]
    write_tokens(path, (np.full(n, first + d) for d, n in enumerate(lengths)), Numbers())
    return documents


def random_config(folder: Path, rng: random.Random) -> DataConfig:
    """Token files of one source, or of a mixture of two to four, and how they are read."""
    batch_size = rng.choice([1, 2, 4, 6, 8, 12, 16])
    common: dict[str, Any] = {
        "tokenizer": "model",
        "seq_len": rng.choice([4, 7, 16, 33]),
        "batch_size": batch_size,
        "packing": rng.choice(["concat", "documents"]),
        "seed": rng.randrange(1 << 30),
        "heldout_fraction": 0.0,
    }
    count = rng.choice([1, 2, 3, 4])
    first, sources = 0, []
    for number in range(count):
        file = folder / f"{number}.bin"
        first += token_file(file, rng, first)
        weight = rng.choice([1, 2, 5, 0.3, 0.07])
        # The first goes on for ever, so that a renormalised run has no end.
        limit = None if number == 0 else rng.choice([None, 0.5, 1, 2.5])
        sources.append(SourceConfig(f"s{number}", str(file), weight=weight, max_epochs=limit))
    if count == 1:
        return DataConfig(source=sources[0].source, **common)
    return DataConfig(mixture=tuple(sources), when_exhausted="renormalise", **common)


def documents_of(batch: Any) -> list[list[tuple[int, int]]]:
    """Documents of each row in order: (document, tokens of it)."""
    rows = []
    for tokens, segments in zip(np.asarray(batch.tokens), np.asarray(batch.segment_ids), strict=True):
        starts = np.flatnonzero(np.diff(segments, prepend=0) * (segments > 0))
        rows.append([(int(tokens[s]), int((segments == segments[s]).sum())) for s in starts])
    return rows


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@proof("data", count=200, sample=2)
def cursor_histories(seed: int) -> None:
    """A random history: after each kill everything is opened anew from the files, with another number of hosts, each
    with a prefetch thread of another depth, from the cursor that was saved last; batches after it were read for
    nothing. What is trained on is the unbroken run, document for document."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        config = random_config(Path(name), rng)
        unbroken = load_dataset(config, Numbers()).train
        expected = [documents_of(unbroken.batch_at(step)) for step in range(STEPS)]
        seen: list[Any] = []
        saved = json.dumps(unbroken.cursor(0))
        while len(seen) < STEPS:
            train = load_dataset(config, Numbers()).train
            step = train.check_cursor(json.loads(saved))
            assert step == len(seen)
            hosts, until = rng.choice(divisors(config.batch_size)), min(STEPS, step + rng.randint(1, 20))
            readers = [
                Prefetcher(train, step, documents_of, depth=rng.randint(1, 4), shard=n, num_shards=hosts)
                for n in range(hosts)
            ]
            kill_after_save = rng.randint(0, 5)
            try:
                for at in range(step, until):
                    rows = []
                    for reader in readers:
                        number, part = next(reader)
                        assert number == at
                        rows += part
                    if at < until - kill_after_save or at == step:
                        seen.append(rows)
                        saved = json.dumps(train.cursor(at + 1))
            finally:
                for reader in readers:
                    reader.close()
        assert seen == expected, f"seed {seed}"


CONSUMER = """
import json, sys
from jaxllm.data import Prefetcher, load_dataset
from jaxllm.config import from_dict
from jaxllm.data import DataConfig
from tests.proofs.data.cursor import Numbers, documents_of
config, cursor, shard, hosts, out = sys.argv[1:]
train = load_dataset(from_dict(DataConfig, json.loads(config)), Numbers()).train
first = train.check_cursor(json.loads(cursor))
with open(out, "a") as log, Prefetcher(train, first, documents_of, shard=int(shard), num_shards=int(hosts)) as batches:
    for step, rows in batches:
        log.write(json.dumps([step, rows]) + "\\n")
        log.flush()
        if step == 399:
            break
"""


@proof("data", count=6, sample=1)
def cursor_kill9(seed: int) -> None:
    """Hosts that are processes, killed with SIGKILL at a random moment; the next ones are more or fewer."""
    from jaxllm.config import to_dict

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = random_config(folder, rng)
        unbroken = load_dataset(config, Numbers()).train
        step, text = 0, json.dumps(to_dict(config))
        for round_ in range(2):
            hosts = rng.choice([d for d in divisors(config.batch_size) if d <= 3])
            cursor = json.dumps(unbroken.cursor(step))
            logs = [folder / f"{round_}-{n}.log" for n in range(hosts)]
            running = [
                subprocess.Popen(
                    [sys.executable, "-c", CONSUMER, text, cursor, str(n), str(hosts), str(log)], cwd=environment.ROOT
                )
                for n, log in enumerate(logs)
            ]
            try:
                deadline = time.monotonic() + 120
                while not all(log.exists() and log.read_bytes().count(b"\n") >= 3 for log in logs):
                    assert time.monotonic() < deadline, "a host gives no batch"
                    assert all(one.poll() in (None, 0) for one in running), "a host failed"
                    time.sleep(0.02)
                time.sleep(rng.uniform(0, 0.1))
            finally:
                for one in running:
                    one.send_signal(signal.SIGKILL)
                    one.wait()
            # A line that the kill has cut is a batch that no host finished.
            parts = [[json.loads(line) for line in log.read_text().split("\n")[:-1]] for log in logs]
            whole = min(map(len, parts))
            for at in range(whole):
                assert {part[at][0] for part in parts} == {step + at}
                rows = [[tuple(one) for one in row] for part in parts for row in part[at][1]]
                assert rows == documents_of(unbroken.batch_at(step + at)), f"seed {seed}, step {step + at}"
            step += whole
