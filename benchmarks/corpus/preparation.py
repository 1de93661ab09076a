"""Throughput and memory of preparing a corpus, beside datatrove alone and `jaxllm data dedup`.

    python -m benchmarks.corpus.preparation [--documents 20000] [--rounds 3]
    python -m benchmarks.corpus.preparation --memory 100000 1000000

Synthetic documents of 100 to 400 words in files of 10,000; a tenth are copies, a tenth nearly. Everyone reads the same
JSONL and writes the documents that stay, in one process on one core: ours and datatrove by exact and MinHash
deduplication with as many hashes (`jaxllm data dedup` with 128). Turns alternate within one run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

FILE_DOCUMENTS = 10_000
HASHES = 126

OURS = """
import sys
from pathlib import Path
from jaxllm.data.prepare.corpus_config import CorpusConfig, CorpusSource, DedupRule
from jaxllm.data.quality import near_duplicates
from jaxllm.data.prepare.preparation import prepare_corpus
folder = Path(sys.argv[1])
if sys.argv[3:]:
    near_duplicates.PARTITION_RECORDS = int(sys.argv[3])
    near_duplicates.RUN_RECORDS = int(sys.argv[3]) // 4
source = CorpusSource("synthetic", (str(folder / "in" / "*.jsonl"),), "none")
config = CorpusConfig(str(folder / "ours"), "byte", (source,), dedup=DedupRule(hashes=int(sys.argv[2])))
stages = {}
def progress(stage, done, total):
    stages.setdefault(stage, [time.perf_counter(), 0])[1] = time.perf_counter()
measure(lambda: prepare_corpus(config, progress=progress))
result["stages"] = {name: round(end - begin, 2) for name, (begin, end) in stages.items()}
"""
DATATROVE = """
import sys
import xxhash
digest = xxhash.xxh64_intdigest
xxhash.xxh64_intdigest = lambda data: digest(data.encode())  # datatrove 0.10 calls it as xxhash 3 took it
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer
class Words(WordTokenizer):  # in place of its own tokenizer, spaCy's, which takes most of its time
    def word_tokenize(self, text):
        return text.split()
    def sent_tokenize(self, text):
        return [text]
    def span_tokenize(self, text):
        return [(0, len(text))]
folder, hashes = sys.argv[1], int(sys.argv[2])
config = MinhashConfig(num_buckets=21, hashes_per_bucket=hashes // 21)
tasks = len(__import__("os").listdir(folder + "/in"))
base = folder + "/datatrove/"
def reader():
    return JsonlReader(folder + "/in")
def stage(name, pipeline, tasks):
    LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=base + "logs/" + name).run()
def run():
    words = Words()
    stage("1", [reader(), MinhashDedupSignature(base + "sigs", config, language=words)], tasks)
    stage("2", [MinhashDedupBuckets(base + "sigs", base + "buckets", config=config)], config.num_buckets)
    stage("3", [MinhashDedupCluster(base + "buckets", base + "remove", config=config)], 1)
    stage("4", [reader(), MinhashDedupFilter(base + "remove"), JsonlWriter(base + "out")], tasks)
measure(run)
"""
COMMAND = """
import sys
from pathlib import Path
from jaxllm.cli import main
folder = Path(sys.argv[1])
files = [str(path) for path in sorted((folder / "in").iterdir())]
measure(lambda: main(["data", "dedup", *files, "--out", str(folder / "command.jsonl")]))
"""
MEASURE = """
import json, os, sys, threading, time
result = {}
def measure(run):
    stop, peak = threading.Event(), [0]
    def watch():  # memory of its own: pages of mapped files, which the system can take back, are not counted
        while not stop.wait(0.02):
            lines = open("/proc/self/status").read().split("RssAnon:")[1]
            peak[0] = max(peak[0], int(lines.split()[0]))
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    begin, cpu = time.perf_counter(), time.process_time()
    kept = sys.stdout
    sys.stdout = sys.stderr
    run()
    sys.stdout = kept
    result.update(seconds=time.perf_counter() - begin, cpu=time.process_time() - cpu)
    stop.set()
    thread.join()
    result["mib"] = peak[0] / 1024
"""
PEERS = {"jaxllm data prepare": OURS, "datatrove": DATATROVE, "jaxllm data dedup": COMMAND}


def write_documents(folder: Path, count: int, each: int = FILE_DOCUMENTS, seed: int = 0) -> None:
    """Writes synthetic documents to FOLDER/in, files of `each`; memory does not grow with their number."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(20_000)])
    (folder / "in").mkdir(parents=True)
    earlier: list[list[str]] = []
    for number in range(-(-count // each)):
        with (folder / "in" / f"{number:05}.jsonl").open("w") as file:
            for _ in range(min(each, count - number * each)):
                draw = rng.random()
                words = vocabulary[rng.integers(0, len(vocabulary), rng.integers(100, 400))].tolist()
                if earlier and draw < 0.2:
                    words = list(earlier[rng.integers(len(earlier))])
                    if draw < 0.1:
                        words[int(rng.integers(len(words)))] = "changed"
                elif len(earlier) < 1000:
                    earlier.append(words)
                else:
                    earlier[rng.integers(1000)] = words
                file.write(json.dumps({"text": " ".join(words)}) + "\n")


def run_peer(code: str, folder: Path, *more: str) -> dict[str, float]:
    """Seconds, seconds of processor time and peak memory in MiB of a program, in a process of its own."""
    program = MEASURE + code + "\nprint(json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(HASHES), *more], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def peak_memory(documents: int, each: int = FILE_DOCUMENTS, partition: int | None = None) -> dict[str, float]:
    """Seconds and peak memory of preparing so many documents, files of `each`, in one process.

    partition: records that a task of deduplication takes, less than by default, to show in a small run what memory
        depends on.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder), documents, each)
        return run_peer(OURS, Path(folder), *([] if partition is None else [str(partition)]))


def main() -> None:
    """Prints a table of throughput, or of memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, nargs="+", default=[])
    given = parser.parse_args()
    for count in given.memory:
        found = peak_memory(count)
        rate = count / found["seconds"]
        print(f"{count:,} documents: {found['mib']:.0f} MiB, {rate:,.0f} documents/s, {found['stages']}", flush=True)
    if given.memory:
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in PEERS}
    for _ in range(given.rounds):
        for name, code in PEERS.items():
            with tempfile.TemporaryDirectory() as folder:
                write_documents(Path(folder), given.documents)
                rounds[name].append(run_peer(code, Path(folder)))
    print("| | documents/s | documents/s of processor time | peak MiB |\n| --- | ---: | ---: | ---: |")
    for name, found in rounds.items():
        wall, cpu = (np.median([given.documents / one[key] for one in found]) for key in ("seconds", "cpu"))
        print(f"| {name} | {wall:,.0f} | {cpu:,.0f} | {max(one['mib'] for one in found):,.0f} |")


if __name__ == "__main__":
    main()
