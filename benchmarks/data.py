"""Throughput of the data pipeline alone, beside Hugging Face datasets + DataCollator and a torch DataLoader.

    python -m benchmarks.data [--peer-python PATH] [--rounds 5]

PATH is an interpreter with numpy, torch, transformers and datasets; by default this one. Everyone reads the same
tokens from disk, shuffled, and makes batches of 32 x 1,024 with inputs and targets; ours also has segments and
positions, for attention inside documents. Taking turns in one run; every peer with the number of workers that suits it
best. Then ours reads ten epochs, and what its process holds after each is compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROWS, SEQ_LEN, BATCH = 12_288, 1024, 32
VOCABULARY = 49_152
SECONDS = 3.0

PEER = """
import json, sys, time
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset
folder, seq_len, batch, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(2)

class Rows(Dataset):
    # As nanoGPT and many trainers do: slices of a memory-mapped file.
    def __init__(self):
        self.tokens = np.memmap(folder + "/tokens.u16", np.uint16, "r")
    def __len__(self):
        return (len(self.tokens) - 1) // seq_len
    def __getitem__(self, i):
        piece = torch.from_numpy(self.tokens[i * seq_len : (i + 1) * seq_len + 1].astype(np.int64))
        return {"input_ids": piece[:-1], "labels": piece[1:]}

def hugging_face():
    import datasets
    from transformers import DataCollatorForLanguageModeling
    class Tokenizer:  # the collator asks for little
        pad_token, pad_token_id, padding_side, deprecation_warnings = "<pad>", 0, "right", {}
        def pad(self, examples, return_tensors=None, pad_to_multiple_of=None, **more):
            return {"input_ids": torch.tensor([one["input_ids"] for one in examples])
                    if isinstance(examples[0]["input_ids"], list)
                    else torch.stack([one["input_ids"] for one in examples])}
    return datasets.load_from_disk(folder + "/hf"), DataCollatorForLanguageModeling(Tokenizer(), mlm=False)

def loader(name, workers, formatted):
    if name == "torch":
        return DataLoader(Rows(), batch, shuffle=True, drop_last=True, num_workers=workers)
    data, collator = hugging_face()
    data = data.with_format("torch") if formatted else data
    return DataLoader(data, batch, shuffle=True, drop_last=True, num_workers=workers, collate_fn=collator)

def rate(make):
    batches = iter(make())
    for _ in range(3):
        next(batches)
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        got = next(batches, None)
        if got is None:
            batches = iter(make())
            continue
        tokens += got["input_ids"].numel()
    return tokens / (time.perf_counter() - start)

if __name__ == "__main__":
    if len(sys.argv) > 5:
        import datasets
        from transformers import __version__ as transformers
        tokens = np.memmap(folder + "/tokens.u16", np.uint16, "r")
        rows = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)
        features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
        made = {"input_ids": [row.astype(np.int32) for row in rows]}
        datasets.Dataset.from_dict(made, features=features).save_to_disk(folder + "/hf")
        versions = {"torch": torch.__version__, "datasets": datasets.__version__, "transformers": transformers}
        print(json.dumps(versions))
        sys.exit()
    found = {}
    for name, formats in (("torch", (False,)), ("datasets", (False, True))):
        found[name] = max(rate(lambda: loader(name, workers, f)) for workers in (0, 2) for f in formats)
    print(json.dumps(found))
"""


def write_text(folder: Path) -> int:
    """Documents of log-normal lengths as a token file and as bare tokens; returns the tokens."""
    from jaxllm.data import write_tokens
    from jaxllm.text import ByteTokenizer

    class Words(ByteTokenizer):
        vocab_size = VOCABULARY

    rng = np.random.default_rng(0)
    total, documents = ROWS * SEQ_LEN, []
    while total > 0:
        n = int(min(max(rng.lognormal(6, 1), 16), 20_000))
        documents.append(rng.integers(0, VOCABULARY, n).astype(np.uint16))
        total -= n
    write_tokens(folder / "tokens.bin", documents, Words())
    np.concatenate(documents).tofile(folder / "tokens.u16")
    return sum(map(len, documents))


def open_ours(folder: Path, packing: str):
    """The training rows of the token file."""
    from jaxllm.data import DataConfig, load_dataset
    from jaxllm.text import ByteTokenizer

    class Words(ByteTokenizer):
        vocab_size = VOCABULARY

    config = DataConfig(
        source=str(folder / "tokens.bin"),
        tokenizer="model",
        seq_len=SEQ_LEN,
        batch_size=BATCH,
        heldout_fraction=0.0,
        packing=packing,  # type: ignore[arg-type]
    )
    return load_dataset(config, Words()).train


def rate(batches: Iterator, count: Callable) -> float:
    """Tokens a second over some seconds."""
    for _ in range(3):
        next(batches)
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        tokens += count(next(batches))
    return tokens / (time.perf_counter() - start)


def ours(folder: Path) -> dict[str, float]:
    """Through the prefetch thread, as training reads it."""
    from jaxllm.data import Prefetcher

    found = {}
    for packing in ("concat", "documents"):
        with Prefetcher(open_ours(folder, packing), 0, lambda batch: batch) as batches:
            found[packing] = rate(batches, lambda item: item[1].tokens.size)
    return found


def held() -> float:
    """MiB of this process that are its own (pages of the mapped file belong to the system)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def memory(folder: Path, epochs: int = 10) -> list[float]:
    """MiB held after each epoch."""
    from jaxllm.data import Prefetcher

    train = open_ours(folder, "documents")
    each, found = train.rows_per_epoch // BATCH, []
    with Prefetcher(train, 0, lambda batch: batch) as batches:
        for _ in range(epochs):
            for _ in range(each):
                next(batches)
            found.append(held())
    return found


def peer(python: str, folder: Path, *more: str) -> dict:
    """Runs the same work in another Python with torch or datasets and returns its figures."""
    file = folder / "peer.py"
    file.write_text(PEER)
    command = [python, str(file), str(folder), str(SEQ_LEN), str(BATCH), str(SECONDS), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Entry point of ``python -m benchmarks.data``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = write_text(folder)
        versions = peer(options.peer_python, folder, "prepare")
        print(f"{tokens:,} tokens; batches of {BATCH} x {SEQ_LEN:,}; "
              + ", ".join(f"{k} {v}" for k, v in versions.items()))  # fmt: skip
        rounds = [(ours(folder), peer(options.peer_python, folder)) for _ in range(options.rounds)]
        print("\n|  | million tokens/s | jaxllm, concat, is faster by |\n| --- | ---: | ---: |")
        for label in ("concat", "documents"):
            values = [one[label] / 1e6 for one, _ in rounds]
            print(f"| jaxllm, packing={label} | {statistics.median(values):.1f} |  |")
        for label, text in (("torch", "torch DataLoader over a memory map"), ("datasets", "datasets + DataCollator")):
            values = [other[label] / 1e6 for _, other in rounds]
            ratios = [one["concat"] / other[label] for one, other in rounds]
            print(f"| {text} | {statistics.median(values):.1f} | "
                  f"{statistics.median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f}) |")  # fmt: skip
        found = memory(folder)
        print("\nMiB held after each of ten epochs: " + ", ".join(f"{one:.1f}" for one in found))


if __name__ == "__main__":
    main()
