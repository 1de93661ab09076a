"""Reference loss curves of runs that a laptop does, with their receipts: docs/curves/NAME.json and NAME.png.

    python -m benchmarks.curves [NAME ...]    runs them and writes what came out; all of them: half an hour

tests/recipes/test_curves.py runs the first steps of one of them again and compares. Commit first: the receipt names it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs/curves"

COMMANDS = {
    "quickstart": "jaxllm train quickstart",
    "gpt2_124m": (
        "jaxllm train recipes/gpt2.py:gpt2_124m --data.source shakespeare --data.tokenizer bpe:2048 --data.seq-len 64"
        " --data.batch-size 4 --steps 20 --model.dtype float32 --model.remat none --optim.schedule.warmup 0.2"
        " --eval-every 0"
    ),
    "sft_smollm2": (
        "jaxllm train sft_smollm2 --steps 10 --data.seq-len 64 --data.batch-size 4 --accumulate 1 --log-every 1"
        " --data.heldout-fraction 0"
    ),
}
"""The full quickstart; of the others the first steps, with small batches of short rows."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Loss curve of a run, with the receipt to reproduce it.

    Attributes:
        command: what was run.
        receipt: the run's receipt (jaxllm.train.records.receipt): commit, versions, seed, settings, data hash, result.
        losses: loss of each step in nats per token.
    """

    command: str
    receipt: dict[str, Any]
    losses: list[float]


def read(name: str) -> Curve:
    """A stored one."""
    return Curve(**json.loads((FOLDER / f"{name}.json").read_text()))


def run(name: str) -> Curve:
    """Runs a command and keeps its curve."""
    from jaxllm import cli
    from jaxllm.files import write_json
    from jaxllm.train.records.run_directory import RunDirectory

    with tempfile.TemporaryDirectory() as out:
        status = cli.main([*shlex.split(COMMANDS[name])[1:], "--out", out])
        assert status == 0, status
        files = RunDirectory(next(Path(out).iterdir()))
        receipt = json.loads(files.receipt.read_text())
        receipt["config"]["out"] = "runs"  # where it lay is nobody's matter
        losses = [round(row["loss"], 6) for row in files.read_metrics() if "nll" in row]
        shutil.copy(files.plot, FOLDER / f"{name}.png")
    curve = Curve(COMMANDS[name], receipt, losses)
    write_json(FOLDER / f"{name}.json", dataclasses.asdict(curve))
    return curve


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for chosen in sys.argv[1:] or COMMANDS:
        run(chosen)
